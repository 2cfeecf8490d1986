"""RMS norms of transformers' modules, each computed in one read of its input and one write.

What a module computes is found out by running it on random values: families differ in where they round and in what
they scale by.

Shape suffixes: N rows, D width.
"""

from collections.abc import Hashable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...moe.util.gpu import takes_triton

_SCALES = ("rounded", "exact", "one more")
"""What becomes of normed values in fp32: rounded to the input's dtype and then multiplied by the weight; or multiplied
by it, or by one more than it, and then rounded. Where there is no weight it is "none"."""
WIDEST = 8192
"""Width of the widest rows that the kernels take: backward's values of wider ones do not fit in a GPU's registers."""
_UNSCALED_WIDTH = 64
"""To try modules with that say nothing of a width."""


@dataclass(frozen=True)
class Norm:
    """What a module computes. scale: of _SCALES, or "none". weight: name of the parameter, None if there is none."""

    eps: float
    scale: str
    weight: str | None


def fuse_norm(module: nn.Module, known: dict[Hashable, Norm | None] | None = None) -> bool:
    """Have `module` compute by Triton's kernels where tensors take them, else as ever; whether it is an RMS norm.

    known: what modules have been found to compute; one like another is not tried again.
    """
    known = {} if known is None else known
    kind = _kind(module)
    if kind not in known:
        known[kind] = try_norm(module)
    norm = known[kind]
    if norm is None:
        return False
    # an attribute of the instance: its class, the names of its parameters and its hooks stay
    module.forward = MethodType(partial(_forward, norm), module)
    return True


def _kind(module: nn.Module) -> Hashable:
    """The same for modules that compute the same, whatever their weights."""
    plain = tuple((name, x) for name, x in vars(module).items() if isinstance(x, bool | int | float | str))
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), plain, tuple((name, tensor.shape) for name, tensor in tensors)


@torch.no_grad()
def try_norm(module: nn.Module) -> Norm | None:
    """What a module with at most one parameter computes; None if it is no RMS norm that we know."""
    parameters = list(module.named_parameters())
    is_plain = not [*module.children()] and not [*module.buffers()] and len(parameters) <= 1
    if not is_plain or any(parameter.dim() != 1 for _, parameter in parameters):
        return None
    name, width = (parameters[0][0], len(parameters[0][1])) if parameters else (None, _UNSCALED_WIDTH)
    scales = ("none",) if name is None else _SCALES
    candidates = [Norm(x, scale, name) for x in vars(module).values() if isinstance(x, float) for scale in scales]
    if not candidates:
        return None
    copied = deepcopy(module).to_empty(device="cpu")
    for x_dtype, weight_dtype in product((torch.float32, torch.bfloat16), repeat=2):
        x_ND, weight_D = _numbers(width, x_dtype, weight_dtype)
        for parameter in copied.parameters():
            parameter.data = weight_D
        try:
            with torch.random.fork_rng(devices=[]):
                found_ND = copied(x_ND)
        except Exception:
            return None
        candidates = [norm for norm in candidates if _equal(found_ND, plain_norm(x_ND, weight_D, norm))]
    return candidates[0] if candidates else None


def _numbers(width: int, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of many magnitudes, of which some are no larger than what a norm adds to their mean square; a weight."""
    generator = torch.Generator().manual_seed(0)
    magnitudes_N1 = torch.logspace(-4, 2, 32).unsqueeze(1)
    x_ND = torch.randn(32, width, generator=generator) * magnitudes_N1
    return x_ND.to(x_dtype), torch.randn(width, generator=generator).to(weight_dtype)


def _equal(found: Any, expected: Tensor) -> bool:
    """But for the last bits of fp32, which tip a few roundings."""
    if not isinstance(found, Tensor) or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    if found.dtype == torch.float32:
        return torch.allclose(found, expected, rtol=1e-5, atol=0)
    return (found == expected).float().mean().item() > 0.99


def plain_norm(x_ND: Tensor, weight_D: Tensor | None, norm: Norm) -> Tensor:
    """What the kernel computes, in torch's own operations."""
    wide_ND = x_ND.float()
    normed_ND = wide_ND * torch.rsqrt(wide_ND.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.scale == "none" or weight_D is None:
        return normed_ND.to(x_ND.dtype)
    if norm.scale == "rounded":
        return weight_D * normed_ND.to(x_ND.dtype)
    weight_D = weight_D.float() + 1 if norm.scale == "one more" else weight_D.float()
    return (weight_D * normed_ND).to(x_ND.dtype)


def _forward(norm: Norm, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that computes `norm`, in place of its own."""
    if len(args) == 1 and not kwargs and _takes_kernel(args[0]):
        weight = None if norm.weight is None else getattr(self, norm.weight)
        if weight is None or weight.shape == args[0].shape[-1:]:
            # a view of what the function returns, not a view that it returns: some models clamp it in place
            return FusedNorm.apply(_in_rows(args[0]), weight, norm).view(args[0].shape)
    return type(self).forward(self, *args, **kwargs)


def _takes_kernel(x: Tensor) -> bool:
    # the compiler makes better kernels of the module's own code, as it sees what comes before and after
    return (
        not torch.compiler.is_compiling()
        and takes_triton(x)
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.shape[-1] <= WIDEST
    )


class FusedNorm(Function):
    """`plain_norm` by Triton's kernels; keeps x, which is there anyway, and one value per row for backward."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor | None, norm: Norm) -> Tensor:
        from .fused_norm_triton import norm_forward

        out_ND, factor_N = norm_forward(x_ND, weight_D, norm.eps, norm.scale)
        ctx.save_for_backward(x_ND, weight_D, factor_N)
        ctx.scale = norm.scale
        return out_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        from .fused_norm_triton import norm_backward

        x_ND, weight_D, factor_N = ctx.saved_tensors
        d_x_ND, d_weight_D = norm_backward(
            _in_rows(grad_ND), x_ND, weight_D, factor_N, ctx.scale, ctx.needs_input_grad[1]
        )
        return d_x_ND, d_weight_D, None


def _in_rows(x: Tensor) -> Tensor:
    """x as (N, D), each row contiguous; without a copy of what a projection gives, or of its heads."""
    x_ND = x.reshape(-1, x.shape[-1])
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
