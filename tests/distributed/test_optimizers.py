"""Every optimizer, and parameters in host memory: the same weights for every parallel layout, also over a resume."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import Topology
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.optim.shampoo import inverse_fourth_root
from expertmesh.training.resume import check_trained
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, sharded_model, train_config
from tests.distributed.whole_runs import flags, read, run, run_main, shares
from tests.tiny import relative_error, save_model, save_tokenizer

OPTIMIZERS = ["adamw_torch_fused", "adamw_torch_8bit", "adamw_bf16", "muon", "shampoo"]
# between parallel layouts after three steps; a rank with random numbers of its own would be 3e-3 off in bf16
TOLERANCES = {"adamw_torch_8bit": 3e-5, "adamw_bf16": 3e-4, "muon": 1e-5, "shampoo": 1e-5}


def test_shampoo_of_an_expert_that_is_reached_late() -> None:
    """Its factors were zeros when the roots were taken."""
    assert torch.equal(inverse_fourth_root(torch.zeros(3, 3)), torch.eye(3))


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


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_8bit", "adamw_bf16", "muon", "shampoo"])
def test_resume(ranks: RankPool, tiny_data: Path, tmp_path: Path, optim: str) -> None:
    """From step 2 of 3: bit for bit on the same ranks, and on others as close as parallel layouts are."""
    save_model(tmp_path / "model", hidden_size=256)
    save_tokenizer(tmp_path / "model")
    common = ["--optim", optim, "--ep-size", "2", "--max-steps", "3", "--save-steps", "2"]
    # of step 2, which step 3 computes with
    common += ["--shampoo-start", "2", "--shampoo-block-size", "96"] if optim == "shampoo" else []
    run(ranks, 4, [*flags(tmp_path / "model", tiny_data, tmp_path / "whole", *shares(4)), *common])
    expected = read(tmp_path / "whole" / "hf")
    saved = tmp_path / "whole" / "checkpoints" / "step-00000002"
    for world_size, more in ((4, []), (1, ["--ep-size", "1"]), (2, ["--dense-shard", "hybrid"])):
        out = tmp_path / str(world_size)
        argv = [*flags(tmp_path / "model", tiny_data, out, *shares(world_size)), *common, *more]
        run(ranks, world_size, [*argv, "--save-steps", "0", "--resume", str(saved)])
        weights = read(out / "hf")
        assert weights.keys() == expected.keys()
        for name in expected:
            if world_size == 4:
                assert torch.equal(weights[name], expected[name]), name
            else:
                assert relative_error(weights[name], expected[name]) < TOLERANCES[optim], name


def test_another_optimizers_checkpoint_is_refused(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    argv = [*flags(tiny_model, tiny_data, tmp_path / "run", *shares(1)), "--max-steps", "1", "--save-steps", "1"]
    run(ranks, 1, [*argv, "--no-export"])
    ((code, told),) = ranks.run(run_main, 1, [*argv, "--resume", "auto", "--optim", "muon"], join_group=False)
    assert code == 2
    assert "that run had --optim adamw_torch_fused, this one has muon" in told


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
    saved = asdict(train_config(optim="shampoo"))
    refused = nullcontext() if said is None else pytest.raises(ExpertMeshError, match=said)
    with refused:
        check_trained(saved, train_config(optim="shampoo", **settings), Path("step-00000002"))


@pytest.mark.gpu
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_offload_on_a_gpu(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path, optim: str) -> None:
    """With a checkpoint on the way; the optimizer's sums run on another device, so the last digits may differ."""
    weights = []
    for more in (["--no-offload"], ["--offload"]):
        out = tmp_path / more[0]
        argv = [flag for flag in flags(tiny_model, tiny_data, out, *shares(1)) if flag != "--use-cpu"]
        run(ranks, 1, [*argv, "--optim", optim, *more])
        weights.append(read(out / "hf"))
    plain, offloaded = weights
    for name in plain:
        assert relative_error(offloaded[name], plain[name]) < (1e-3 if optim == "adamw_bf16" else 1e-4), name
