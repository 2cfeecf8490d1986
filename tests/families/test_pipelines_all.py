"""Every family cut into stages: loss and every gradient are those of its own class in one process."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertmesh.sharding import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, in_full, my_batches, sharded_model
from tests.families.configs import tiny_model
from tests.families.test_families import FAMILIES, SAMPLES, TOLERANCE, compare, gradients_of


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_at_every_cut(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Two micro-batches in flight, in three stages: most of these models have three layers, so that each boundary
    between layers is one between ranks. Stages of several layers are in test_pipeline.py."""
    case = Case(SAMPLES, family=family, accumulation=2)
    theirs = tiny_model(family, seed=1)
    theirs.save_pretrained(tmp_path)
    loss, grads = gradients_of(theirs, case)
    topology = Topology(3, 1, pp_size=3)
    our_loss, our_grads = ranks.run(_figures, topology.world_size, tmp_path, topology, case)[0]
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    # a sum over two micro-batches rounds otherwise
    compare(our_grads, grads, str(topology), tolerance=2 * TOLERANCE)


def _figures(path: Path, topology: Topology, case: Case) -> tuple[float, dict[str, Tensor]]:
    model, *_ = sharded_model(path, topology, case)
    model.train()
    batches = my_batches(case, topology, torch.distributed.get_rank())
    result = compute_gradients(model, batches, LossWeights(0.0, 0.0))
    return result.loss, in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
