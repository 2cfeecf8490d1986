"""GEMMs in fp8 for every parallel layout: the same but for what bf16 rounds, as without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.sharding import Topology
from expertmesh.sharding.topology import DenseShard
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, ours, random_samples, reference
from tests.tiny import relative_error, save_model

SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(32)])
FP8 = Case(SAMPLES, z=0.01, kernel="fp8", compute_dtype=torch.bfloat16)
ACCUMULATED = Case(SAMPLES, z=0.01, kernel="fp8", compute_dtype=torch.bfloat16, accumulation=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def alone(ranks: RankPool, model: Path) -> Figures:
    figures: Figures = ranks.run(ours, 1, model, Topology(1, 1), FP8)[0]
    return figures


def test_near_fp32(alone: Figures) -> None:
    """And no nearer than fp8 is."""
    exact = reference(FP8)
    assert alone.losses == pytest.approx(exact.losses, rel=5e-3)
    assert 0.02 < _error(alone, exact) < 0.12
    assert all(grad.dtype == torch.float32 for grad in alone.grads.values())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("world_size", "ep_size", "dense_shard", "case"),
    [(2, 1, "full", FP8), (2, 2, "full", FP8), (4, 2, "full", FP8), (4, 2, "hybrid", ACCUMULATED)],
)
def test_arrangements(
    ranks: RankPool, model: Path, alone: Figures, world_size: int, ep_size: int, dense_shard: DenseShard, case: Case
) -> None:
    """Rows and weights are rounded by themselves, and of what is summed over rows, each number as it would be among
    other rows: scales are powers of two. What differs is where partial sums are rounded to bf16: a part in 2^8 of a
    gradient, 2.3e-3 of them all here, of bf16's own experts as well; steps that follow see rounded weights."""
    topology = Topology(world_size, ep_size, dense_shard)
    found = ranks.run(ours, world_size, model, topology, case)[0]
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=2e-5)
    assert found.losses == pytest.approx(alone.losses, rel=3e-3)
    assert found.grad_norms[0] == pytest.approx(alone.grad_norms[0], rel=2e-3)
    assert _error(found, alone) < 5e-3


DENSE = Case(SAMPLES, z=0.01, compute_dtype=torch.bfloat16, settings={"dense_precision": "fp8"})


@pytest.mark.parametrize(
    ("world_size", "ep_size", "dense_shard", "checkpointing"), [(2, 2, "full", "selective"), (4, 2, "hybrid", "full")]
)
def test_dense_gemms(
    ranks: RankPool, model: Path, world_size: int, ep_size: int, dense_shard: DenseShard, checkpointing: Any
) -> None:
    """Near fp32, but that rounded hidden states choose other experts for a few tokens; and the same for every layout,
    as above."""
    (alone,) = ranks.run(ours, 1, model, Topology(1, 1), DENSE)
    exact = reference(replace(DENSE, settings={}))
    assert alone.losses == pytest.approx(exact.losses, rel=5e-3)
    assert 0.05 < _error(alone, exact) < 0.3
    case = replace(DENSE, gradient_checkpointing=checkpointing)
    found = ranks.run(ours, world_size, model, Topology(world_size, ep_size, dense_shard), case)[0]
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=2e-5)
    assert found.losses == pytest.approx(alone.losses, rel=3e-3)
    assert _error(found, alone) < 5e-3


@pytest.mark.exhaustive
def test_dense_gemms_beside_adapters(ranks: RankPool, model: Path) -> None:
    case = replace(DENSE, settings={"dense_precision": "fp8", "adapter": "lora", "lora_rank": 4})
    (alone,) = ranks.run(ours, 1, model, Topology(1, 1), case)
    (in_bf16,) = ranks.run(
        ours, 1, model, Topology(1, 1), replace(case, settings=case.settings | {"dense_precision": "same"})
    )
    assert alone.losses == pytest.approx(in_bf16.losses, rel=5e-3)
    assert 0.02 < _error(alone, in_bf16) < 0.3
    found = ranks.run(ours, 4, model, Topology(4, 2, "hybrid"), case)[0]
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=2e-5)
    assert _error(found, alone) < 5e-3


def _error(found: Figures, expected: Figures) -> float:
    """Relative error of the first step's gradients as one vector."""
    assert found.grads.keys() == expected.grads.keys()
    mine, theirs = (torch.cat([of.grads[name].flatten() for name in expected.grads]) for of in (found, expected))
    return relative_error(mine, theirs)
