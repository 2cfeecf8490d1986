"""Cross-entropy and its gradient in one Triton kernel, or in two where each rank has some of the vocabulary. Importing
this needs triton; see `training.loss.head`.

They stay beside liger-kernel's, whose loss of a divided vocabulary keeps all logits in fp32 for backward (0.8.5): these
take their gradient in the logits' own memory, a chunk at a time.

Shape suffixes: C rows of logits, V vocabulary, v = V/n of it on this rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...moe.util.step_parts import register_step_part, writes

register_step_part(
    __name__,
    "LM head, loss",
    kernels={
        "_cross_entropy_kernel": writes("losses_ptr", updates=("logits_ptr",)),
        "_row_figures_kernel": writes("highest_ptr", "exp_sums_ptr", "at_target_ptr"),
        "_gradient_kernel": writes(updates=("logits_ptr",)),
    },
)

BLOCK = 4096

# Where a chunk's targets, and one row of figures after another, begin in memory depends on the number of rows. Of each
# a program reads or writes one value: not to be compiled anew for another alignment.


def fused_losses_and_gradient(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropies in fp32, without weights, and the gradient of their weighted sum, which takes the place of the
    logits: these are read twice and written once."""
    num_rows, num_columns = logits_CV.shape
    assert logits_CV.is_contiguous()
    losses_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    if num_rows > 0:
        kernel: Any = _cross_entropy_kernel
        given = (targets_C, weights_C, losses_C)
        kernel[(num_rows,)](logits_CV, *given, num_columns, BLOCK, num_warps=8, enable_fp_fusion=True)
    return losses_C, logits_CV


def fused_row_figures(logits_Cv: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of logits, in fp32: the highest, the sum of exp(logit - highest), and the target's logit, which is 0
    where the target is none of the columns, 0 to v."""
    num_rows, num_columns = logits_Cv.shape
    assert logits_Cv.is_contiguous()
    figures_3C = torch.empty(3, num_rows, dtype=torch.float32, device=logits_Cv.device)
    highest_C, exp_sum_C, at_target_C = figures_3C
    if num_rows > 0:
        kernel: Any = _row_figures_kernel
        figures = (highest_C, exp_sum_C, at_target_C)
        kernel[(num_rows,)](logits_Cv, targets_C, *figures, num_columns, BLOCK, num_warps=8, enable_fp_fusion=True)
    return highest_C, exp_sum_C, at_target_C


def fused_gradient(
    logits_Cv: Tensor, targets_C: Tensor, highest_C: Tensor, exp_sum_C: Tensor, weights_C: Tensor | None = None
) -> Tensor:
    """exp(logit - highest) / exp_sum, less 1 at the target, times the weight; takes the place of the logits."""
    num_rows, num_columns = logits_Cv.shape
    assert logits_Cv.is_contiguous()
    if num_rows > 0:
        kernel: Any = _gradient_kernel
        given = (targets_C, weights_C, highest_C, exp_sum_C)
        kernel[(num_rows,)](logits_Cv, *given, num_columns, BLOCK, num_warps=8, enable_fp_fusion=True)
    return logits_Cv


@triton.jit(do_not_specialize_on_alignment=["targets_ptr", "weights_ptr"])
def _cross_entropy_kernel(logits_ptr, targets_ptr, weights_ptr, losses_ptr, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """weights_ptr may be None."""
    row = tl.program_id(0)
    target = tl.load(targets_ptr + row)
    highest, sum_of_exp, at_target = _figures(logits_ptr, row, target, num_columns, BLOCK)
    tl.store(losses_ptr + row, tl.log(sum_of_exp) + highest - at_target)
    _write_gradient(logits_ptr, row, target, weights_ptr, highest, sum_of_exp, num_columns, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["targets_ptr", "highest_ptr", "exp_sums_ptr", "at_target_ptr"])
def _row_figures_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, highest_ptr, exp_sums_ptr, at_target_ptr, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    target = tl.load(targets_ptr + row)
    highest, sum_of_exp, at_target = _figures(logits_ptr, row, target, num_columns, BLOCK)
    tl.store(highest_ptr + row, highest)
    tl.store(exp_sums_ptr + row, sum_of_exp)
    tl.store(at_target_ptr + row, at_target)


@triton.jit(do_not_specialize_on_alignment=["targets_ptr", "weights_ptr", "highest_ptr", "exp_sums_ptr"])
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, weights_ptr, highest_ptr, exp_sums_ptr, num_columns, BLOCK: tl.constexpr
):
    """weights_ptr may be None."""
    row = tl.program_id(0)
    target, highest = tl.load(targets_ptr + row), tl.load(highest_ptr + row)
    _write_gradient(logits_ptr, row, target, weights_ptr, highest, tl.load(exp_sums_ptr + row), num_columns, BLOCK)


@triton.jit
def _figures(logits_ptr, row, target, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # rows times vocabulary passes 2^31 at 14 000 rows of Qwen3
    start = row.to(tl.int64) * num_columns
    offset = tl.arange(0, BLOCK)
    # of each of the block's places by itself; together only at the end
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    at_target = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_columns, BLOCK):
        inside = first + offset < num_columns
        logits = tl.load(logits_ptr + start + first + offset, mask=inside, other=float("-inf")).to(tl.float32)
        # not tl.maximum, which passes over what is no number
        higher = tl.where(logits > most, logits, most)
        # -inf less -inf would be no number
        grown = tl.where(logits == float("-inf"), 0.0, tl.exp(logits - higher))
        total = tl.where(total == 0.0, 0.0, total * tl.exp(most - higher)) + grown
        # the target may be beyond these columns, where others' are
        at_target += tl.where(inside & (first + offset == target), logits, 0.0)
        most = higher
    highest = tl.max(most, axis=0)
    sum_of_exp = tl.sum(tl.where(total == 0.0, 0.0, total * tl.exp(most - highest)), axis=0)
    return highest, sum_of_exp, tl.sum(at_target, axis=0)


@triton.jit
def _write_gradient(  # type: ignore[no-untyped-def]
    logits_ptr, row, target, weights_ptr, highest, sum_of_exp, num_columns, BLOCK: tl.constexpr
):
    start = row.to(tl.int64) * num_columns
    offset = tl.arange(0, BLOCK)
    for first in range(0, num_columns, BLOCK):
        inside = first + offset < num_columns
        logits = tl.load(logits_ptr + start + first + offset, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.exp(logits - highest) / sum_of_exp
        gradient = share - tl.where(first + offset == target, 1.0, 0.0)
        if weights_ptr is not None:
            gradient *= tl.load(weights_ptr + row)
        tl.store(logits_ptr + start + first + offset, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
