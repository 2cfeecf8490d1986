"""Gradients of experts' weights that are computed later than backward (`moe.kernels.weight_gradients`), on sharded
models.

Experts without an FSDP unit need nothing more: gradients are added to their parameters'. Those with one (dp > 1, or
--offload) have their gradients reduced over dp by the unit in a hook of backward, which has passed by then. So what is
computed later is reduced here: in one reduce-scatter per layer with the unit's own layout, dtype and order of
summation, so that the sums have the same bits. Over NCCL nothing overlaps it.

Shape suffixes: n ranks of dp, P elements of one rank's part.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...moe.experts.bf16_copies import distributed_like, local_part
from ...moe.experts.model_layers import moe_layers
from ...moe.kernels.weight_gradients import ExpertsCall, WeightGradients
from ...moe.util.gpu import is_gpu
from ..collectives.gloo import GlooReduceScatter, SharedMemory
from ..collectives.groups import reduce_scatter
from ..mesh import Mesh


def weight_gradients(model: Any, mesh: Mesh) -> WeightGradients:
    """Where backwards of a model's layers, or of some of them, leave weight gradients for later.

    Args:
        model: parallelized, with its weights in memory, and not between a forward and its backward.
    """
    return WeightGradients(_Reduction(model, mesh))


class _Reduction:
    """Adds up over dp the gradients of a call's gathered parameters, and adds this rank's part of the sums to the
    gradients of the sharded parameters."""

    def __init__(self, model: Any, mesh: Mesh):
        self.sharded: dict[nn.Module, dict[str, nn.Parameter]] = {
            layer.mlp: dict(layer.mlp.named_parameters())
            for layer in moe_layers(model)
            if isinstance(layer.mlp, FSDPModule)
        }
        parameters = (parameter for own in self.sharded.values() for parameter in own.values())
        assert all(_is_sharded_over_dp(parameter) for parameter in parameters), "experts are gathered"
        self.group = mesh.dp.get_group()
        is_gloo = not is_gpu(mesh.grid.device_type)
        self.over_gloo = GlooReduceScatter(SharedMemory()) if is_gloo else None

    def __call__(self, call: ExpertsCall) -> None:
        if call.module not in self.sharded:
            return
        gathered = {name: parameter for name, parameter in call.parameters.items() if parameter.grad is not None}
        shards = [self.sharded[call.module][name] for name in gathered]
        grads = []
        for parameter in gathered.values():
            assert parameter.grad is not None
            grads.append(local_part(parameter.grad))
            # else the unit would reduce it in the next backward
            parameter.grad = None
        for shard, part in zip(shards, self._reduce(grads), strict=True):
            _add_gradient(shard, part)

    @torch.no_grad()
    def _reduce(self, grads: list[Tensor]) -> list[Tensor]:
        """This rank's rows of the sums of each gradient over dp, in fp32. As FSDP has it: every rank has as many rows
        as the first, of which the last ranks' may be padding."""
        num_ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        rows = [-(-len(grad) // num_ranks) for grad in grads]
        sizes = [each * grad.shape[1] for each, grad in zip(rows, grads, strict=True)]
        data_nP = self._empty(num_ranks * sum(sizes), grads[0].device)
        for other, part_P in enumerate(data_nP.chunk(num_ranks)):
            for each, grad, place in zip(rows, grads, part_P.split(sizes), strict=True):
                term = grad[other * each : (other + 1) * each].flatten()
                # padding is in no one's rows, and so stays what it is
                place[: len(term)].copy_(term)
        num_rows = [len(grad[rank * each : (rank + 1) * each]) for each, grad in zip(rows, grads, strict=True)]
        widths = [grad.shape[1] for grad in grads]
        grads.clear()
        out_P = self._empty(sum(sizes), data_nP.device)
        if self.over_gloo is not None:
            self.over_gloo(out_P, data_nP, self.group, dist.ReduceOp.SUM)
        else:
            reduce_scatter(out_P, data_nP, self.group)
        parts = zip(out_P.split(sizes), num_rows, widths, strict=True)
        return [part_P[: num * width].view(num, width) for part_P, num, width in parts]

    def _empty(self, numel: int, device: torch.device) -> Tensor:
        if self.over_gloo is not None:
            return self.over_gloo.allocate((numel,), dtype=torch.float32, device=device)
        return torch.empty(numel, dtype=torch.float32, device=device)


def _is_sharded_over_dp(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "dp" in (parameter.device_mesh.mesh_dim_names or ())


def _add_gradient(parameter: nn.Parameter, part: Tensor) -> None:
    # with --offload parameters and gradients are in host memory
    local = local_part(parameter)
    part = part.to(local.device, local.dtype)
    if parameter.grad is None:
        parameter.grad = distributed_like(parameter, part).to(local.device)
    else:
        local_part(parameter.grad).add_(part)
