"""Context parallelism where layers are given complete sequences, and where positions depend on all of a sequence: loss
and gradients, in double precision, where sums in another order differ by far less than what is left out or twice there.
test_families.py compares every family in fp32.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.training.attention.by_sample import apply_packing
from expertmesh.training.attention.complete_sequences import CompleteSequences, complete_sequences_line
from expertmesh.training.attention.context_parallel_attention import apply_context_parallel
from expertmesh.training.attention.packed_attention import choose_attention
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.model_setup.compiling import compilation, compile_layers
from expertmesh.training.steps.micro_batch import token_loss_sum
from tests.distributed.pool import RankPool
from tests.families.configs import tiny_config, tiny_model
from tests.in_double import InDouble
from tests.parity.case import random_samples
from tests.rounding import error_beyond, norm_of
from tests.tiny import loaded

Rows = list[list[Sample]]

IN_DOUBLE = 1e-10
"""What a result in double precision may differ by."""
# windows are of 8 positions; the first row is padded, also where it has samples of its own
A, B, C, D, E = random_samples([13, 4, 5, 16, 11], vocabulary=290)
PACKED: Rows = [[A, B, C], [D, E]]
ROTARY = {
    **{"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 12},
    **{"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 3.5, 4.0, 4.5]},
    **{"short_mscale": 1.0, "long_mscale": 1.5},
}


def of_rows(kind: str) -> dict[str, Any]:
    return {"rope_parameters": ROTARY | {"rope_type": kind}, "head_dim": 8, "max_position_embeddings": 12}


@pytest.mark.parametrize(
    ("family", "changes", "rows", "ranks_of_group"),
    [
        # fewer than ranks, each of which computes one, or more, of which some ranks compute one more than others
        *(("qwen3_next", {}, [[A], [D], [E], [B], [C]][:number], 4) for number in (1, 5)),
        # by the longest row frequencies are chosen, or their scale: a rank's own would choose others
        ("mixtral", of_rows("longrope"), [[A], [D]], 2),
        ("phimoe", of_rows("yarn"), [[A], [D]], 2),
        *(
            pytest.param(family, of_rows(kind), [[A], [D]], 2, marks=pytest.mark.slow)
            for family, kind in (("mixtral", "dynamic"), ("phimoe", "longrope"))
        ),
    ],
)
def test_shared_equals_whole(
    ranks: RankPool, family: str, changes: dict[str, Any], rows: Rows, ranks_of_group: int
) -> None:
    parts = ranks.run(_shared, ranks_of_group, family, rows, changes)
    loss, grads = _in_double(_build(family, False, changes), family, changes, collate(rows))
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=IN_DOUBLE)
    summed = {name: torch.stack([part[1][name] for part in parts]).sum(dim=0) for name in grads}
    rounding = 2.0**-50 * norm_of(grads)
    errors = {name: error_beyond(rounding, summed[name], grad) for name, grad in grads.items()}
    assert not {name: error for name, error in errors.items() if not error <= IN_DOUBLE}


@pytest.mark.parametrize(
    ("family", "mixer"), [("qwen3_next", "Qwen3NextGatedDeltaNet"), ("nemotron_h", "NemotronHMamba2Mixer")]
)
def test_what_is_complete_is_said_with_its_cost(family: str, mixer: str) -> None:
    model = _build(family, False, {})
    apply_context_parallel(model, 2, packing=False)
    said = str(complete_sequences_line(model, 2, 1))
    assert f"{mixer} with complete sequences, 1 of 1 per rank: 2 ranks compute the same sequence" in said
    assert str(complete_sequences_line(model, 2, 4)).endswith(f"{mixer} with complete sequences, 2 of 4 per rank")


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["one row", "packed"])
def test_compiled(ranks: RankPool, packing: bool) -> None:
    """What is given complete sequences is not compiled, norms are; bit for bit the same."""
    assert ranks.run(_compiled, 2, PACKED if packing else [[D]], packing) == [(True, 0, True)] * 2


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


def _build(family: str, packing: bool, changes: dict[str, Any]) -> Any:
    config = tiny_config(family, **changes)
    model = build_model(config, choose_attention("auto", packing, config))
    if packing:
        apply_packing(model)
    return model


def _shared(family: str, rows: Rows, changes: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """This rank's part of the loss and of the gradients."""
    return _in_double(_split(family, False, changes), family, changes, collate(rows, all_ranks()))


def _split(family: str, packing: bool, changes: dict[str, Any]) -> Any:
    model = _build(family, packing, changes)
    apply_context_parallel(model, dist.get_world_size(), packing)
    return model


def all_ranks() -> CPGroup:
    assert dist.group.WORLD is not None
    return CPGroup(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def _in_double(model: Any, family: str, changes: dict[str, Any], batch: Batch) -> tuple[float, dict[str, Tensor]]:
    theirs = tiny_model(family, seed=1, **changes)
    with InDouble():
        (figures,) = losses_and_grads(model.double(), theirs.double(), [batch])
        return figures


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
