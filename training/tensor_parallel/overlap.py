"""`--async-tp`: the matmuls at the beginning and at the end of a region in parts, beside the exchange of positions that
they wait for, or that waits for them (Wang et al., ASPLOS 2023; torch's symmetric-memory operators on NVLink).

A region's first layers are computed of each rank's positions as they arrive; of its last layer each rank's summand is
sent as soon as it is there. In backward these change places. What is computed is the same. What backward gathers once
more, for weights' gradients (see `training.tensor_parallel.kept_positions`), is waited for.

Shape suffixes: n ranks of the group, K inputs and N outputs of a layer.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...moe.torch_private import DeviceType, _distributed_c10d, enable_symm_mem_for_group
from ...moe.util.errors import ExpertMeshError
from ...sharding.collectives.tensor_parallel import TPGroup


class SymmetricMemory:
    """torch's operators for matmuls in parts beside an exchange, on GPUs that reach each other's memory over NVLink."""

    def __init__(self, group: dist.ProcessGroup):
        self.name = group.group_name

    def gather_multiply(self, x: Tensor, weights_KN: Sequence[Tensor], dim: int) -> tuple[Tensor, list[Tensor]]:
        """(all ranks' x, one after the other along `dim`; the products of that with each of the weights)."""
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, list(weights_KN), dim, self.name)
        return gathered, products

    def multiply_scatter(self, x: Tensor, weight_KN: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum of all ranks' x · weight_KN."""
        part: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight_KN, "sum", dim, self.name)
        return part


def symmetric_memory(group: TPGroup, device: torch.device) -> SymmetricMemory:
    """The operators of a group whose GPUs NVLink connects. All its ranks call it together.

    Raises:
        ExpertMeshError: NVLink does not connect them, this process does not see them all, or two ranks share one.
    """
    assert group.ranks is not None
    # one number is another GPU in another process, or the same one, wherever CUDA_VISIBLE_DEVICES differs
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    gpus: list[Any] = [None] * group.size
    dist.all_gather_object(gpus, visible[device.index], group=group.ranks)
    if hidden := [gpu for gpu in gpus if gpu not in visible]:
        raise ExpertMeshError(
            f"--async-tp: this process does not see GPU {hidden[0]} of its tensor-parallel group, so "
            "it cannot write to its memory: let every process see all GPUs of its node "
            "(CUDA_VISIBLE_DEVICES), or leave it out"
        )
    if len(set(gpus)) < len(gpus):
        raise ExpertMeshError(f"--async-tp: ranks of one tensor-parallel group share a GPU, of {gpus}; leave it out")
    module: Any = _distributed_c10d
    links, places = module._detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix, map(visible.index, gpus)
    apart = [(a, b) for a, b in permutations(places, 2) if links[a][b] == 0]
    if apart:
        raise ExpertMeshError(
            f"--async-tp: NVLink does not connect GPUs {apart[0][0]} and {apart[0][1]}, which are in one "
            "tensor-parallel group; leave it out"
        )
    enable_symm_mem_for_group(group.ranks.group_name)
    return SymmetricMemory(group.ranks)


def check_async(device_type: str) -> None:
    """
    Raises:
        ExpertMeshError: there is no GPU.
    """
    if device_type != "cuda" or not torch.cuda.is_available():
        raise ExpertMeshError("--async-tp: needs GPUs connected by NVLink; this run has no GPU; leave it out")


def gather_multiply(
    operators: SymmetricMemory,
    group: TPGroup,
    x: Tensor,
    weights_NK: Sequence[Tensor],
    dim: int,
    note: Callable[[Tensor], None],
) -> tuple[Tensor, list[Tensor]]:
    """(all ranks' positions, the outputs of layers that take them). Differentiable.

    Args:
        note: is told of all ranks' positions before they are saved for backward.
    """
    gathered, *outputs = _GatherMultiply.apply(operators, group, dim, note, x, *weights_NK)
    return gathered, outputs


def multiply_scatter(operators: SymmetricMemory, x: Tensor, weight_KN: Tensor, dim: int) -> Tensor:
    """This rank's positions of what the ranks' layers add up to. Differentiable."""
    part: Tensor = _MultiplyScatter.apply(operators, dim, x, weight_KN)
    return part


class _GatherMultiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operators: SymmetricMemory,
        group: TPGroup,
        dim: int,
        note: Callable[[Tensor], None],
        x: Tensor,
        *weights_NK: Tensor,
    ) -> Any:
        gathered, outputs = operators.gather_multiply(x.contiguous(), [weight.t() for weight in weights_NK], dim)
        note(gathered)
        ctx.save_for_backward(gathered, *weights_NK)
        ctx.operators, ctx.group, ctx.dim = operators, group, dim
        ctx.set_materialize_grads(False)
        return gathered, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_gathered: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gathered, *weights_NK = ctx.saved_tensors
        known = [(grad, weight) for grad, weight in zip(grads, weights_NK, strict=True) if grad is not None]
        grad_x = None
        if ctx.needs_input_grad[4]:
            # one product for all layers: their outputs side by side
            all_grads = torch.cat([grad for grad, _ in known], dim=-1)
            grad_x = ctx.operators.multiply_scatter(all_grads, torch.cat([weight for _, weight in known]), ctx.dim)
            if grad_gathered is not None:
                grad_x = grad_x + ctx.group.sum_scatter(grad_gathered, ctx.dim)
        rows = gathered.flatten(0, -2)
        grads_NK = [
            grad.flatten(0, -2).t() @ rows if grad is not None and needs else None
            for grad, needs in zip(grads, ctx.needs_input_grad[5:], strict=True)
        ]
        return None, None, None, None, grad_x, *grads_NK


class _MultiplyScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operators: SymmetricMemory, dim: int, x: Tensor, weight_KN: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_KN)
        ctx.operators, ctx.dim = operators, dim
        return operators.multiply_scatter(x, weight_KN, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_KN = ctx.saved_tensors
        gathered, (grad_x,) = ctx.operators.gather_multiply(grad.contiguous(), [weight_KN.t()], ctx.dim)
        grad_weight_KN = x.flatten(0, -2).t() @ gathered.flatten(0, -2) if ctx.needs_input_grad[3] else None
        return None, None, grad_x, grad_weight_KN
