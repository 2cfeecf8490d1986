"""Tensor parallelism over windows and sequences that a trial with a few tokens does not show. test_families.py has
every family that transformers has a plan for."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from expertmesh.sharding.topology import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import (
    Case,
    in_full,
    my_batches,
    random_samples,
    sharded_model,
)
from tests.families.configs import tiny_model
from tests.families.test_families import TOLERANCE, compare, gradients_of

TP_2 = Topology(2, 2, tp_size=2)


@pytest.mark.parametrize("packing", [False, True])
def test_windows_as_wide_as_a_ranks_positions(ranks: RankPool, tmp_path: Path, packing: bool) -> None:
    """Of more tokens than the model was tried with when it was divided."""
    samples = random_samples([128, 128], vocabulary=290)
    changes = {"sliding_window": 64}
    case = Case(samples, family="mimo_v2_flash", changes=changes, attention="auto", settings={"packing": packing})
    _compare_divided(ranks, tmp_path, case)


@pytest.mark.slow
def test_as_many_sequences_as_a_ranks_positions(ranks: RankPool, tmp_path: Path) -> None:
    """Under a mask that sdpa needs not, and has not, in the short sequences that the model is tried with."""
    changes = {"sliding_window": 20}
    case = Case(random_samples([32] * 16, vocabulary=290), changes=changes, attention="sdpa")
    _compare_divided(ranks, tmp_path, case)


def _compare_divided(ranks: RankPool, path: Path, case: Case) -> None:
    """Loss and gradients of two tensor-parallel ranks with those of one process."""
    theirs: Any = tiny_model(case.family, seed=1, **case.changes)
    theirs.save_pretrained(path)
    loss, grads = gradients_of(theirs, case)
    our_loss, our_grads = ranks.run(_divided, 2, path, case)[0]
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    compare(our_grads, grads, "tp 2", TOLERANCE)


def _divided(path: Path, case: Case) -> tuple[float, dict[str, Any]]:
    model, mesh, _ = sharded_model(path, TP_2, case)
    batches = my_batches(case, TP_2, dist.get_rank(), mesh.cp_group)
    result = compute_gradients(model.train(), batches, LossWeights(0.0, 0.0))
    return result.loss, in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
