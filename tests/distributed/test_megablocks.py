"""MegaBlocks' kernels under expert parallelism, by Triton's interpreter, held against `MixtralForCausalLM` in one
process; and MegaBlocks' own expert parallelism against ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import group

from benchmarks.original_megablocks import original_dmoe
from expertmesh.moe.dispatch.alltoall import AllToAllDispatcher
from expertmesh.moe.experts.forward import Forward
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import ours, reference
from tests.interpreter import interpreted, prepare_megablocks
from tests.parity.case import Case, Figures, random_samples
from tests.parity.compare import assert_same
from tests.rounding import OTHER_ORDER, gradient_errors
from tests.tiers import tiered
from tests.tiny import save_model, tiny_block

CHANGES: dict[str, Any] = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_local_experts=4)
KERNEL = "megablocks-sparse"


@interpreted
@pytest.mark.parametrize(("world_size", "ep_size"), tiered([(4, 4)], slow=[(4, 2)]))
def test_equals_one_process(ranks: RankPool, tmp_path: Path, world_size: int, ep_size: int) -> None:
    """Two samples among up to four ranks: some have no token of their own."""
    save_model(tmp_path, **CHANGES)
    case = Case(random_samples([5, 9]), balance=0.05, kernel=KERNEL, steps=1, changes=CHANGES)
    found = ranks.run(_ours, world_size, tmp_path, Topology(world_size, ep_size), case)[0]
    assert_same(found, reference(case))


def _ours(path: Path, topology: Topology, case: Case) -> Figures | None:
    prepare_megablocks()
    return ours(path, topology, case)


@interpreted
def test_ranks_without_a_row(ranks: RankPool) -> None:
    """All tokens of all ranks go to one expert."""
    found, expected = ranks.run(_skewed, 4, KERNEL), ranks.run(_skewed, 4, "loop")
    assert [rows for rows, _ in found] == [0, 3 + 4 + 5 + 6, 0, 0]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        errors = gradient_errors(mine, theirs)
        assert max(errors.values()) <= OTHER_ORDER, errors


def _skewed(kernel: str) -> tuple[int, dict[str, Any]]:
    """(rows that this rank's expert computed, figures)."""
    prepare_megablocks()
    layer = _layer_on_ranks(kernel, num_experts_per_tok=1)
    torch.nn.init.zeros_(layer.gate.weight)
    layer.gate.weight.data[1] = 1.0
    x_BSD = 1.0 + torch.rand(1, 3 + torch.distributed.get_rank(), 128)
    with Forward() as forward:
        figures = _run(layer, x_BSD, torch.ones_like(x_BSD))
    return forward.stats[layer.experts].rows_computed, figures | _expert_grads(layer.experts.mlp)


@interpreted
@pytest.mark.parametrize("world_size", tiered([2], slow=[4]))
def test_original_layer_equals_ours(ranks: RankPool, world_size: int) -> None:
    """Also the experts' gradients, which MegaBlocks by itself would divide by the number of ranks."""
    for errors in ranks.run(_original_against_ours, world_size):
        assert max(errors.values()) <= OTHER_ORDER, errors


def _original_against_ours() -> dict[str, float]:
    prepare_megablocks()
    ours = _layer_on_ranks("loop")
    shape, mlp = ours.experts.shape, ours.experts.mlp
    original: Any = original_dmoe(shape, ours.gate.weight, mlp.w1, mlp.v1, mlp.w2, group.WORLD)
    x_BSD, grad_BSD = torch.randn(2, 1, 4, 128)
    found, expected = _run(original, x_BSD, grad_BSD), _run(ours, x_BSD, grad_BSD)
    found |= _expert_grads(original.experts.mlp) | {"router": original.router.layer.weight.grad}
    expected |= _expert_grads(mlp) | {"router": ours.gate.weight.grad}
    return gradient_errors(found, expected)


def _layer_on_ranks(kernel: str, **changes: Any) -> Any:
    """The same layer on all ranks, but for the experts, which are sharded."""
    world: Any = group.WORLD
    layer = tiny_block(kernel, **CHANGES, **changes)
    experts = layer.experts
    for name, weight in list(experts.mlp.named_parameters()):
        mine = weight.detach().chunk(world.size())[world.rank()].clone()
        setattr(experts.mlp, name, torch.nn.Parameter(mine))
    experts.dispatcher = AllToAllDispatcher(experts.shape.num_experts, world)
    return layer


def _run(layer: Any, x_BSD: Tensor, grad_BSD: Tensor) -> dict[str, Any]:
    x_BSD = x_BSD.clone().requires_grad_()
    out_BSD = layer(x_BSD)
    out_BSD.backward(grad_BSD)
    return {"out": out_BSD.detach(), "x": x_BSD.grad}


def _expert_grads(experts: Any) -> dict[str, Any]:
    return {name: getattr(experts, name).grad for name in ("w1", "v1", "w2")}
