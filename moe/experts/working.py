"""Weights in the compute dtype, where they are stored in another: bf16 copies of fp32 master weights.

FSDP does this for what it gathers; experts that are not sharded are not gathered.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from expertmesh.moe.base.declared import StepPart

STEP_PART: StepPart = None


class WorkingWeights:
    """The working weights of one module.

    Attributes:
        are_kept: whether weights rounded by a forward serve all following ones until the weight changes, at the cost of
            the memory of a second copy; else each forward rounds anew, also a recomputation for backward.
    """

    def __init__(self) -> None:
        self.are_kept = False
        self._kept: dict[str, tuple[int, Tensor]] = {}

    def outdate(self) -> None:
        """To be called after each update: torch's fused optimizers change weights without changing their versions."""
        self._kept = {name: (-1, working) for name, (_, working) in self._kept.items()}

    def take(self, name: str, parameter: Tensor, dtype: torch.dtype, rows: list[int]) -> Sequence[Tensor]:
        """This rank's part of a parameter, in `dtype`, in pieces of `rows` rows. Their gradients go to the
        parameter's."""
        pieces: Sequence[Tensor] = self._rounded(name, local_part(parameter), dtype).split(rows)
        if parameter.requires_grad:
            pieces = _Working.apply(parameter, *pieces)
        return pieces

    def _rounded(self, name: str, local: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.are_kept or local.dtype == dtype:
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
    parameter's own dtype, straight from those of the matmuls: autograd would first make a full-size one in the
    parameter's dtype. It is called without any where they are computed later (see `moe.experts.weight_gradients`)."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.parameter = parameter
        ctx.set_materialize_grads(False)
        return tuple(piece.view_as(piece) for piece in pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        parameter: Tensor = ctx.parameter
        nothing = (None,) * (1 + len(grads))
        given = [grad for grad in grads if grad is not None]
        if not given:
            return nothing
        assert len(given) == len(grads), "a layer's GEMMs are all computed at once, or all later"
        if parameter.grad is None:
            own = torch.empty_like(local_part(parameter))
            for place, grad in zip(own.split([len(grad) for grad in given]), given, strict=True):
                place.copy_(grad)
            parameter.grad = distributed_like(parameter, own)
        else:
            for place, grad in zip(local_part(parameter.grad).split([len(grad) for grad in given]), given, strict=True):
                place.add_(grad)
        return nothing


def distributed_like(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor of which `local` is this rank's part, distributed as a parameter is; `local` if that is not."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be distributed. Not by `to_local`, which autograd would record."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
