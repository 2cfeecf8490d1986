"""Casts of matrices to fp8 with one scale per row or column, in Triton kernels. Importing this needs triton; see
`moe.kernels.fp8`.

Why our own: the rows of each expert are cast in columns and padded to the 16 bytes that grouped GEMMs ask for, by
counts that stay on the device; in torch's own operations the host has to wait for them. And ranks that divide a matrix
can agree on a scale first.

Shape suffixes: R rows, P rows with padding, e experts on this rank, K and N widths.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..util.step_parts import register_step_part, writes

register_step_part(
    __name__,
    None,
    kernels={
        "_rows_kernel": writes("codes_ptr", "scales_ptr"),
        "_largest_kernel": writes("largest_ptr"),
        "_columns_kernel": writes("codes_ptr", "scales_ptr"),
    },
)

ROWS, COLUMNS = 128, 64
"""Size of the tile that a program of the column kernels holds at a time."""

ROWS_A_PROGRAM = 512
"""Rows of a column per program: with the rest left to other programs, a GPU is full also where experts are few."""

# Triton compiles a kernel anew where an integer is 1, or a multiple of 16, for the first time. That must not happen
# with integers that follow from routing, or some step of a run would wait for the compiler.


def fused_rows(x_NK: Tensor, largest_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `moe.kernels.fp8_casts.plain_rows`, each element read once: codes (N, K) and scales (N,)."""
    assert x_NK.is_contiguous()
    num_rows, width = x_NK.shape
    codes_NK = torch.empty_like(x_NK, dtype=torch.float8_e4m3fn)
    scales_N = torch.empty(num_rows, dtype=torch.float32, device=x_NK.device)
    if num_rows > 0:
        kernel: Any = _rows_kernel[(num_rows,)]
        is_known = {"IS_KNOWN": largest_N is not None}
        kernel(x_NK, codes_NK, scales_N, largest_N, width, **is_known, **_of_rows(width))
    return codes_NK, scales_N


def _of_rows(width: int) -> dict[str, Any]:
    """With what a kernel is launched that holds a row in a program's registers."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, block // 1024), "enable_fp_fusion": True}


def fused_columns(weight_eKN: Tensor, largest_eN: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each expert's matrix transposed: codes (e, N, K) and scales (e, N)."""
    assert weight_eKN.is_contiguous()
    num_experts, num_rows, width = weight_eKN.shape
    codes_eNK = torch.empty(num_experts, width, num_rows, dtype=torch.float8_e4m3fn, device=weight_eKN.device)
    # no ends of rows: all have equally many
    if largest_eN is None:
        largest = _largest_of_columns(weight_eKN, None, num_experts, num_rows)
    else:
        largest = largest_eN.unsqueeze(0)
    strides = (num_rows * width, num_rows)
    scales_eN = _cast_columns(weight_eKN, largest, codes_eNK, None, None, num_experts, num_rows, *strides)
    return codes_eNK, scales_eN


def fused_runs(x_RN: Tensor, ends_e: Tensor, padded_ends_e: Tensor, num_padded: int) -> tuple[Tensor, Tensor]:
    """As `moe.kernels.fp8_casts.plain_runs`: codes (N, P), of which columns after the last expert's are left as they
    are, and scales (e, N)."""
    assert x_RN.is_contiguous()
    num_rows, width = x_RN.shape
    num_experts = ends_e.numel()
    codes_NP = torch.empty(width, num_padded, dtype=torch.float8_e4m3fn, device=x_RN.device)
    rows_an_expert = triton.cdiv(num_rows, num_experts)
    largest = _largest_of_columns(x_RN, ends_e, num_experts, rows_an_expert)
    sizes = (num_experts, rows_an_expert, 0, num_padded)
    return codes_NP, _cast_columns(x_RN, largest, codes_NP, ends_e, padded_ends_e, *sizes)


def _largest_of_columns(x: Tensor, ends_e: Tensor | None, num_experts: int, num_rows: int) -> Tensor:
    """For each program's rows, the largest value of a column, as bits, (splits, e, N): without a sign they have the
    values' order. num_rows: of each expert; a guess where ends_e says it."""
    width = x.shape[-1]
    grid = _grid(width, num_experts, num_rows)
    splits = grid[1]
    largest = torch.empty(splits, num_experts, width, dtype=torch.int32, device=x.device)
    find: Any = _largest_kernel[grid]
    is_ragged = ends_e is not None
    find(x, largest, ends_e, 0 if is_ragged else num_rows, width, splits, IS_RAGGED=is_ragged, **_of_columns())
    return largest


def _cast_columns(
    x: Tensor,
    largest: Tensor,
    codes: Tensor,
    ends_e: Tensor | None,
    padded_ends_e: Tensor | None,
    num_experts: int,
    num_rows: int,
    expert_stride: int,
    column_stride: int,
) -> Tensor:
    """Write the codes as they are laid out in memory, and return scales (e, N). largest: (any number, e, N), the
    largest of which counts. num_rows: of each expert; a guess where ends_e says it."""
    width = x.shape[-1]
    scales_eN = torch.empty(num_experts, width, dtype=torch.float32, device=x.device)
    cast: Any = _columns_kernel[_grid(width, num_experts, num_rows)]
    is_ragged = ends_e is not None
    sizes = (0 if is_ragged else num_rows, width, len(largest), expert_stride, column_stride)
    cast(x, largest, codes, scales_eN, ends_e, padded_ends_e, *sizes, IS_RAGGED=is_ragged, **_of_columns())
    return scales_eN


def _grid(width: int, num_experts: int, num_rows: int) -> tuple[int, int, int]:
    return triton.cdiv(width, COLUMNS), triton.cdiv(num_rows, ROWS_A_PROGRAM), num_experts


def _of_columns() -> dict[str, Any]:
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def _exponent(largest):  # type: ignore[no-untyped-def]
    """The exponent of the scale, as in fp32's bits; see `moe.kernels.fp8_casts.plain_rows`."""
    return tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)


@triton.jit
def _largest(x):  # type: ignore[no-untyped-def]
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, largest_ptr, width, IS_KNOWN: tl.constexpr, BLOCK: tl.constexpr
):
    # rows times width of all experts pass 2^31
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    exponent = _exponent(tl.load(largest_ptr + row) if IS_KNOWN else _largest(x))
    one_over = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(codes_ptr + row * width + column, (x * one_over).to(codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def _rows_of(expert, ends_ptr, num_rows, IS_RAGGED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where an expert's rows begin and end: with `num_rows` each, or, ragged, after those of the expert before."""
    start = expert * num_rows
    end = start + num_rows
    if IS_RAGGED:
        end = tl.load(ends_ptr + expert).to(tl.int64)
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    return start, end


@triton.jit(do_not_specialize=["splits"])
def _largest_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    largest_ptr,
    ends_ptr,
    num_rows,
    width,
    splits,
    IS_RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = _rows_of(expert, ends_ptr, num_rows, IS_RAGGED)
    largest = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(tl.program_id(1) * ROWS, (end - start).to(tl.int32), splits * ROWS):
        row = start + first + tl.arange(0, ROWS)
        inside = (row[:, None] < end) & (column[None, :] < width)
        x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _largest(x))
    place = (tl.program_id(1) * tl.num_programs(2) + expert) * width
    tl.store(largest_ptr + place + column, largest, mask=column < width)


@triton.jit(do_not_specialize=["parts"])
def _columns_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    largest_ptr,
    codes_ptr,
    scales_ptr,
    ends_ptr,
    padded_ends_ptr,
    num_rows,
    width,
    parts,
    expert_stride,
    column_stride,
    IS_RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = _rows_of(expert, ends_ptr, num_rows, IS_RAGGED)
    place = expert * expert_stride
    num_places = num_rows
    if IS_RAGGED:
        place = tl.load(padded_ends_ptr + expert - 1, mask=expert > 0, other=0).to(tl.int64)
        num_places = tl.load(padded_ends_ptr + expert) - place.to(tl.int32)
    place = tl.multiple_of(place, 16)
    num_places = tl.multiple_of(num_places, 16)
    largest = tl.zeros((COLUMNS,), dtype=tl.int32)
    for part in range(parts):
        numbers = largest_ptr + (part * tl.num_programs(2) + expert) * width + column
        largest = tl.maximum(largest, tl.load(numbers, mask=column < width, other=0))
    exponent = _exponent(largest)
    one_over = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if tl.program_id(1) == 0:
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        tl.store(scales_ptr + expert * width + column, scale, mask=column < width)
    for first in range(tl.program_id(1) * ROWS, num_places, tl.num_programs(1) * ROWS):
        row = start + first + tl.arange(0, ROWS)
        inside = (row[:, None] < end) & (column[None, :] < width)
        x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        codes = tl.trans((x * one_over[None, :]).to(codes_ptr.dtype.element_ty))
        # zeros where an expert's rows are padded
        number = first + tl.arange(0, ROWS)
        inside = (column[:, None] < width) & (number[None, :] < num_places)
        tl.store(codes_ptr + place + column[:, None].to(tl.int64) * column_stride + number[None, :], codes, mask=inside)
