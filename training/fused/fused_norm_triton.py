"""RMS norms in one Triton kernel forward and one backward. Importing this needs triton; see
`training.fused.fused_norm`.

Shape suffixes: N rows, D width, P programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Values that one program holds at a time, of several rows where rows are narrower."""


def norm_forward(x_ND: Tensor, weight_D: Tensor | None, eps: float, scale: str) -> tuple[Tensor, Tensor]:
    """As `training.fused.fused_norm.plain_norm`; and a row's factor in fp32, for backward."""
    (num_rows, width), dtype = x_ND.shape, x_ND.dtype
    if scale == "rounded" and weight_D is not None and weight_D.dtype != dtype:
        dtype = torch.promote_types(dtype, weight_D.dtype)
    out_ND = torch.empty(num_rows, width, dtype=dtype, device=x_ND.device)
    factor_N = torch.empty(num_rows, dtype=torch.float32, device=x_ND.device)
    rows, block, warps = _tile(width)
    if num_rows > 0:
        kernel: Any = _forward_kernel[(triton.cdiv(num_rows, rows),)]
        kernel(
            x_ND,
            weight_D,
            out_ND,
            factor_N,
            num_rows,
            x_ND.stride(0),
            eps,
            WIDTH=width,
            SCALE=scale,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return out_ND, factor_N


def norm_backward(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor | None, factor_N: Tensor, scale: str, weight_needs: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, if it needs one, of the weight.

    The weight's is summed up in the same order each time: by each program over rows of its own, then over programs.
    Their number depends on the shape alone.
    """
    num_rows, width = x_ND.shape
    rows, block, warps = _tile(width)
    num_blocks = triton.cdiv(num_rows, rows)
    # enough for all of a GPU's processors, and so few that their sums are small beside the rows
    num_programs = min(num_blocks, max(128, min(1024, 2**20 // block)))
    d_x_ND = torch.empty(num_rows, width, dtype=x_ND.dtype, device=x_ND.device)
    sums_PD = torch.empty(num_programs, width, dtype=torch.float32, device=x_ND.device) if weight_needs else None
    if num_rows > 0:
        kernel: Any = _backward_kernel[(num_programs,)]
        kernel(
            grad_ND,
            x_ND,
            weight_D,
            factor_N,
            d_x_ND,
            sums_PD,
            num_rows,
            num_blocks,
            grad_ND.stride(0),
            x_ND.stride(0),
            WIDTH=width,
            SCALE=scale,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    if sums_PD is None or weight_D is None:
        return d_x_ND, None
    return d_x_ND, sums_PD.sum(dim=0).to(weight_D.dtype)


def _tile(width: int) -> tuple[int, int, int]:
    """(rows of a program at a time, columns with those that are masked, warps)."""
    block = triton.next_power_of_2(width)
    rows = max(1, BLOCK // block)
    return rows, block, min(16, max(4, rows * block // 512))


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    factor_ptr,
    num_rows,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # rows times width passes 2^31 at 524 288 rows of 4 096
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < WIDTH)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)  # type: ignore[var-annotated]
    tl.store(factor_ptr + row, factor, mask=row < num_rows)
    normed = wide * factor[:, None]
    if SCALE == "rounded":
        normed = normed.to(x.dtype).to(tl.float32)
    if SCALE != "none":
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if SCALE == "one more":
            weight += 1.0
        normed *= weight[None, :]
    out_index = row[:, None] * WIDTH + column[None, :]
    tl.store(out_ptr + out_index, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    x_ptr,
    weight_ptr,
    factor_ptr,
    d_x_ptr,
    sums_ptr,
    num_rows,
    num_blocks,
    grad_stride,
    x_stride,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if SCALE != "none":
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if SCALE == "one more":
            weight += 1.0
    if sums_ptr is not None:
        d_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for block in range(program, num_blocks, tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < num_rows) & (column[None, :] < WIDTH)
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        grad_index = row[:, None] * grad_stride + column[None, :]
        grad = tl.load(grad_ptr + grad_index, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + row, mask=row < num_rows, other=0.0)
        normed = x.to(tl.float32) * factor[:, None]
        if sums_ptr is not None:
            if SCALE == "rounded":
                d_weight += grad * normed.to(x.dtype).to(tl.float32)
            else:
                d_weight += grad * normed
        if SCALE != "none":
            grad *= weight[None, :]
        along = tl.sum(grad * normed, axis=1) / WIDTH
        d_x = (grad - normed * along[:, None]) * factor[:, None]
        d_x_index = row[:, None] * WIDTH + column[None, :]
        tl.store(d_x_ptr + d_x_index, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        tl.store(sums_ptr + program * WIDTH + column, tl.sum(d_weight, axis=0), mask=column < WIDTH)
