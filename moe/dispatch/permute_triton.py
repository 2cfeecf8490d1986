"""What `moe.dispatch.permute` does, in one Triton kernel each, a token's K rows in one program. Importing this needs
triton.

Why our own: torch has no operator that sums a token's weighted rows, and what it has in several passes moves about
860 MB where one moves 96 (Mixtral 8x7B, 4,096 tokens per GPU; reckoned from sizes, 40 to 60 ms of a micro-batch's
1.1 s on an H100).

A program writes what no other writes, and sums in a fixed order: the same bits on every run, without atomics. Routers'
weights are applied to rows that are in registers anyway, so that they cost no memory traffic but their own.

Shape suffixes: T tokens, D model width, K experts per token, n routed rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..util.step_parts import register_step_part, writes

register_step_part(
    __name__,
    "permute, combine",
    kernels={
        "_spread_kernel": writes("rows_ptr"),
        "_gather_sum_kernel": writes("out_ptr"),
        "_combine_backward_kernel": writes("grad_rows_ptr", "grad_weights_ptr"),
    },
)

BLOCK = 1024
"""Elements of a row that a program processes at a time: in 4 warps, 16 bytes of bf16 per thread."""

TILE = 4096
"""Most elements of K rows that a program processes at a time: each thread then sums up 32 of them in fp32."""


def fused_spread(x_TD: Tensor, position_TK: Tensor, is_kept_TK: Tensor | None, num_rows: int) -> Tensor:
    """As `moe.dispatch.permute.plain_spread`, but rows of choices that are not kept are undefined. Each token is read
    once."""
    assert all(t is None or t.is_contiguous() for t in (x_TD, position_TK, is_kept_TK))
    (num_tokens, top_k), width = position_TK.shape, x_TD.shape[1]
    rows_nD = x_TD.new_empty(num_rows, width)
    if x_TD.numel() > 0:
        grid, block = _grid(num_tokens, width)
        _spread_kernel[grid](x_TD, position_TK, is_kept_TK, rows_nD, width, top_k, block)  # type: ignore[arg-type]
    return rows_nD


def fused_gather_sum(
    rows_nD: Tensor,
    position_TK: Tensor,
    is_kept_TK: Tensor | None,
    weights_TK: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As `moe.dispatch.permute.gather_sum`. Every kept row is read once, no other is read."""
    assert all(t is None or t.is_contiguous() for t in (rows_nD, position_TK, is_kept_TK, weights_TK))
    (num_tokens, top_k), width = position_TK.shape, rows_nD.shape[1]
    out_TD = rows_nD.new_empty(num_tokens, width, dtype=dtype)
    if out_TD.numel() > 0:
        grid, block = _grid(num_tokens, width)
        tensors = (rows_nD, position_TK, is_kept_TK, weights_TK, out_TD)
        _gather_sum_kernel[grid](*tensors, width, top_k, block)  # type: ignore[arg-type]
    return out_TD


def fused_combine_backward(
    grad_TD: Tensor, rows_nD: Tensor, weights_TK: Tensor, position_TK: Tensor, is_kept_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `moe.dispatch.permute.plain_combine_backward`. Every kept row is read once, its gradient written once, and
    grad_TD read once for all K."""
    inputs = (grad_TD, rows_nD, weights_TK, position_TK, is_kept_TK)
    assert all(t is None or t.is_contiguous() for t in inputs)
    (num_tokens, top_k), width = position_TK.shape, rows_nD.shape[1]
    grads = torch.empty_like(rows_nD), torch.empty_like(weights_TK)
    if num_tokens > 0:
        padded_k = triton.next_power_of_2(top_k)
        block = min(BLOCK, TILE // padded_k, triton.next_power_of_2(width))
        sizes = (width, top_k, padded_k, block)
        _combine_backward_kernel[(num_tokens,)](*inputs, *grads, *sizes)  # type: ignore[arg-type]
    return grads


def _grid(num_tokens: int, width: int) -> tuple[tuple[int, int], int]:
    """A program for each token and block of columns; and the block's size."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return (num_tokens, triton.cdiv(width, block)), block


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    x_ptr, position_ptr, is_kept_ptr, rows_ptr, width, top_k: tl.constexpr, block: tl.constexpr
):
    """One token, and `block` of its D elements. is_kept_ptr may be None."""
    # rows times width pass 2^31 at 524 288 rows of Mixtral 8x7B
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(x_ptr + token * width + column, mask=column < width)
    for k in tl.static_range(top_k):
        choice = token * top_k + k
        end = width
        if is_kept_ptr is not None:
            end = tl.where(tl.load(is_kept_ptr + choice), width, 0)
        start = tl.load(position_ptr + choice) * width
        tl.store(rows_ptr + start + column, x, mask=column < end)


@triton.jit
def _gather_sum_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, position_ptr, is_kept_ptr, weights_ptr, out_ptr, width, top_k: tl.constexpr, block: tl.constexpr
):
    """One token, and `block` of its D elements. is_kept_ptr and weights_ptr may be None."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(top_k):
        choice = token * top_k + k
        end = width
        if is_kept_ptr is not None:
            end = tl.where(tl.load(is_kept_ptr + choice), width, 0)
        start = tl.load(position_ptr + choice) * width
        row = tl.load(rows_ptr + start + column, mask=column < end, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            # those of padding may be anything, also NaN, which a row of zeros does not undo
            row = row * tl.load(weights_ptr + choice, mask=end > 0, other=0.0)
        total += row
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _combine_backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    rows_ptr,
    weights_ptr,
    position_ptr,
    is_kept_ptr,
    grad_rows_ptr,
    grad_weights_ptr,
    width,
    top_k: tl.constexpr,
    padded_k: tl.constexpr,
    block: tl.constexpr,
):
    """One token: its K rows, `block` of their D elements at a time. is_kept_ptr may be None."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, padded_k)
    choice = token * top_k + k
    is_choice = k < top_k
    is_kept = is_choice
    if is_kept_ptr is not None:
        is_kept = is_choice & (tl.load(is_kept_ptr + choice, mask=is_choice, other=0) != 0)
    start = (tl.load(position_ptr + choice, mask=is_kept, other=0) * width)[:, None]
    weight = tl.load(weights_ptr + choice, mask=is_kept, other=0.0)[:, None]
    total = tl.zeros([padded_k, block], tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)[None, :]
        inside = column < width
        both = is_kept[:, None] & inside
        grad = tl.load(grad_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
        row = tl.load(rows_ptr + start + column, mask=both, other=0.0).to(tl.float32)
        tl.store(grad_rows_ptr + start + column, (weight * grad).to(grad_rows_ptr.dtype.element_ty), mask=both)
        total += row * grad
    # padding's gradient may be anything, as its weights may
    grad_weight = tl.where(is_kept, tl.sum(total, axis=1), 0.0)
    tl.store(grad_weights_ptr + choice, grad_weight, mask=is_choice)
