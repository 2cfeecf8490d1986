"""Weights in the dtype that they are computed with, where they are held in another: bf16 beside masters in fp32.

FSDP does this for what it gathers; experts that no rank shares are not gathered.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


class WorkingWeights:
    """Of one module.

    Attributes:
        are_kept: whether what a forward has rounded serves all following ones until the weight changes, for the memory
            of a second copy; else each forward rounds anew, also one that runs again for its backward.
    """

    def __init__(self) -> None:
        self.are_kept = False
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def outdate(self) -> None:
        """To be told after each update: torch's fused optimizers change weights without a trace in their versions."""
        self._kept = {name: (-1, working) for name, (_, working) in self._kept.items()}

    def take(self, name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's part of a parameter, in `dtype`. Its gradient goes to the parameter's."""
        working = self._rounded(name, _local(parameter), dtype)
        if parameter.requires_grad:
            working = _Working.apply(parameter, working)
        return working

    def _rounded(self, name: str, local: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.are_kept:
            return local.detach().to(dtype)
        version, working = self._kept.get(name, (-1, None))
        if working is None:
            working = torch.empty_like(local, dtype=dtype)
        if version != local._version:
            with torch.no_grad():
                working.copy_(local)
            self._kept[name] = (local._version, working)
        return working


class _Working(torch.autograd.Function):
    """A rounded weight in the place of its parameter. Backward adds the gradient to the parameter's in the parameter's
    own dtype, straight from that of the product: autograd would first make a whole one in the parameter's dtype."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, working: Tensor) -> Tensor:
        ctx.parameter = parameter
        return working.view_as(working)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        parameter: Tensor = ctx.parameter
        if parameter.grad is None:
            own = grad.to(parameter.dtype, memory_format=torch.contiguous_format)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                shape, stride = parameter.shape, parameter.stride()
                own = DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
            parameter.grad = own
        else:
            _local(parameter.grad).add_(grad)
        return None, None


def _local(tensor: Tensor) -> Tensor:
    """Not by `to_local`, which autograd would record."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
