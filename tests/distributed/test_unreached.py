"""Parameters that the sequences of some ranks do not reach: their gradients by hand. tests/parity has whole steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.parallelize import communicate_over_gloo
from expertmesh.sharding.parallelize.unreached import agree_on_gradients, num_lacking, reduce_unreached
from tests.distributed.pool import RankPool


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
    grads: list[Any] = [p.grad for p in model.parameters()]
    lacking = [sum(g is None for g in grads) - num_lacking(model)]
    in_full = [None if grad is None else grad.full_tensor() for grad in grads]
    model.zero_grad()
    model(torch.full((3,), 2.0), []).backward()
    return in_full, [*lacking, num_lacking(model)]


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
