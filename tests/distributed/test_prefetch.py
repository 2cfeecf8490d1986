"""Explicit prefetching: the next layer's parameters are gathered before this one computes, and no bit of a gradient
changes."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.parallelize.parallelize import prefetch_layers
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import DenseShard, Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, my_batches, sharded_model
from tests.parity.case import SAMPLES
from tests.tiny import save_model

LAYERS = 4
LETTERS = {"expertmesh::all_gather": "G", "aten::topk": "R", "expertmesh::reduce_scatter": "S"}


class Order(TorchDispatchMode):
    """In the order of their calls: gathers of parameters (G), routings (R), reductions of gradients (S)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = ""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += LETTERS.get(operator.name(), "")
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ep_size", "dense_shard", "checkpointing"), [(1, "full", "none"), (2, "hybrid", "full")])
def test_order_and_bits(
    ranks: RankPool, tmp_path: Path, ep_size: int, dense_shard: DenseShard, checkpointing: Checkpointing
) -> None:
    save_model(tmp_path, num_hidden_layers=LAYERS)
    case = Case(SAMPLES[:16], z=0.01, gradient_checkpointing=checkpointing)
    topology = Topology(4, ep_size, dense_shard)
    for (calls, grads), (calls_ahead, grads_ahead) in ranks.run(_both_ways, 4, tmp_path, topology, case):
        forward, backward = calls[: 3 * LAYERS + 1], calls[3 * LAYERS + 1 :]
        forward_ahead, backward_ahead = calls_ahead[: 3 * LAYERS + 1], calls_ahead[3 * LAYERS + 1 :]
        # the root, then each layer, and its experts once it has routed; ahead, two layers before the first has routed
        assert forward == "G" + "GRG" * LAYERS
        assert forward_ahead == "GGGGGR" + "GGR" * (LAYERS - 2) + "R"
        # the last two layers before anything is computed
        assert backward_ahead.startswith("GGGG")
        assert not backward.startswith("GGGG")
        assert Counter(backward_ahead) == Counter(backward)
        assert all(torch.equal(grads[name], grads_ahead[name]) for name in grads)


def _both_ways(path: Path, topology: Topology, case: Case) -> list[tuple[str, dict[str, Tensor]]]:
    return [_run(path, topology, case, ahead) for ahead in (False, True)]


def _run(path: Path, topology: Topology, case: Case, ahead: bool) -> tuple[str, dict[str, Tensor]]:
    model, _, _ = sharded_model(path, topology, case)
    if ahead:
        prefetch_layers(model, decoder_layers(model))
    with Order() as order:
        compute_gradients(
            model.train(), my_batches(case, topology, torch.distributed.get_rank()), LossWeights(0.0, case.z)
        )
    return order.calls, {name: local_tensor(p.grad).clone() for name, p in model.named_parameters()}
