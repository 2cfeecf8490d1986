"""Every family cut into stages: loss and every gradient are those of its own class in one process."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.sharding.topology import Topology
from expertmesh.training.data.batch import collate
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, in_full, my_batches, of_packed, random_samples, sharded_model
from tests.families.configs import TEXT_IDS, skip_if_older, tiny_model
from tests.families.test_families import FAMILIES, SAMPLES, TOLERANCE, compare, gradients_of


@pytest.mark.sample(10)
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


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("index_topk", [2, 20])
@pytest.mark.parametrize("layout", [{}, {"cp_size": 2}, {"tp_size": 2}], ids=str)
def test_chosen_tokens_go_along(
    ranks: RankPool, tmp_path: Path, layout: dict[str, Any], index_topk: int, packing: bool
) -> None:
    """Layers give the next ones the tokens that they chose: as many as a sample has where these are fewer, and, where
    ranks share sequences, of those that a rank computes."""
    skip_if_older("has other kinds of layers")
    samples = random_samples([13, 4, 5, 16, 11], vocabulary=TEXT_IDS)
    changes = {"index_topk": index_topk, "index_n_heads": 16}
    case = Case(samples, family="glm_moe_dsa", changes=changes, attention="auto", settings={"packing": packing})
    theirs = tiny_model("glm_moe_dsa", seed=1, **changes)
    theirs.save_pretrained(tmp_path)
    loss, grads = gradients_of(theirs, case)
    topology = Topology(2 * prod(layout.values()), 1, pp_size=2, **layout)
    our_loss, our_grads = ranks.run(
        of_packed if packing else _in_one_batch, topology.world_size, tmp_path, topology, case
    )[0]
    assert our_loss == pytest.approx(loss, rel=TOLERANCE)
    compare(our_grads, grads, str(topology), TOLERANCE)


def _in_one_batch(path: Path, topology: Topology, case: Case) -> tuple[float, dict[str, Tensor]]:
    model, mesh, _ = sharded_model(path, topology, case)
    batch = collate([[sample] for sample in case.samples], mesh.cp_group)
    result = compute_gradients(model.train(), [batch], LossWeights(0.0, 0.0))
    return result.loss, in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def _figures(path: Path, topology: Topology, case: Case) -> tuple[float, dict[str, Tensor]]:
    model, *_ = sharded_model(path, topology, case)
    model.train()
    batches = my_batches(case, topology, torch.distributed.get_rank())
    result = compute_gradients(model, batches, LossWeights(0.0, 0.0))
    return result.loss, in_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
