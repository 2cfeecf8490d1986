"""Steps of the optimizers of `training.optim.low_bit` in one Triton kernel per parameter: each value is read once and
written once. Importing this needs triton; see `training.optim.low_bit`.

The kernels round where torch's own operators on a GPU round, and nowhere else: divisions and roots to nearest, a
product and a sum once where torch does so (`lerp`, `sub` with `alpha`) and twice where it does not. So a step's codes
and bits should be those of the plain form on the same GPU.

All tensors are this rank's parts, contiguous, on one device; moments and scales are written in place, as the weight is.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..config.optimizers import LARGEST_BLOCK
from .update import Update

ROOM = tl.constexpr(LARGEST_BLOCK)
"""Room for values of 8-bit state that share a scale."""
BLOCKS = tl.constexpr(4)
"""Blocks of 8-bit state per program. With 8 warps a thread has four neighbours: 128 bits of fp32, and no transposition
between what it reads and what it writes."""
SIZE = tl.constexpr(1024)
"""Values per program, where state is fp32."""
ROWS, COLUMNS = tl.constexpr(4), tl.constexpr(512)
"""Rows and columns of bf16 state per program. With 4 warps a thread has eight neighbours, 128 bits, in each of two
rows, for which the columns' random numbers are made once."""


def step_fp32(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, update: Update) -> None:
    """One update of a weight whose moments are fp32; tensors of one shape."""
    size = weight.numel()
    if size > 0:
        programs = triton.cdiv(size, SIZE.value)
        _launch(_fp32_kernel, programs, weight, grad, mean, square, size, *_scalars(update), num_warps=4)


def step_8bit(
    weight: Tensor,
    grad: Tensor,
    mean_codes: Tensor,
    mean_scales: Tensor,
    square_codes: Tensor,
    square_scales: Tensor,
    mean_map: tuple[Tensor, Tensor],
    square_map: tuple[Tensor, Tensor],
    update: Update,
) -> None:
    """One update of a weight (rows, columns) whose moments are 8-bit codes of its shape with a scale for each block of
    columns, at most 256, all of one size.

    Args:
        mean_map, square_map: `training.optim.low_bit.dynamic_map`, signed and not: 256 values and 255 borders.
    """
    num_blocks = mean_scales.numel()
    if num_blocks > 0:
        _launch(
            _8bit_kernel, triton.cdiv(num_blocks, BLOCKS.value),
            weight, grad, mean_codes, mean_scales, square_codes, square_scales, *mean_map, *square_map, num_blocks,
            *_scalars(update), BLOCK_SIZE=weight.numel() // num_blocks, num_warps=8,
        )  # fmt: skip


def step_bf16(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    first_row: int,
    number: int,
    seed: int,
    update: Update,
) -> None:
    """One update of a bf16 weight with bf16 moments of its shape; weight and second moment are rounded stochastically.

    Args:
        step: scalar, how many updates this makes.
        first_row: of the full parameter's rows, the first one of this part.
        number: the parameter's own, int32.
        seed: int32.
    """
    if weight.numel() > 0:
        # a vector is one row here, and its elements, which are the rows of the parameter, are the columns
        is_vector = weight.dim() == 1
        rows = 1 if is_vector else weight.shape[0]
        columns = weight.numel() // rows
        _launch(
            _bf16_kernel, triton.cdiv(rows, ROWS.value) * triton.cdiv(columns, COLUMNS.value),
            weight, grad, mean, square, step, rows, columns, first_row, number, seed, *_scalars(update),
            IS_VECTOR=is_vector, num_warps=4,
        )  # fmt: skip


def _launch(kernel: Any, programs: int, *arguments: Tensor | float, **options: int) -> None:
    kernel[(programs,)](*arguments, enable_fp_fusion=False, **options)


def _scalars(update: Update) -> tuple[Tensor | float, ...]:
    """What the kernels take from `mean_correction_ptr` to `eps`."""
    return (
        update.mean_correction,
        update.square_correction,
        update.mean_share,
        update.square_share,
        update.lr,
        update.decay,
        update.eps,
    )


@triton.jit
def _fp32_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, grad_ptr, mean_ptr, square_ptr, size,
    mean_correction_ptr, square_correction_ptr, mean_share, square_share, lr, decay, eps,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < size
    weight, mean, square = _updated(
        tl.load(weight_ptr + index, mask=inside).to(tl.float32),
        tl.load(grad_ptr + index, mask=inside).to(tl.float32),
        tl.load(mean_ptr + index, mask=inside),
        tl.load(square_ptr + index, mask=inside),
        mean_correction_ptr, square_correction_ptr, mean_share, square_share, lr, decay, eps,
    )  # fmt: skip
    tl.store(weight_ptr + index, weight.to(weight_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + index, mean, mask=inside)
    tl.store(square_ptr + index, square, mask=inside)


@triton.jit
def _8bit_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, grad_ptr, mean_codes_ptr, mean_scales_ptr, square_codes_ptr, square_scales_ptr,
    mean_values_ptr, mean_borders_ptr, square_values_ptr, square_borders_ptr, num_blocks,
    mean_correction_ptr, square_correction_ptr, mean_share, square_share, lr, decay, eps,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # blocks lie within rows, one after the other: rows and columns need not be told apart
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = tl.arange(0, ROOM)[None, :]
    index = block[:, None] * BLOCK_SIZE + place
    is_block = block < num_blocks
    inside = is_block[:, None]
    if BLOCK_SIZE < ROOM:
        inside = inside & (place < BLOCK_SIZE)
    mean_scale = tl.load(mean_scales_ptr + block, mask=is_block)
    square_scale = tl.load(square_scales_ptr + block, mask=is_block)
    mean_code = tl.load(mean_codes_ptr + index, mask=inside, other=0).to(tl.int32)
    square_code = tl.load(square_codes_ptr + index, mask=inside, other=0).to(tl.int32)
    weight, mean, square = _updated(
        tl.load(weight_ptr + index, mask=inside, other=0.0).to(tl.float32),
        tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32),
        tl.load(mean_values_ptr + mean_code) * mean_scale[:, None],
        tl.load(square_values_ptr + square_code) * square_scale[:, None],
        mean_correction_ptr, square_correction_ptr, mean_share, square_share, lr, decay, eps,
    )  # fmt: skip
    tl.store(weight_ptr + index, weight.to(weight_ptr.dtype.element_ty), mask=inside)
    if BLOCK_SIZE < ROOM:
        # of a block's own values alone
        mean, square = tl.where(inside, mean, 0.0), tl.where(inside, square, 0.0)
    mean_scale, square_scale = _scale(mean), _scale(square)
    mean_code = _nearest_code(tl.div_rn(mean, mean_scale[:, None]), mean_borders_ptr, True)  # type: ignore[arg-type,unused-ignore]
    square_code = _nearest_code(tl.div_rn(square, square_scale[:, None]), square_borders_ptr, False)  # type: ignore[arg-type,unused-ignore]
    tl.store(mean_codes_ptr + index, mean_code.to(tl.uint8), mask=inside)
    tl.store(square_codes_ptr + index, square_code.to(tl.uint8), mask=inside)
    tl.store(mean_scales_ptr + block, mean_scale, mask=is_block)
    tl.store(square_scales_ptr + block, square_scale, mask=is_block)


@triton.jit(do_not_specialize=["first_row", "number", "seed"])
def _bf16_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, grad_ptr, mean_ptr, square_ptr, step_ptr, rows, columns, first_row, number, seed,
    mean_correction_ptr, square_correction_ptr, mean_share, square_share, lr, decay, eps,
    IS_VECTOR: tl.constexpr,
):  # fmt: skip
    programs_per_row = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // programs_per_row * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    index = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    weight, mean, square = _updated(
        tl.load(weight_ptr + index, mask=inside).to(tl.float32),
        tl.load(grad_ptr + index, mask=inside).to(tl.float32),
        tl.load(mean_ptr + index, mask=inside).to(tl.float32),
        tl.load(square_ptr + index, mask=inside).to(tl.float32),
        mean_correction_ptr, square_correction_ptr, mean_share, square_share, lr, decay, eps,
    )  # fmt: skip
    # as AdamWBf16._store and position_bits have them
    step = tl.load(step_ptr).to(tl.int32).to(tl.uint32)
    key = _random_bits(step + _random_bits(number.to(tl.uint32))) + seed.to(tl.uint32)
    if IS_VECTOR:
        bits = _random_bits(_random_bits((first_row + column).to(tl.uint32) ^ key))[None, :]
    else:
        of_row = _random_bits((first_row + row).to(tl.uint32) ^ key)
        of_column = _random_bits(_random_bits(column.to(tl.uint32)))
        bits = _random_bits(of_row[:, None] ^ of_column[None, :])
    tl.store(weight_ptr + index, _round_to_bf16(weight, bits & 0xFFFF), mask=inside)
    tl.store(square_ptr + index, _round_to_bf16(square, bits >> 16), mask=inside)
    tl.store(mean_ptr + index, mean.to(tl.bfloat16), mask=inside)


@triton.jit
def _updated(  # type: ignore[no-untyped-def]
    weight, grad, mean, square,
    mean_correction_ptr, square_correction_ptr, mean_share, square_share, lr, decay, eps,
):  # fmt: skip
    """The new weight and moments in fp32, as `training.optim.low_bit` has them in torch's operators."""
    mean = _lerp(mean, grad, mean_share)
    square = _lerp(square, grad * grad, square_share)
    root = tl.sqrt_rn(tl.div_rn(square, tl.load(square_correction_ptr).to(tl.float32))) + eps
    mean_now = tl.div_rn(mean, tl.load(mean_correction_ptr).to(tl.float32))  # type: ignore[var-annotated,unused-ignore]
    change = tl.div_rn(mean_now, root)  # type: ignore[var-annotated,unused-ignore]
    return tl.fma(change, -lr, weight * decay), mean, square


@triton.jit
def _lerp(start, end, share):  # type: ignore[no-untyped-def]
    # torch.lerp goes from the nearer end, in one rounding
    share = tl.full(start.shape, share, tl.float32)
    is_near = share < 0.5
    return tl.fma(end - start, tl.where(is_near, share, share - 1), tl.where(is_near, start, end))


@triton.jit
def _scale(moment):  # type: ignore[no-untyped-def]
    """The largest magnitude of each block. Compared as integers, which have the same order, and NaN above all numbers,
    as torch's amax has it."""
    largest = tl.max(tl.abs(moment).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    return tl.where(largest < 1e-12, 1e-12, largest)


@triton.jit
def _nearest_code(x, borders_ptr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the 255 borders are at most x, int32; x in [-1, 1], or [0, 1] if not signed. As torch.bucketize.

    The map has N equal steps in each decade of magnitudes (0.1, 1] · 10^-d, d 6 to 0, N doubling from one to the next.
    So the code is known but for one: a magnitude p steps above its decade's start lies, among the borders, between
    those next to p - 0.5 and p + 0.5, and so rounding, of p or of which decade it is, by less than a quarter of a step
    does no harm. One look at the border between them decides.
    """
    first_steps: tl.constexpr = 1.0 if SIGNED else 2.0  # type: ignore[assignment]
    below: tl.constexpr = 0.5 if SIGNED else 1.5  # type: ignore[assignment]
    magnitude = tl.abs(x)
    slope = tl.full(x.shape, first_steps * 1e6 / 0.9, tl.float32)
    start = tl.full(x.shape, first_steps * 8 / 9 - below, tl.float32)
    for decade in tl.static_range(1, 7):
        is_above = magnitude >= 10.0 ** (decade - 7)
        slope = tl.where(is_above, first_steps * 2.0**decade * 10.0 ** (6 - decade) / 0.9, slope)
        start = tl.where(is_above, first_steps * 2.0**decade * 8 / 9 - below, start)
    code = tl.fma(slope, magnitude, start).to(tl.int32)
    if SIGNED:
        # 127 stands for 0, and as many codes for negative numbers, from which the order is the other way round
        code = tl.where(x < 0, 126 - code, 127 + code)
    # the largest magnitudes have no border beyond them, and NaN has any code
    code = tl.minimum(tl.maximum(code, 0), 254)
    return code + (x >= tl.load(borders_ptr + code)).to(tl.int32)


@triton.jit
def _random_bits(x):  # type: ignore[no-untyped-def]
    """`training.optim.low_bit.random_bits`, of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_to_bf16(x, bits):  # type: ignore[no-untyped-def]
    """`training.optim.low_bit.round_to_bf16`, its bits uint32."""
    return ((x.to(tl.uint32, bitcast=True) + bits) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
