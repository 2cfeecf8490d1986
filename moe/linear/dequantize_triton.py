"""Dequantization of weights in 8 or 4 bits, in one Triton kernel each. Importing this needs triton; see
`moe.linear.quantized`.

Why our own: each row has its own scales and padding, so that rows may be sharded anywhere; and torch's own operations
take several times the memory of the values for what they compute in between.

Shape suffixes: R rows, C bytes of codes per row, G scales per row, O values per row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..util.step_parts import register_step_part, writes

register_step_part(
    __name__,
    "dequantization",
    kernels=dict.fromkeys(("_fp8_kernel", "_nf4_kernel", "_mxfp4_kernel"), writes("wide_ptr")),
)

BLOCK = 4096
"""Values of a row that one program computes."""


def fused_fp8(codes_RC: Tensor, scales_R1: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 codes times their row's scale, rounded once to `dtype`."""
    assert codes_RC.is_contiguous()
    wide_RO = codes_RC.new_empty(codes_RC.shape, dtype=dtype)
    if wide_RO.numel() > 0:
        kernel: Any = _fp8_kernel
        grid = (codes_RC.shape[0], triton.cdiv(codes_RC.shape[1], BLOCK))
        kernel[grid](codes_RC, scales_R1, wide_RO, codes_RC.shape[1], BLOCK, num_warps=8, enable_fp_fusion=True)
    return wide_RO


def fused_nf4(codes_RC: Tensor, scales_RG: Tensor, pairs: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Two codes per byte, as values from `pairs` (256, 2), times the scale of their 64 values, rounded once to
    `dtype`."""
    assert all(t.is_contiguous() for t in (codes_RC, scales_RG, pairs))
    (num_rows, num_codes), num_scales = codes_RC.shape, scales_RG.shape[1]
    wide_RO = codes_RC.new_empty(num_rows, columns, dtype=dtype)
    if wide_RO.numel() > 0:
        kernel: Any = _nf4_kernel
        grid = (num_rows, triton.cdiv(columns, BLOCK))
        kernel[grid](
            *(codes_RC, scales_RG, pairs, wide_RO, num_codes, num_scales, columns),
            BLOCK // 2,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return wide_RO


def fused_mxfp4(codes_RC: Tensor, scales_RG: Tensor, pairs: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """As `fused_nf4`, with exponents of their 32 values as bytes; both may be padded."""
    assert all(t.is_contiguous() for t in (codes_RC, scales_RG, pairs))
    (num_rows, num_codes), num_scales = codes_RC.shape, scales_RG.shape[1]
    wide_RO = codes_RC.new_empty(num_rows, columns, dtype=dtype)
    if wide_RO.numel() > 0:
        kernel: Any = _mxfp4_kernel
        grid = (num_rows, triton.cdiv(columns, BLOCK))
        how = (BLOCK // 2,)
        kernel[grid](codes_RC, scales_RG, pairs, wide_RO, num_codes, num_scales, columns, *how, num_warps=8)
    return wide_RO


@triton.jit
def _fp8_kernel(codes_ptr, scales_ptr, wide_ptr, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # rows times columns of all experts pass 2^31
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    code = tl.load(codes_ptr + row * columns + column, mask=inside, other=0).to(tl.int32)
    # exponent and fraction in their places of an fp32 value, whose exponent counts from 2^-127 in place of 2^-7; GPUs
    # before compute capability 8.9 do not know the dtype
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    wide = value * tl.load(scales_ptr + row)
    tl.store(wide_ptr + row * columns + column, wide.to(wide_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _nf4_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, pairs_ptr, wide_ptr, num_codes, num_scales, columns, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * HALF + tl.arange(0, HALF)
    inside = byte < num_codes
    code = tl.load(codes_ptr + row * num_codes + byte, mask=inside, other=0).to(tl.int32)
    # 64 values are 32 bytes
    scale = tl.load(scales_ptr + row * num_scales + byte // 32, mask=inside, other=0.0)
    low = tl.load(pairs_ptr + 2 * code) * scale
    high = tl.load(pairs_ptr + 2 * code + 1) * scale
    column = tl.program_id(1) * (2 * HALF) + tl.arange(0, 2 * HALF)
    wide = tl.interleave(low, high).to(wide_ptr.dtype.element_ty)
    tl.store(wide_ptr + row * columns + column, wide, mask=column < columns)


@triton.jit
def _mxfp4_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scales_ptr, pairs_ptr, wide_ptr, num_codes, num_scales, columns, HALF: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * HALF + tl.arange(0, HALF)
    inside = byte < num_codes
    code = tl.load(codes_ptr + row * num_codes + byte, mask=inside, other=0).to(tl.int32)
    # 32 values are 16 bytes; 0 stands for 2^-127, which fp32 has without an exponent of its own
    exponent = tl.load(scales_ptr + row * num_scales + byte // 16, mask=inside, other=0).to(tl.int32)
    scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    low = tl.load(pairs_ptr + 2 * code) * scale
    high = tl.load(pairs_ptr + 2 * code + 1) * scale
    column = tl.program_id(1) * (2 * HALF) + tl.arange(0, 2 * HALF)
    wide = tl.interleave(low, high).to(wide_ptr.dtype.element_ty)
    tl.store(wide_ptr + row * columns + column, wide, mask=column < columns)
