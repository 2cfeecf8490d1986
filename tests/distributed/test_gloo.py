"""FSDP's collectives over gloo: what torch's own give, without its copies."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from sharding import Topology
from sharding.gloo import GlooAllGather, GlooReduceScatter, SharedMemory
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, my_batches, sharded_model
from tests.distributed.test_parity import SAMPLES
from tests.tiny import save_model
from training.balance import LossWeights
from training.step import compute_gradients

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_as_torch(ranks: RankPool, world_size: int) -> None:
    ranks.run(_compare, world_size)


def _compare() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    memory, group = SharedMemory(), dist.group.WORLD
    assert group is not None
    for dtype, length in zip(DTYPES, (5, 1000), strict=True):
        part_P = torch.arange(length).add(rank * length).to(dtype)
        gather, expected_nP = GlooAllGather(memory), torch.empty(world * length, dtype=dtype)
        dist.all_gather_into_tensor(expected_nP, part_P)
        # FSDP puts its own part into the output, and hands over that place; any other will do as well
        for in_place in (False, True):
            out_nP = gather.allocate((world * length,), dtype=dtype, device=torch.device("cpu"))
            own_P = out_nP[rank * length : (rank + 1) * length].copy_(part_P) if in_place else part_P
            gather(out_nP, own_P, group)
            assert torch.equal(out_nP, expected_nP)

        scatter = GlooReduceScatter(memory)
        data_nP = scatter.allocate((world * length,), dtype=dtype, device=torch.device("cpu"))
        # sums of small whole numbers are exact, whatever their order
        data_nP.copy_(torch.arange(world * length) % 7 + rank)
        sent_nP, expected_P = data_nP.clone(), torch.empty(length, dtype=dtype)
        dist.reduce_scatter_tensor(expected_P, data_nP)
        out_P = scatter.allocate((length,), dtype=dtype, device=torch.device("cpu"))
        scatter(out_P, data_nP, group, dist.ReduceOp.SUM)
        assert torch.equal(out_P, expected_P)
        assert torch.equal(data_nP, sent_nP)


def test_sums_are_in_the_order_of_ranks(ranks: RankPool) -> None:
    # in fp32 (1 + 1e8) - 1e8 + 1 is 1; any order in which the large ones meet first gives 2
    assert ranks.run(_sum, 4) == [[1.0]] * 4


def _sum() -> list[float]:
    terms = [1.0, 1e8, -1e8, 1.0]
    scatter, group = GlooReduceScatter(SharedMemory()), dist.group.WORLD
    assert group is not None
    out_P = torch.empty(1)
    scatter(out_P, torch.full((4,), terms[dist.get_rank()]), group, dist.ReduceOp.SUM)
    found: list[float] = out_P.tolist()
    return found


def test_memory_is_handed_out_again_only_when_nobody_has_it() -> None:
    memory = SharedMemory()
    first = memory.take(1000, torch.float32)
    place = first.data_ptr()
    part = first[10:20]
    second = memory.take(1000, torch.float32)
    assert second.data_ptr() != place
    del first
    assert memory.take(1000, torch.float32).data_ptr() not in (place, second.data_ptr())
    del part
    again = memory.take(2000, torch.bfloat16)
    assert again.data_ptr() in {piece.data_ptr() for piece in memory.pieces}
    assert (again.shape, again.dtype) == ((2000,), torch.bfloat16)
    # what is too small is given up for what is larger
    held = len(memory.pieces)
    del again, second
    memory.take(5000, torch.float32)
    assert len(memory.pieces) == held


class Places(TorchDispatchMode):
    """Where gathered parameters lie, gradients on their way, and what comes of other ranks' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {"expertmesh::all_gather": (1,), "expertmesh::reduce_scatter": (0, 2)}.get(operator.name(), ())
        self.found += [args[place].untyped_storage().data_ptr() for place in places]
        return operator(*args, **(kwargs or {}))


def test_every_unit_uses_the_same_memory(ranks: RankPool, tmp_path: Any) -> None:
    save_model(tmp_path, num_hidden_layers=4)
    for units, first, later in ranks.run(_places, 4, tmp_path):
        assert units == 9  # the root, four layers, their experts
        assert len(set(later)) <= 5
        assert set(later) <= set(first)


def _places(path: Any) -> tuple[int, list[int], list[int]]:
    case, topology = Case(SAMPLES[:16]), Topology(4, 2, "full")
    model, _, _ = sharded_model(path, topology, case)
    found = []
    for _ in range(3):
        with Places() as places:
            compute_gradients(model.train(), my_batches(case, topology, dist.get_rank()), LossWeights(0.0, 0.0))
        model.zero_grad()
        found.append(places.found)
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return units, found[0] + found[1], found[2]
