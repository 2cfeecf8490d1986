"""Every causal MoE family under context parallelism: loss and gradients of full sequences, or an error that says why
not.

Rows hold several samples where a family's can.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.moe import ExpertMeshError, build_model
from expertmesh.sharding import CPGroup
from expertmesh.training.attention.context_parallel_attention import apply_context_parallel
from expertmesh.training.attention.packed_attention import choose_attention
from expertmesh.training.data import Batch, Sample, collate
from expertmesh.training.loss.head import attach_loss_head
from expertmesh.training.micro_batch import token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import random_samples
from tests.families.configs import is_older, tiny_config, tiny_model
from tests.families.test_families import FAMILIES
from tests.families.test_packing import why_refused
from tests.tiny import loaded, relative_error

SHARERS = 2
TOLERANCE = 1e-5
CANCELLED = 1e-3
"""Gradients below this share of the norm of all are held to the tolerance at that share."""
# windows are of 8 positions; the first row is padded, also where it has samples of its own
A, B, C, D, E = random_samples([13, 4, 5, 16, 11], vocabulary=290)
ROWS = {False: [[A], [D], [E]], True: [[A, B, C], [D, E]]}

REFUSED = {
    "axk2": "indexed_attention",
    "bailing_hybrid": "linear_attention",
    "deepseek_v32": "indexed_attention",
    "deepseek_v4": "compressed_sparse_attention, heavily_compressed_attention",
    "dots3_note": "indexed_attention",
    "glm5_next": "linear_attention",
    "glm_moe_dsa": "indexed_attention",
    "granitemoehybrid": "linear_attention",
    "hy_v4": "indexed_attention",
    "inkling_text": "hybrid",
    "jamba": "mamba",
    "kimi_linear": "linear_attention",
    "lfm2_moe": "conv",
    "minimax": "linear_attention",
    "minimax_m3_vl": "minimax_m3_sparse",
    "minimax_m3_vl_text": "minimax_m3_sparse",
    "mistral_large4": "indexed_attention",
    "nemo_speechlm": "linear_attention",
    "nemotron_h": "linear_attention",
    "nemotron_h_omni": "linear_attention",
    "qwen3_5_moe": "linear_attention",
    "qwen3_next": "linear_attention",
    "qwen4_exp": "linear_attention",
    "unlimited_ocr": "reference_sliding_attention",
    "zaya": "hybrid",
}
"""Which layers the error names. A family that is not here, as one that a new release brings, is exact or refused."""


ROTARY = {
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [3.0, 3.5, 4.0, 4.5],
    "short_mscale": 1.0,
    "long_mscale": 1.5,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_equals_whole_or_is_refused(ranks: RankPool, family: str) -> None:
    refusal = _refusal(family)
    if refusal is not None:
        assert "see other tokens otherwise than by attention" in refusal
        assert is_older() or REFUSED.get(family, "") in refusal
        return
    assert family not in REFUSED
    # unpacked rows, too, are shared in test_parity.py
    packing = why_refused(tiny_config(family)) is None
    _compare(ranks, family, ROWS[packing], packing, {})


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
    _compare(ranks, family, [[A], [D]], False, changes)


def _compare(ranks: RankPool, family: str, rows: list[list[Sample]], packing: bool, changes: dict[str, Any]) -> None:
    """Loss and gradients under context parallelism against those of one process."""
    loss, grads = _whole(family, rows, packing, changes)
    found = ranks.run(_shared, SHARERS, family, rows, packing, changes)
    assert sum(part[0] for part in found) == pytest.approx(loss, rel=TOLERANCE), packing
    floor = CANCELLED * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    summed = {name: torch.stack([part[1][name] for part in found]).sum(dim=0) for name in grads}
    errors = {name: relative_error(summed[name], grad, floor) for name, grad in grads.items()}
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}, packing


def _refusal(family: str) -> str | None:
    try:
        apply_context_parallel(_build(family, False, {}), SHARERS, packing=False)
    except ExpertMeshError as error:
        return str(error)
    return None


def _build(family: str, packing: bool, changes: dict[str, Any]) -> Any:
    config = tiny_config(family, **changes)
    return build_model(config, choose_attention("auto", packing, config))


def _whole(
    family: str, rows: list[list[Sample]], packing: bool, changes: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    return _gradients(_build(family, packing, changes), tiny_model(family, seed=1, **changes), collate(rows))


def _shared(
    family: str, rows: list[list[Sample]], packing: bool, changes: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    """This rank's part of the loss and of the gradients."""
    model = _build(family, packing, changes)
    apply_context_parallel(model, SHARERS, packing)
    assert dist.group.WORLD is not None
    batch = collate(rows, CPGroup(SHARERS, dist.get_rank(), dist.group.WORLD))
    return _gradients(model, tiny_model(family, seed=1, **changes), batch)


def _gradients(model: Any, theirs: Any, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    model = loaded(model, theirs).eval()
    attach_loss_head(model, "full")
    loss = token_loss_sum(model, batch)
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return float(loss.detach()), grads
