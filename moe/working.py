"""Weights in the dtype that they are computed with, where they are held in another: bf16 beside masters in fp32.

FSDP does this for what it gathers; experts that no rank shares are not gathered.
"""

from collections.abc import Sequence
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

    def take(self, name: str, parameter: Tensor, dtype: torch.dtype, rows: list[int]) -> Sequence[Tensor]:
        """This rank's part of a parameter, in `dtype`, as many of its rows at a time. Their gradients go to the
        parameter's."""
        pieces: Sequence[Tensor] = self._rounded(name, local_part(parameter), dtype).split(rows)
        if parameter.requires_grad:
            pieces = _Working.apply(parameter, *pieces)
        return pieces

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
    """Rounded rows of a weight in the place of its parameter. Backward adds their gradients to the parameter's in the
    parameter's own dtype, straight from those of the products: autograd would first make a whole one in the
    parameter's dtype."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.parameter = parameter
        return tuple(piece.view_as(piece) for piece in pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        parameter: Tensor = ctx.parameter
        nothing = (None,) * (1 + len(grads))
        if parameter.grad is None:
            own = torch.empty_like(local_part(parameter))
            for place, grad in zip(own.split([len(grad) for grad in grads]), grads, strict=True):
                place.copy_(grad)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                shape, stride = parameter.shape, parameter.stride()
                own = DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
            parameter.grad = own
        else:
            for place, grad in zip(local_part(parameter.grad).split([len(grad) for grad in grads]), grads, strict=True):
                place.add_(grad)
        return nothing


def local_part(tensor: Tensor) -> Tensor:
    """This rank's, of a tensor that may be distributed. Not by `to_local`, which autograd would record."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
