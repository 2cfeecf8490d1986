"""Weights in the compute dtype, where they are stored in another: bf16 copies of fp32 master weights.

FSDP does this for what it gathers; experts that are not sharded are not gathered.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


class WorkingWeights:
    """The working weights of one module.

    Attributes:
        are_kept: whether weights rounded by a forward serve all following ones until the weight changes, at the cost of
            the memory of a second copy; else each forward rounds anew, also a recomputation for backward.
    """

    def __init__(self) -> None:
        self.are_kept = False
        # with the versions of the weights that it was rounded from
        self._kept: dict[str, tuple[list[int], Tensor]] = {}

    def outdate(self) -> None:
        """To be called after each update: torch's fused optimizers change weights without changing their versions."""
        self._kept = {name: ([], working) for name, (_, working) in self._kept.items()}

    def take(self, name: str, parameters: Sequence[Tensor], dtype: torch.dtype, sizes: list[int]) -> Sequence[Tensor]:
        """This rank's part of parameters (e·F, ...), of which each expert has as many rows, in `dtype`: in one tensor
        (e, n·F, ...), of each expert the rows of the first, then of the second; in pieces of `sizes` experts. Their
        gradients go to the parameters'."""
        sources = [_by_expert(local_part(parameter).detach(), sum(sizes)) for parameter in parameters]
        is_as_it_lies = len(sources) == 1 and sources[0].dtype == dtype
        working = sources[0] if is_as_it_lies else self._rounded(name, sources, dtype)
        return _recorded(parameters, working.split(sizes))

    def _rounded(self, name: str, sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Tensors in `dtype`, concatenated along dim 1."""
        versions = [source._version for source in sources]
        of, working = self._kept.get(name, ([], None)) if self.are_kept else ([], None)
        if working is None:
            first = sources[0]
            rows = sum(source.shape[1] for source in sources)
            working = first.new_empty((first.shape[0], rows, *first.shape[2:]), dtype=dtype)
        if of != versions:
            for place, source in zip(working.split([s.shape[1] for s in sources], dim=1), sources, strict=True):
                place.copy_(source)
        if self.are_kept:
            self._kept[name] = (versions, working)
        return working


def _recorded(parameters: Sequence[Tensor], pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pieces of working weights of these parameters, with a graph if one of them is trained."""
    if not any(parameter.requires_grad for parameter in parameters):
        return pieces
    working: Sequence[Tensor] = _Working.apply(len(parameters), *parameters, *pieces)
    return working


class _Working(torch.autograd.Function):
    """Rounded rows of a weight in the place of its parameter, or of several joined. Backward adds their gradients to
    the parameter's in the parameter's own dtype, straight from those of the matmuls: autograd would first make a
    full-size one in the parameter's dtype. It is called without any where they are computed later (see
    `moe.kernels.weight_gradients`)."""

    @staticmethod
    def forward(ctx: Any, num_parameters: int, *parameters_and_pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters = parameters_and_pieces[:num_parameters]
        ctx.set_materialize_grads(False)
        return tuple(piece.view_as(piece) for piece in parameters_and_pieces[num_parameters:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        parameters: tuple[Tensor, ...] = ctx.parameters
        given = [grad for grad in grads if grad is not None]
        assert len(given) in (0, len(grads)), "a layer's GEMMs are all computed at once, or all later"
        for number, parameter in enumerate(parameters):
            if given and ctx.needs_input_grad[1 + number]:
                _add_gradient(parameter, [grad.chunk(len(parameters), dim=1)[number] for grad in given])
        return (None,) * (1 + len(parameters) + len(grads))


def _add_gradient(parameter: Tensor, pieces: Sequence[Tensor]) -> None:
    """Add to a parameter's gradient what is given in pieces (e, F, ...) of experts."""
    is_first = parameter.grad is None
    local = torch.empty_like(local_part(parameter)) if parameter.grad is None else local_part(parameter.grad)
    sizes = [len(piece) for piece in pieces]
    for place, piece in zip(_by_expert(local, sum(sizes)).split(sizes), pieces, strict=True):
        place.copy_(piece) if is_first else place.add_(piece)
    if is_first:
        parameter.grad = distributed_like(parameter, local)


def _by_expert(local: Tensor, num_experts: int) -> Tensor:
    return local.view(num_experts, -1, *local.shape[1:])


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
