"""Every causal MoE family under context parallelism: loss and gradients of full sequences.

Computed in double precision, where sums in another order differ by far less than what is left out or twice there.
test_parity.py compares them in fp32.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.sharding.topology import Topology
from expertmesh.training.attention.by_sample import apply_packing
from expertmesh.training.attention.complete_sequences import CompleteSequences
from expertmesh.training.attention.context_parallel_attention import apply_context_parallel, complete_sequences_line
from expertmesh.training.attention.packed_attention import choose_attention
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.micro_batch import token_loss_sum
from expertmesh.training.model_setup.compiling import compilation, compile_layers
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, hf_model, ours, random_samples, reference
from tests.distributed.whole_runs import lines, start
from tests.families.configs import is_older, skip_if_older, tiny_config, tiny_model
from tests.families.test_families import FAMILIES
from tests.families.test_packing import REFUSED, few_choices
from tests.families.test_parity import SAMPLES, WEIGHT_TOLERANCE, compare
from tests.families.test_pipeline import four_layers
from tests.in_double import InDouble
from tests.tiny import loaded, relative_error, save_tokenizer

Rows = list[list[Sample]]

SHARERS = 2
TOLERANCE = 1e-5
CANCELLED = 1e-3
"""Gradients below this share of the norm of all are held to the tolerance at that share."""
IN_DOUBLE = 1e-10
"""What a result in double precision may differ by."""
# windows are of 8 positions; the first row is padded, also where it has samples of its own
A, B, C, D, E = random_samples([13, 4, 5, 16, 11], vocabulary=290)
ALONE: list[Rows] = [[[D]], [[A], [D]]]
"""As many rows as ranks, and fewer."""
PACKED: Rows = [[A, B, C], [D, E]]

ROTARY = {
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [3.0, 3.5, 4.0, 4.5],
    "short_mscale": 1.0,
    "long_mscale": 1.5,
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_equals_whole(ranks: RankPool, family: str) -> None:
    """A sample per row, and several; test_packing.py verifies which families refuse packed samples."""
    _compare(ranks, family, ALONE, packing=False, changes={})
    if family not in REFUSED:
        _compare(ranks, family, [PACKED], packing=True, changes={})


CHOOSING = [family for family in FAMILIES if few_choices(family)]


@pytest.mark.slow
@pytest.mark.parametrize("family", CHOOSING)
def test_layers_that_choose_tokens(ranks: RankPool, family: str) -> None:
    """Fewer than sequences have: the choice is to come about in complete sequences, and to be a mask for attention."""
    changes = few_choices(family)
    _compare(ranks, family, ALONE, packing=False, changes=changes)
    if family not in REFUSED:
        _compare(ranks, family, [PACKED], packing=True, changes=changes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_rows_that_do_not_come_out_even(ranks: RankPool, rows: int) -> None:
    """Fewer than ranks, each of which computes one, or more, of which some ranks compute one more than others."""
    _compare(ranks, "qwen3_next", [[[A], [D], [E], [B], [C]][:rows]], packing=False, changes={}, sharers=4)


BY_HEADS = {
    "qwen3_next": {"causal_conv1d_fn": "convolution", "torch_chunk_gated_delta_rule": "heads"},
    "qwen3_5_moe": {"causal_conv1d_fn": "convolution", "torch_chunk_gated_delta_rule": "heads"},
    "kimi_linear": {"causal_conv1d_fn": "convolution", "chunk_kimi_delta_attention": "heads"},
    "bailing_hybrid": {"causal_conv1d_fn": "convolution", "chunk_kimi_delta_attention": "heads"},
    "lfm2_moe": {"causal_conv1d_fn": "convolution"},
    # in its code, not in a function
    "nemotron_h": None,
}


@pytest.mark.skipif(is_older(), reason="which functions transformers has depends on its release")
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BY_HEADS)
def test_what_is_split_by_heads_is_found_by_trying(name: str) -> None:
    """And said, with what it costs where it is not."""
    model = _build(name, False, {})
    apply_context_parallel(model, 2, packing=False)
    found = [part.forward.functions for part in model.modules() if isinstance(part.forward, CompleteSequences)]
    kinds = BY_HEADS[name]
    assert found
    assert all((None if one is None else one.kinds) == kinds for one in found)
    said = complete_sequences_line(model, 2, 1, False)
    assert said is not None
    assert ("by heads" in said) == (kinds is not None)
    assert ("2 ranks compute the same one" in said) == (kinds is None)
    assert "2 of 4 per rank" in str(complete_sequences_line(model, 2, 4, False))


def test_heads_that_do_not_divide_are_not_split() -> None:
    skip_if_older("may repeat key heads before the function that is split, so that there are as many as of values")
    model = _build("qwen3_next", False, {"linear_num_key_heads": 2})
    apply_context_parallel(model, 4, packing=False)
    found = [part.forward.functions for part in model.modules() if isinstance(part.forward, CompleteSequences)]
    assert found
    assert not any(found)


@pytest.mark.slow
@pytest.mark.parametrize("sharers", [2, 4])
def test_one_row_by_heads(ranks: RankPool, sharers: int) -> None:
    """Of ranks, each has more positions than a convolution reaches."""
    _compare(ranks, "qwen3_next", [[[D]]], packing=False, changes={"linear_num_key_heads": 4}, sharers=sharers)


def test_a_function_that_mixes_heads_is_found_out() -> None:
    """As one whose convolution sees what comes after."""
    own = vars(modeling_qwen3_next)["torch_chunk_gated_delta_rule"]

    def mixing(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(query.flip(2), *args, **kwargs)

    def seeing_later(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return own_conv(x, *args, **kwargs).roll(-1, dims=2)

    own_conv = vars(modeling_qwen3_next)["causal_conv1d_fn"]
    for name, function in (("torch_chunk_gated_delta_rule", mixing), ("causal_conv1d_fn", seeing_later)):
        function.__module__ = modeling_qwen3_next.__name__
        with mock.patch.object(modeling_qwen3_next, name, function):
            model = _build("qwen3_next", False, {})
            apply_context_parallel(model, 2, packing=False)
        found = [part.forward.functions for part in model.modules() if isinstance(part.forward, CompleteSequences)]
        assert found == [None] * len(found) != [], name


TRAINED: dict[str, tuple[Topology, dict[str, Any], dict[str, Any]]] = {
    "dp 2, ep 2": (Topology(4, 2, "hybrid", 2), {"gradient_checkpointing": "selective"}, {}),
    "ep 4, cp 4": (Topology(4, 4, "full", 4), {"gradient_checkpointing": "full"}, {}),
    "pp 2, dp 2, ep 2": (Topology(8, 2, "hybrid", 2, 2), {"accumulation": 4}, {}),
}
"""A parallel layout, what its model is trained with, and settings of the run."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"), list(zip(["qwen3_next", "qwen3_5_moe", "qwen3_next"], TRAINED, strict=True))
)
def test_training(ranks: RankPool, tmp_path: Path, family: str, name: str) -> None:
    """Losses, gradients and weights of two steps, of layers that carry a state."""
    topology, training, settings = TRAINED[name]
    case = Case(SAMPLES, family=family, steps=2, z=0.01, changes=four_layers(family), **training)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    found = ranks.run(ours, topology.world_size, tmp_path, topology, replace(case, settings=settings))[0]
    want = reference(case, seed=1)
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE)
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    compare(found.grads, want.grads, CANCELLED * want.grad_norms[0], 2 * TOLERANCE)
    compare(found.weights, want.weights, 0.0, WEIGHT_TOLERANCE)


RUNS: dict[str, tuple[object, ...]] = {
    "LoRA, nf4": ("--adapter", "lora", "--base-dtype", "nf4", "--gradient-checkpointing", "selective"),
    "fp8, one row": ("--adapter", "lora", "--base-dtype", "fp8", "--per-device-train-batch-size", 1),
    "dispatch": ("--dispatch", "rank", "--offload-activations", "--gradient-checkpointing", "full"),
}


@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
def test_a_run(ranks: RankPool, tiny_data: Path, tmp_path: Path, name: str) -> None:
    """Trained, evaluated and asked: the same on 2 ranks and on 4 that share sequences by twos."""
    hf_model(Case([], family="qwen3_next"), seed=1).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    common = (
        *("--model", tmp_path / "model", "--dataset", tiny_data, "--eval-ratio", 0.2, "--eval-steps", 2),
        *("--generate-steps", 2, "--generate-max-new-tokens", 4, "--max-seq-length", 48, "--global-batch-size", 8),
        *("--per-device-train-batch-size", 4, "--learning-rate", "1e-3", "--max-steps", 2, "--no-export"),
        *RUNS[name],
    )
    for out, world_size, cp_size in ((tmp_path / "alone", 2, 1), (tmp_path / "split", 4, 2)):
        layout = ("--output-dir", out, "--ep-size", 2, "--cp-size", cp_size)
        assert all(code == 0 for code, _ in start(ranks, world_size, *common, *layout))
    for key in ("loss", "eval_loss", "grad_norm", "tokens"):
        found, expected = (
            {line["step"]: line[key] for line in lines(tmp_path / out, key)} for out in ("split", "alone")
        )
        assert expected
        assert found == pytest.approx(expected, rel=2 * TOLERANCE), key
    answers, expected = (lines(tmp_path / out, "generations")[-1] for out in ("split", "alone"))
    assert answers["generations"] == expected["generations"]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["one row", "packed"])
def test_compiled(ranks: RankPool, packing: bool) -> None:
    """What is given complete sequences is not compiled, norms are; bit for bit the same."""
    assert ranks.run(_compiled, SHARERS, PACKED if packing else ALONE[0], packing) == [(True, 0, True)] * SHARERS


def _compiled(rows: Rows, packing: bool) -> tuple[bool, int, bool]:
    """Whether anything was compiled, how many mixers were, and whether losses and gradients are the same."""
    torch.compiler.reset()  # what an earlier test compiled in this process
    before, theirs = compilation().graphs, tiny_model("qwen3_next", seed=1)
    with torch.compiler.set_stance(force_backend="eager"):
        compiled, plain = (_split("qwen3_next", packing, {}) for _ in range(2))
        compile_layers(compiled)
        batch = collate(rows, all_ranks())
        ((loss, grads),), ((want, wanted),) = (losses_and_grads(model, theirs, [batch]) for model in (compiled, plain))
    mixers = [part for part in compiled.modules() if isinstance(part.forward, CompleteSequences)]
    assert mixers
    is_same = loss == want and all(torch.equal(grads[name], grad) for name, grad in wanted.items())
    return compilation().graphs > before, sum(part._compiled_call_impl is not None for part in mixers), is_same


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "laguna", "deepseek_v2"])
def test_ranks_that_do_not_divide_the_heads(family: str) -> None:
    """Also where a mask is made of full sequences, as for windows."""
    said = "--cp-size 3 does not divide the 4 attention heads of this model.*; use 1, 2 or 4"
    with pytest.raises(ExpertMeshError, match=said):
        apply_context_parallel(_build(family, False, {}), 3, packing=False)


@pytest.mark.parametrize(
    ("family", "kind"), [("mixtral", "longrope"), ("mixtral", "dynamic"), ("phimoe", "longrope"), ("phimoe", "yarn")]
)
def test_rotary_positions_of_the_longest_row(ranks: RankPool, family: str, kind: str) -> None:
    """By which frequencies are chosen, or their scale: a rank's own would choose others."""
    changes = {"rope_parameters": ROTARY | {"rope_type": kind}, "head_dim": 8, "max_position_embeddings": 12}
    _compare(ranks, family, [[[A], [D]]], packing=False, changes=changes)


def _compare(
    ranks: RankPool,
    family: str,
    cases: list[Rows],
    packing: bool,
    changes: dict[str, Any],
    sharers: int = SHARERS,
) -> None:
    """Loss and gradients under context parallelism against those of one process, for rows that are packed or not."""
    found_by_rank = ranks.run(_shared, sharers, family, cases, packing, changes)
    whole = _in_double(_build(family, packing, changes), family, changes, [collate(rows) for rows in cases])
    for rows, found, (loss, grads) in zip(cases, zip(*found_by_rank, strict=True), whole, strict=True):
        assert sum(part[0] for part in found) == pytest.approx(loss, rel=IN_DOUBLE), (len(rows), packing)
        floor = CANCELLED * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
        summed = {name: torch.stack([part[1][name] for part in found]).sum(dim=0) for name in grads}
        errors = {name: relative_error(summed[name], grad, floor) for name, grad in grads.items()}
        assert not {name: error for name, error in errors.items() if not error <= IN_DOUBLE}, (len(rows), packing)


def _build(family: str, packing: bool, changes: dict[str, Any]) -> Any:
    config = tiny_config(family, **changes)
    model = build_model(config, choose_attention("auto", packing, config))
    if packing:
        apply_packing(model)
    return model


def _shared(
    family: str, cases: list[Rows], packing: bool, changes: dict[str, Any]
) -> list[tuple[float, dict[str, Tensor]]]:
    """This rank's part of the loss and of the gradients, of each case."""
    batches = [collate(rows, all_ranks()) for rows in cases]
    return _in_double(_split(family, packing, changes), family, changes, batches)


def _split(family: str, packing: bool, changes: dict[str, Any]) -> Any:
    model = _build(family, packing, changes)
    apply_context_parallel(model, dist.get_world_size(), packing)
    return model


def all_ranks() -> CPGroup:
    assert dist.group.WORLD is not None
    return CPGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def _in_double(
    model: Any, family: str, changes: dict[str, Any], batches: list[Batch]
) -> list[tuple[float, dict[str, Tensor]]]:
    theirs = tiny_model(family, seed=1, **changes)
    with InDouble():
        return losses_and_grads(model.double(), theirs.double(), batches)


def losses_and_grads(model: Any, theirs: Any, batches: list[Batch]) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each batch."""
    model = loaded(model, theirs).eval()
    attach_loss_head(model, "full")
    figures = []
    for batch in batches:
        model.zero_grad()
        loss = token_loss_sum(model, batch)
        loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        figures.append((float(loss.detach()), grads))
    return figures
