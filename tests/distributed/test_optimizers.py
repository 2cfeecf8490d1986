"""Every optimizer: what decays, what a resume takes over and refuses, and what is not trained. That weights are the
same for every parallel layout is in tests/parity."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.optim import matrices
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.optim.shampoo import inverse_fourth_roots
from expertmesh.training.start.resume import changed_state
from tests.distributed.pool import RankPool
from tests.distributed.reference import sharded_model, train_config
from tests.distributed.whole_runs import SIX_STEPS, Runs, assert_equal_weights, batch_of_12
from tests.parity.case import Case
from tests.rounding import OF_ADDED, OTHER_ORDER, error_beyond
from tests.tiers import tiered

OPTIMIZERS = ["adamw_torch_fused", "adamw_torch_8bit", "adamw_bf16", "muon", "shampoo"]
# between parallel layouts after three steps; a rank with random numbers of its own would be 3e-3 off in bf16
TOLERANCES = {"adamw_torch_8bit": 3e-5, "adamw_bf16": 3e-4, "muon": OTHER_ORDER, "shampoo": OTHER_ORDER}


def test_shampoo_of_an_expert_that_is_reached_late() -> None:
    """Its factors were zeros when the roots were taken."""
    assert torch.equal(inverse_fourth_roots(torch.zeros(1, 3, 3))[0], torch.eye(3))


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_norms_and_biases_do_not_decay(ranks: RankPool, tiny_model: Path, optim: str) -> None:
    (groups,) = ranks.run(decay_by_name, 1, tiny_model, optim)
    exempt = {name for name, weight_decay in groups.items() if weight_decay == 0}
    assert exempt == {name for name in groups if "norm" in name}
    assert set(groups.values()) == {0.0, 0.1}


def decay_by_name(path: Path, optim: str) -> dict[str, float]:
    settings = {"optim": optim}
    model, mesh, _ = sharded_model(path, Topology(1, 1), Case([], settings=settings))
    groups = build_optimizer(model, train_config(**settings), mesh).param_groups
    decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decays) == sum(len(group["params"]) for group in groups)
    return {name: decays.pop(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("optim", ["muon", "shampoo"])
@pytest.mark.parametrize(("world_size", "ep_size"), tiered([(4, 2)], slow=[(1, 1), (3, 1)]))
def test_updates_do_not_depend_on_what_else_is_in_a_stack(
    ranks: RankPool, tiny_model: Path, optim: str, world_size: int, ep_size: int
) -> None:
    """One matrix in each, several, and all; Shampoo's blocks leave rests. One parameter has no gradient in the first
    step. What an update is made of, roots and orthogonal matrices, has the rounding of sums many times over; to be made
    of another matrix would change all of it."""
    found = [ranks.run(updated, world_size, tiny_model, optim, ep_size, size) for size in (1, 2500, 2**23)]
    for other in found[1:]:
        for rank, expected in zip(other, found[0], strict=True):
            for name, (before, weights) in rank.items():
                rounding, change = OF_ADDED * float(before.norm()), expected[name][1] - before
                assert change.any(), name
                assert error_beyond(rounding, weights - before, change) <= 100 * OTHER_ORDER, name


def updated(path: Path, optim: str, ep_size: int, stack_elements: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each parameter, before and after two updates."""
    settings = {"optim": optim, "shampoo_block_size": 24, "shampoo_start": 1, "learning_rate": 1e-3}
    topology = Topology(dist.get_world_size(), ep_size)
    model, mesh, _ = sharded_model(path, topology, Case([], settings=settings))
    with mock.patch.object(matrices, "STACK_ELEMENTS", stack_elements):
        optimizer = build_optimizer(model, train_config(**settings), mesh)
    before = {name: local_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(dist.get_rank())
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.zeros_like(parameter)
            local_tensor(parameter.grad).normal_()
            if step == 0 and "k_proj" in name:
                parameter.grad = None
        optimizer.step()
    return {name: (before[name], local_tensor(p.detach()).clone()) for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("optim", OPTIMIZERS[1:])
def test_resume(runs: Runs, optim: str) -> None:
    """From step 2 of 3: bit for bit on the same ranks, and on others as close as parallel layouts are."""
    runs = runs.of(hidden_size=256)
    common = f"{SIX_STEPS} --optim {optim} --ep-size 2 --max-steps 3 --save-steps 2"
    # of step 2, which step 3 computes with
    common += " --shampoo-start 2 --shampoo-block-size 96" if optim == "shampoo" else ""
    expected = runs(4, f"{common} {batch_of_12(4)}", "whole")
    for world_size, more in ((4, ""), (1, "--ep-size 1"), (2, "--dense-shard hybrid")):
        resumed = f"{common} {batch_of_12(world_size)} {more} --save-steps 0 --resume {expected.checkpoint(2)}"
        found = runs(world_size, resumed, str(world_size))
        assert_equal_weights(found.weights, expected.weights, 0.0 if world_size == 4 else TOLERANCES[optim])


def test_another_optimizers_checkpoint_is_refused(runs: Runs) -> None:
    runs(1, "--max-steps 1 --save-steps 1 --no-export")
    said = "that run had --optim adamw_torch_fused, this one has --optim muon"
    runs.refuses(1, "--max-steps 2 --save-steps 1 --resume auto --optim muon", said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shampoo_block_size": 96}, "had --shampoo-block-size 1024, this one has 96; use --shampoo-block-size 1024"),
        ({"shampoo_start": 3}, "that run had --shampoo-start 10, this one has 3; use --shampoo-start 10"),
        ({"shampoo_frequency": 5}, "this one has 5, by default its --shampoo-frequency; use --shampoo-start 10"),
        ({"shampoo_frequency": 5, "shampoo_start": 10}, None),
    ],
)
def test_factors_of_other_blocks_and_missing_roots_are_refused(settings: dict[str, Any], said: str | None) -> None:
    saved = train_config(optim="shampoo")
    lines = changed_state(saved, train_config(optim="shampoo", **settings))
    assert not lines if said is None else said in "; ".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "frozen"),
    [
        ("--optim adamw_bf16", "experts"),
        ("--optim adamw_bf16 --bf16", "router embeddings norms attention"),
        ("--optim adamw_torch_8bit --bf16", "experts"),
        ("--optim muon --bf16", "router embeddings norms attention"),
        ("--optim shampoo --shampoo-start 1", "experts"),
    ],
)
def test_frozen_tensors_keep_their_bits(runs: Runs, tmp_path: Path, flags: str, frozen: str) -> None:
    """Whatever they are held and computed in: of a model with tensors in three dtypes, some with more digits."""
    runs = runs.of("mixed")
    file = tmp_path / "mixed" / "model.safetensors"
    before = load_file(file)
    for name in before:
        if ".layers.1." in name:
            before[name] = before[name].to(torch.bfloat16 if "norm" in name or "experts" in name else torch.float16)
    save_file(before, file, metadata={"format": "pt"})
    more = "--learning-rate 1e-3 --weight-decay 0.1 --max-grad-norm 0.5 --ep-size 2 --max-steps 3"
    after = runs(2, f"{more} {flags} --freeze {frozen}").weights
    part = {"experts": ".experts.", "router": ".gate.", "embeddings": "embed_tokens", "norms": "norm"}
    names = {name for name in before if any(part.get(group, "attn") in name for group in frozen.split())}
    assert names
    assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed
    assert not changed & names
