"""Whether a kernel computes what a family's own code computes, found out by a trial."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...moe.util.gpu import takes_triton

FACTOR, FLOOR = 2.0, 16 * torch.finfo(torch.float32).eps
"""How much further from the reference a kernel's result may be than the family's own, and how far in any case: two that
round in different places, or add up in another order, are within this."""


def try_kernel(own: Callable[..., Any], kernel: Callable[..., Any], inputs: Sequence[Tensor]) -> float | None:
    """Run a family's own code and a kernel on the same numbers, forward and backward, beside the family's code in fp32,
    which both are compared with, row by row.

    Args:
        inputs: all of one dtype; all get gradients.

    Returns:
        How far the kernel's result is from the family's own in forward; None if one of its results is further from the
        reference than is allowed, or has another dtype or shape, or if either does not run.
    """

    def results(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        outs = function(*leaves)
        outs = [outs] if isinstance(outs, Tensor) else list(outs)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outs]
        return [*outs, *torch.autograd.grad(outs, leaves, grads)]

    dtype = inputs[0].dtype
    try:
        with torch.enable_grad():
            want, expected, found = results(own, torch.float32), results(own, dtype), results(kernel, dtype)
    except Exception:
        return None
    if [(x.dtype, x.shape) for x in found] != [(x.dtype, x.shape) for x in expected]:
        return None
    for mine, theirs, exact in zip(found, expected, want, strict=True):
        # not >, which what is no number passes
        if not _distance(mine, exact) <= FACTOR * _distance(theirs, exact) + FLOOR:
            return None
    return _distance(found[0], expected[0])


def _distance(found: Tensor, exact: Tensor) -> float:
    """Of the row that is furthest off, relative to it."""
    found, exact = found.detach().double(), exact.detach().double()
    norm = exact.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found - exact).norm(dim=-1) / norm).max())


def takes_kernel(x: Any, dtype: torch.dtype) -> bool:
    """Whether a kernel that was tried with this dtype computes with `x`. What is compiled is left to the compiler,
    which sees what comes before and after."""
    is_known = isinstance(x, Tensor) and x.dtype == dtype and x.numel() > 0 and takes_triton(x)
    return is_known and not torch.compiler.is_compiling()
