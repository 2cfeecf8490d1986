"""Parameters that the sequences of some ranks do not reach: as in one process, whoever reaches them."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.parallelize import communicate_over_gloo
from expertmesh.sharding.parallelize.unreached import agree_on_gradients, num_lacking, reduce_unreached
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, hf_model, ours, random_samples, reference
from tests.families.test_parity import CANCELLED, TOLERANCE, WEIGHT_TOLERANCE, compare

# DeepSeek-V4's compressors make one of 4 and of 8 tokens: of sequences, those that reach both, one, and none
LENGTHS = {"on one rank": (20, 3), "each another": (5, 20), "on no rank": (3, 3), "by turns": (3, 20, 20, 3)}
LAYOUTS = [Topology(2, 1), Topology(2, 2), Topology(4, 2, "hybrid"), Topology(4, 2, pp_size=2)]


def case_of(name: str) -> Case:
    return Case(random_samples(LENGTHS[name] * 2), family="deepseek_v4", accumulation=2)


@cache
def expected(name: str) -> Figures:
    return reference(case_of(name), seed=1)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_equals_one_process(ranks: RankPool, tmp_path: Path, name: str, topology: Topology) -> None:
    """Losses, gradients and, after three clipped updates with weight decay, weights."""
    case = case_of(name)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    found, want = ranks.run(ours, topology.world_size, tmp_path, topology, case)[0], expected(name)
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE)
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    # gradients of the scalars of hyper-connections are sums that cancel, of as few as three tokens here
    floor = CANCELLED * want.grad_norms[0]
    compare(without_hyper(found.grads), without_hyper(want.grads), floor)
    compare(found.grads, want.grads, floor, 2 * TOLERANCE)
    compare(without_hyper(found.weights), without_hyper(want.weights), 0.0, WEIGHT_TOLERANCE)


def without_hyper(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "_hc." not in name}


class Paths(nn.Module):
    """Each of three weights is used if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((4, 3), float(n + 1))) for n in range(3))

    def forward(self, x_D: Tensor, used: list[int]) -> Tensor:
        return sum((self.weights[n] @ x_D for n in used), self.weights[0] @ x_D).sum()


# what each of two ranks uses, in each of its micro-batches
USED: dict[str, list[tuple[list[int], list[int]]]] = {
    "one rank": [([1], []), ([1], [])],
    "another in the next": [([1], []), ([], [1])],
    "nobody": [([], []), ([], [])],
    "both": [([1], [1]), ([2], [])],
}


@pytest.mark.parametrize("name", USED)
def test_gradients_by_hand(ranks: RankPool, name: str) -> None:
    """Sums over ranks and micro-batches; None, and not zeros, where nobody used a weight; afterwards the next step."""
    for grads, lacking in ranks.run(_gradients, 2, USED[name]):
        for number, grad in enumerate(grads):
            uses = sum(used.count(number) for both in USED[name] for used in both) + (4 if number == 0 else 0)
            assert (grad is None) == (uses == 0), number
            assert grad is None or torch.equal(grad, torch.full((4, 3), 2.0 * uses))
        assert lacking == [0, 2]


def _gradients(batches: list[tuple[list[int], list[int]]]) -> tuple[list[Tensor | None], list[int]]:
    rank, mesh = torch.distributed.get_rank(), init_device_mesh("cpu", (2,))
    model: Any = Paths()
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    communicate_over_gloo(model)
    reduce_unreached(model, [model])
    ranks: Any = SimpleNamespace(grid=mesh)
    for used in batches:
        model(torch.full((3,), 2.0), used[rank]).backward()
    agree_on_gradients(model, ranks)
    grads = [None if p.grad is None else _in_full(p.grad) for p in model.parameters()]
    lacking = [sum(g is None for g in grads) - num_lacking(model)]
    model.zero_grad()
    model(torch.full((3,), 2.0), []).backward()
    return grads, [*lacking, num_lacking(model)]


def _in_full(grad: Any) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.full_tensor()


def test_torch_has_changed(ranks: RankPool) -> None:
    """Else ranks would add up different parameters' gradients."""
    assert "FSDPParamGroup.reduce_grads is gone" in ranks.run(_renamed, 1)[0]


def _renamed() -> str:
    model: Any = Paths()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    del model._get_fsdp_state()._fsdp_param_group.reduce_grads
    with pytest.raises(ExpertMeshError) as raised:
        reduce_unreached(model, [model])
    return str(raised.value)
