"""Rotary positions in one Triton kernel, forward and backward. Importing this needs triton; see
`training.fused.fused_rotary`.

Shape suffixes: B sequences, S positions, H heads, A head width, T width of the tables.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Values that one program holds at most: of several heads at one position."""


def rotate(
    x_BSHA: Tensor,
    cos_BST: Tensor,
    sin_BST: Tensor,
    out_BSHA: Tensor,
    width: int,
    tables: str,
    pairs_in: bool,
    pairs_out: bool,
    backwards: bool,
) -> None:
    """Fills out: as `training.fused.fused_rotary.plain_rotate`, or by the angles' negatives. Any strides work, but the
    last dimension must be contiguous."""
    assert all(t.stride(-1) == 1 for t in (x_BSHA, cos_BST, sin_BST, out_BSHA))
    rows, positions, heads, whole = x_BSHA.shape
    if x_BSHA.numel() == 0:
        return
    block = triton.next_power_of_2(width // 2)
    rest = whole - width
    heads_a_program = min(triton.next_power_of_2(heads), max(1, BLOCK // triton.next_power_of_2(whole)))
    kernel: Any = _rotate_kernel[(rows * positions, triton.cdiv(heads, heads_a_program))]
    kernel(
        x_BSHA,
        cos_BST,
        sin_BST,
        out_BSHA,
        positions,
        heads,
        *x_BSHA.stride()[:3],
        *cos_BST.stride()[:2],
        *sin_BST.stride()[:2],
        *out_BSHA.stride()[:3],
        HALF=width // 2,
        SECOND=width // 2 if tables == "whole" else 0,
        REST=rest,
        PAIRS_IN=pairs_in,
        PAIRS_OUT=pairs_out,
        BACKWARDS=backwards,
        HEADS=heads_a_program,
        BLOCK=block,
        REST_BLOCK=triton.next_power_of_2(max(rest, 1)),
        num_warps=min(8, max(1, heads_a_program * block // 512)),
    )


@triton.jit(do_not_specialize=["positions"])
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    positions,
    heads,
    x_row,
    x_position,
    x_head,
    cos_row,
    cos_position,
    sin_row,
    sin_position,
    out_row,
    out_position,
    out_head,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    REST: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    BACKWARDS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    # 64 bits: sequences times their stride pass 2^31 at 131 072 positions of 128 heads of 128
    program = tl.program_id(0).to(tl.int64)
    row, position = program // positions, program % positions
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    angle = tl.arange(0, BLOCK)

    cos_ptr += row * cos_row + position * cos_position
    sin_ptr += row * sin_row + position * sin_position
    cos_1 = tl.load(cos_ptr + angle, mask=angle < HALF, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin_ptr + angle, mask=angle < HALF, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos_ptr + SECOND + angle, mask=angle < HALF, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin_ptr + SECOND + angle, mask=angle < HALF, other=0.0).to(tl.float32)[None, :]

    x_heads = x_ptr + row * x_row + position * x_position + head[:, None] * x_head
    out_heads = out_ptr + row * out_row + position * out_position + head[:, None] * out_head
    is_head = head[:, None] < heads
    is_angle = is_head & (angle[None, :] < HALF)
    pair = tl.arange(0, 2 * BLOCK)
    is_pair = is_head & (pair[None, :] < 2 * HALF)
    if PAIRS_IN:
        x = tl.load(x_heads + pair[None, :], mask=is_pair, other=0.0).to(tl.float32)
        x_1, x_2 = tl.split(tl.reshape(x, (HEADS, BLOCK, 2)))
    else:
        x_1 = tl.load(x_heads + angle[None, :], mask=is_angle, other=0.0).to(tl.float32)
        x_2 = tl.load(x_heads + HALF + angle[None, :], mask=is_angle, other=0.0).to(tl.float32)
    if BACKWARDS:
        out_1 = x_1 * cos_1 + x_2 * sin_2
        out_2 = x_2 * cos_2 - x_1 * sin_1
    else:
        out_1 = x_1 * cos_1 - x_2 * sin_1
        out_2 = x_2 * cos_2 + x_1 * sin_2
    dtype = out_ptr.dtype.element_ty
    if PAIRS_OUT:
        out = tl.reshape(tl.join(out_1, out_2), (HEADS, 2 * BLOCK))
        tl.store(out_heads + pair[None, :], out.to(dtype), mask=is_pair)
    else:
        tl.store(out_heads + angle[None, :], out_1.to(dtype), mask=is_angle)
        tl.store(out_heads + HALF + angle[None, :], out_2.to(dtype), mask=is_angle)
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)[None, :]
        is_rest = is_head & (rest < REST)
        x = tl.load(x_heads + 2 * HALF + rest, mask=is_rest)
        tl.store(out_heads + 2 * HALF + rest, x.to(dtype), mask=is_rest)
