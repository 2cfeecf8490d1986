"""`moe.kernels.weighing` in one Triton kernel forward and one backward. Importing this needs triton.

Why our own: torch has no operator that gives both gradients in one pass; its own move five times as many bytes, of rows
in fp32.

A program has a row's elements in a fixed order: the same bits on every run.

Shape suffixes: R rows, F expert width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..util.step_parts import register_step_part, writes
from .swiglu_triton import block_of_row

register_step_part(
    __name__,
    "experts' activation",
    kernels={
        "_forward_kernel": writes("out_ptr"),
        "_backward_kernel": writes("d_hidden_ptr", "d_weights_ptr"),
    },
)


def fused_weighed(hidden_RF: Tensor, weights_R: Tensor) -> Tensor:
    """As `moe.kernels.weighing.plain_weighed`."""
    out_RF = torch.empty_like(hidden_RF)
    num_rows, width = hidden_RF.shape
    if out_RF.numel() > 0:
        _forward_kernel[(num_rows,)](hidden_RF, weights_R, out_RF, width, block_of_row(width))  # type: ignore[arg-type]
    return out_RF


def fused_weighed_backward(grad_RF: Tensor, hidden_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    """As `moe.kernels.weighing.plain_weighed_backward`."""
    d_hidden_RF, d_weights_R = torch.empty_like(hidden_RF), torch.empty_like(weights_R)
    num_rows, width = hidden_RF.shape
    if d_hidden_RF.numel() > 0:
        tensors = (grad_RF, hidden_RF, weights_R, d_hidden_RF, d_weights_R)
        _backward_kernel[(num_rows,)](*tensors, width, block_of_row(width))  # type: ignore[arg-type]
    return d_hidden_RF, d_weights_R


@triton.jit
def _forward_kernel(hidden_ptr, weights_ptr, out_ptr, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row."""
    # rows times width passes 2^31 at 150 000 rows of Mixtral 8x7B
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        hidden = tl.load(hidden_ptr + row * width + column, mask=inside).to(tl.float32)
        tl.store(out_ptr + row * width + column, (hidden * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, hidden_ptr, weights_ptr, d_hidden_ptr, d_weights_ptr, width, block: tl.constexpr
):
    """A row."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        grad = tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        hidden = tl.load(hidden_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        d_hidden = (grad * weight).to(d_hidden_ptr.dtype.element_ty)
        tl.store(d_hidden_ptr + row * width + column, d_hidden, mask=inside)
        total += grad * hidden
    tl.store(d_weights_ptr + row, tl.sum(total, axis=0))
