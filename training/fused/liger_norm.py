"""RMS norms of transformers' modules by liger-kernel, each computed in one read of its input and one write.

Which of liger's norms a module computes is found out by trying them: families differ in where they round and in what
they scale by.

Shape suffixes: N rows, D width.
"""

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ...moe.util.step_parts import register_step_part
from .trial import takes_kernel, try_kernel

register_step_part(__name__, "norms")

ROWS, ROWS_AT_ONCE, NARROW = 32, 8 * 4096, 256
"""Rows of a trial; and from how many on, of rows no wider than this, liger has another kernel, which is tried then."""
_UNSCALED_WIDTH = 64
"""To try modules with that say nothing of a width."""


@dataclass(frozen=True)
class Norm:
    """One of liger's RMS norms. offset: added to the weight. casting: "llama", rounded before it is multiplied by the
    weight, or "gemma", after. weight: name of the parameter; None if there is none. dtype: of input and weight."""

    eps: float
    offset: float
    casting: str
    weight: str | None
    dtype: torch.dtype


_KINDS = (("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0))


def use_liger_norm(
    module: nn.Module, dtype: torch.dtype, device: torch.device, known: dict[Hashable, Norm | None]
) -> bool:
    """Have `module` compute by liger's kernel where tensors take it, else as ever; whether it does.

    known: what modules have been found to compute; one like another is not tried again.
    """
    kind = norm_kind(module)
    if kind not in known:
        known[kind] = try_norm(module, dtype, device)
    norm = known[kind]
    if norm is not None:
        # an attribute of the instance: its class, the names of its parameters and its hooks stay
        module.forward = MethodType(partial(_forward, norm), module)
    return norm is not None


def is_by_liger(module: nn.Module) -> bool:
    """Whether `use_liger_norm` has had it compute so."""
    forward = getattr(vars(module).get("forward"), "__func__", None)
    return isinstance(forward, partial) and forward.func is _forward


def may_be_norm(module: nn.Module) -> bool:
    """Whether it is a norm that has a number for its epsilon, and a vector of weights or none."""
    parameters = list(module.parameters())
    is_plain = not [*module.children()] and not [*module.buffers()] and len(parameters) <= 1
    has_epsilon = any(isinstance(x, float) for x in vars(module).values())
    return is_plain and has_epsilon and all(p.dim() == 1 for p in parameters) and "Norm" in type(module).__name__


def norm_kind(module: nn.Module) -> Hashable:
    """The same for modules that compute the same, whatever their weights."""
    plain = tuple((name, x) for name, x in vars(module).items() if isinstance(x, bool | int | float | str))
    return type(module), plain, tuple((name, p.shape) for name, p in module.named_parameters())


def try_norm(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Norm | None:
    """The norm of liger's that comes nearest to a module's own in a trial; None if none passes it."""
    name, weight = next(iter(module.named_parameters()), (None, None))
    width = _UNSCALED_WIDTH if weight is None else len(weight)
    rows = ROWS_AT_ONCE if width <= NARROW and device.type == "cuda" else ROWS
    generator = torch.Generator().manual_seed(0)
    # of many magnitudes, some no larger than what a norm adds to their mean square
    x_ND = torch.randn(rows, width, generator=generator) * torch.logspace(-4, 2, rows).unsqueeze(1)
    inputs = [x_ND.to(device, dtype)]
    if name is not None:
        inputs.append(torch.randn(width, generator=generator).to(device, dtype))
    copied = deepcopy(module).to_empty(device=device)

    def own(x_ND: Tensor, weight_D: Tensor | None = None) -> Any:
        return functional_call(copied, {} if name is None or weight_D is None else {name: weight_D}, (x_ND,))

    found: list[tuple[float, Norm]] = []
    for eps in {x for x in vars(module).values() if isinstance(x, float)}:
        for casting, offset in _KINDS if name is not None else [("gemma", 0.0)]:
            norm = Norm(eps, offset, casting, name, dtype)
            distance = try_kernel(own, lambda x, weight=None, norm=norm: rms_norm(x, weight, norm), inputs)
            found += [] if distance is None else [(distance, norm)]
    return min(found, key=lambda each: each[0])[1] if found else None


def _forward(norm: Norm, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that computes `norm`, in place of its own."""
    if len(args) == 1 and not kwargs and takes_kernel(args[0], norm.dtype):
        weight = None if norm.weight is None else getattr(self, norm.weight)
        if weight is None or (weight.shape == args[0].shape[-1:] and weight.dtype == norm.dtype):
            return rms_norm(args[0], weight, norm)
    return type(self).forward(self, *args, **kwargs)


def rms_norm(x: Tensor, weight_D: Tensor | None, norm: Norm) -> Tensor:
    # a view of what the function returns, not a view that it returns: some models clamp it in place
    out_ND: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight_D, norm)
    return out_ND.view(x.shape)


class _RMSNorm(Function):
    """liger's `LigerRMSNormFunction`; keeps x, which is there anyway, and one value per row for backward."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor | None, norm: Norm) -> Tensor:
        out_ND, factor_N, ctx.settings = norm_forward(x_ND, weight_D, norm)
        ctx.save_for_backward(x_ND, weight_D, factor_N)
        ctx.norm = norm
        # liger's is a view, of the same shape
        return out_ND.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, factor_N = ctx.saved_tensors
        weight_needs = ctx.needs_input_grad[1]
        grads = norm_backward(grad_ND.contiguous(), x_ND, weight_D, factor_N, ctx.norm, ctx.settings, weight_needs)
        return *grads, None


def norm_forward(x_ND: Tensor, weight_D: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor, Any]:
    """The normed rows, each row's factor, and what liger's backward wants to know."""
    from liger_kernel.ops import rms_norm_forward

    out_ND, _, factor_N, block_size, num_warps, casting = rms_norm_forward(
        x_ND, weight_D, norm.eps, norm.offset, norm.casting, None
    )
    return out_ND, factor_N, (casting, block_size, num_warps)


def norm_backward(
    grad_ND: Tensor,
    x_ND: Tensor,
    weight_D: Tensor | None,
    factor_N: Tensor,
    norm: Norm,
    settings: Any,
    weight_needs: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, if it needs one, of the weight."""
    from liger_kernel.ops import rms_norm_backward

    casting, block_size, num_warps = settings
    in_place, row_mode = False, None  # not in place: the gradient that comes in may be another operator's too
    d_x_ND, d_weight_D = rms_norm_backward(
        *(grad_ND, x_ND, weight_D, factor_N, norm.offset, casting, block_size, num_warps, in_place, row_mode),
        needs_dw=weight_needs,
    )
    return d_x_ND, d_weight_D
