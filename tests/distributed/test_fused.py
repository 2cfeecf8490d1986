"""Norms and rotary positions in Triton kernels, sharded: gradients of gathered and of recomputed weights."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from expertmesh.sharding.topology import Topology
from expertmesh.training import engine
from expertmesh.training.fused import fused_norm, fused_rotary
from expertmesh.training.fused.fuse import fuse_layers
from expertmesh.training.loss.head import attach_loss_head
from tests.distributed import reference
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, hf_model, ours, random_samples
from tests.families.configs import TEXT_IDS
from tests.interpreter import interpreted
from tests.tiny import relative_error

TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 5e-5


def fused(path: Path, topology: Topology, case: Case) -> Figures | None:
    """As `ours`, with Triton's kernels for norms and rotary positions alone."""

    def fuse_and_attach(model: Any, kind: Any) -> None:
        assert fuse_layers(model)
        attach_loss_head(model, kind)

    def takes_triton(tensor: Tensor) -> bool:
        return not tensor.is_meta

    with (
        mock.patch.object(fused_norm, "takes_triton", takes_triton),
        mock.patch.object(fused_rotary, "takes_triton", takes_triton),
        mock.patch.object(engine, "attach_loss_head", fuse_and_attach),
    ):
        return ours(path, topology, case)


@pytest.mark.release
@interpreted
@pytest.mark.parametrize(("checkpointing", "steps", "accumulation"), [("selective", 2, 1), ("full", 1, 2)])
def test_fused_equals_one_process(
    ranks: RankPool, tmp_path: Path, checkpointing: Any, steps: int, accumulation: int
) -> None:
    samples = random_samples([9 + (5 * i) % 12 for i in range(8)], vocabulary=TEXT_IDS)
    case = Case(
        samples, family="qwen3_moe", accumulation=accumulation, steps=steps, gradient_checkpointing=checkpointing
    )
    hf_model(case, seed=1).save_pretrained(tmp_path)
    want = reference.reference(case, seed=1)
    found = ranks.run(fused, 4, tmp_path, Topology(4, 2), case)[0]
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE)
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    for name, gradient in want.grads.items():
        assert relative_error(found.grads[name], gradient, 1e-3 * want.grad_norms[0]) < TOLERANCE, name
    for name, weight in want.weights.items():
        assert relative_error(found.weights[name], weight) < WEIGHT_TOLERANCE, name
