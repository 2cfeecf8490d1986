"""Cross-entropy and its gradient in one Triton kernel. Importing this needs triton; see `training.loss.head`.

Shape suffixes: C rows of logits, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.moe.base.declared import StepPart, writes

STEP_PART: StepPart = "LM head, loss"

BLOCK = 4096


def fused_loss_and_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """As `training.loss.head._loss_and_logit_gradient`; the gradient takes the place of the logits, which are read
    twice and written once."""
    num_rows, num_columns = logits_CV.shape
    assert logits_CV.is_contiguous()
    losses_C = torch.empty(num_rows, dtype=torch.float32, device=logits_CV.device)
    if num_rows > 0:
        kernel: Any = _cross_entropy_kernel
        kernel[(num_rows,)](logits_CV, targets_C, losses_C, num_columns, BLOCK, num_warps=8, enable_fp_fusion=True)
    return losses_C.sum(), logits_CV


@writes("losses_ptr", updates=("logits_ptr",))
@triton.jit
def _cross_entropy_kernel(logits_ptr, targets_ptr, losses_ptr, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # rows times vocabulary passes 2^31 at 14 000 rows of Qwen3
    row = tl.program_id(0).to(tl.int64)
    start = row * num_columns
    offset = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
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
        at_target += tl.where(first + offset == target, logits, 0.0)
        most = higher
    highest = tl.max(most, axis=0)
    sum_of_exp = tl.sum(tl.where(total == 0.0, 0.0, total * tl.exp(most - highest)), axis=0)
    tl.store(losses_ptr + row, tl.log(sum_of_exp) + highest - tl.sum(at_target, axis=0))
    for first in range(0, num_columns, BLOCK):
        inside = first + offset < num_columns
        logits = tl.load(logits_ptr + start + first + offset, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.exp(logits - highest) / sum_of_exp
        gradient = share - tl.where(first + offset == target, 1.0, 0.0)
        tl.store(logits_ptr + start + first + offset, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
