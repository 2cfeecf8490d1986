"""FSDP's collectives over gloo: what torch's own give, without its copies."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives import gloo
from expertmesh.sharding.collectives.gloo import GlooAllGather, GlooReduceScatter, SharedMemory, counts_references
from expertmesh.sharding.topology import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.step import compute_gradients
from tests.distributed.pool import RankPool
from tests.distributed.reference import my_batches, sharded_model
from tests.parity.case import SAMPLES, Case
from tests.tiny import save_model

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
        # FSDP puts its own part into the output, and hands over that place; any other works as well
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
    data_nP = scatter.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))
    out_P = scatter.allocate((1,), dtype=torch.float32, device=torch.device("cpu"))
    scatter(out_P, data_nP.fill_(terms[dist.get_rank()]), group, dist.ReduceOp.SUM)
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


def test_memory_that_autograd_keeps_is_not_handed_out() -> None:
    memory = SharedMemory()
    kept = memory.take(4, torch.float32).fill_(3.0)
    place, weight = kept.data_ptr(), torch.ones(4, requires_grad=True)
    product = weight * kept
    del kept
    assert memory.take(4, torch.float32).data_ptr() != place
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 4
    del product
    # of two free pieces of a size the first
    assert memory.take(4, torch.float32).data_ptr() == place


@pytest.mark.parametrize("references", [1, 2, 3])
def test_without_counted_references_nothing_is_handed_out_twice(
    monkeypatch: pytest.MonkeyPatch, references: int
) -> None:
    """As if torch gave every piece the same count, so that all were free, or none."""
    monkeypatch.setattr(gloo, "storage_references", lambda tensor: references)
    assert not counts_references()
    with pytest.warns(UserWarning, match=r"torch .* does not count references"):
        memory = SharedMemory()
    first = memory.take(1000, torch.float32).fill_(1.0)
    memory.take(1000, torch.float32).fill_(2.0)
    assert first.eq(1.0).all()
    assert not memory.holds(first)


def test_how_references_are_counted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is on; and as if an object of Python's did not count, or one more did."""
    count = gloo.storage_references
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, torch.device("meta"):
            assert counts_references()
    for beside in (-1, 1):
        monkeypatch.setattr(gloo, "storage_references", lambda tensor, beside=beside: count(tensor) + beside)
        assert not counts_references()


def test_memory_whose_size_was_changed_is_not_handed_out() -> None:
    memory = SharedMemory()
    memory.take(10, torch.float32).untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="resized"):
        memory.take(10, torch.float32)


def allocated(scatter: GlooReduceScatter, numel: int) -> Tensor:
    return scatter.allocate((numel,), dtype=torch.float32, device=torch.device("cpu"))


def test_output_is_never_in_shared_memory() -> None:
    """Also after a backward that ended between an input and its output, and in a group of one rank, for which FSDP
    calls no collective."""
    scatter = GlooReduceScatter(SharedMemory())
    for ends_early in (False, True, True, False, False):
        data_nP = allocated(scatter, 8)
        assert scatter.memory.holds(data_nP)
        if not ends_early:
            assert not scatter.memory.holds(allocated(scatter, 4))
        del data_nP


def test_another_order_of_calls_is_refused() -> None:
    """As if FSDP asked for its output first; or for one of them elsewhere."""
    group: Any = None
    for order in ("output first", "input elsewhere", "output alone"):
        scatter = GlooReduceScatter(SharedMemory())
        if order == "output first":
            out_P, data_nP = allocated(scatter, 4), allocated(scatter, 8)
        elif order == "input elsewhere":
            data_nP, out_P = torch.empty(8), torch.empty(4)
        else:
            out_P, data_nP = allocated(scatter, 4), torch.empty(8)
        with pytest.raises(ExpertMeshError, match=r"torch .*FSDP asks for the memory of a reduce-scatter"):
            scatter(out_P, data_nP, group, dist.ReduceOp.SUM)


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
