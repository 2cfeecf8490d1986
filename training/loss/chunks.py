"""Losses and gradients of a head from the logits of some rows at a time, which are the largest tensors of a step.

Shape suffixes: N rows (positions with a target), C of them in a chunk, D model width, V vocabulary or this rank's part.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...moe.cpu.matmul import add_product, matmul, pad_rows
from ...moe.experts.forward import Targets
from ...moe.util.gpu import computes_on_cpu

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""What the logits of one chunk may take if they were fp32: on a CPU 524 positions at a vocabulary of 32,000, on a GPU
8,388, as each chunk reads and writes the weight's gradient once more."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of rows, weight and bias; None for one that is not needed."""


def target_rows(x_BSD: Tensor, targets: Targets) -> Tensor:
    """rows_ND of the positions that have a target."""
    return x_BSD.flatten(0, 1).index_select(0, targets.index_N)


def target_tokens(targets: Targets) -> Tensor:
    """targets_N of those positions."""
    return targets.targets_BS.flatten().index_select(0, targets.index_N)


def losses_by_chunk(
    rows_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    needs: Sequence[bool],
    loss_and_gradient: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[list[Tensor], Gradients]:
    """Each chunk's loss, and the gradients of their sum.

    Args:
        needs: which gradients, of rows, weight and bias.
        loss_and_gradient: of (logits_CV, targets_C), makes the chunk's loss and the gradient of the logits, in their
            dtype and preferably in their memory. There may be more logits than targets: rows of padding, of which the
            gradient is 0.
    """
    rows_need, weight_needs, bias_needs = needs
    chunk_bytes = CHUNK_BYTES["cpu" if computes_on_cpu(rows_ND) else "cuda"]
    num_chunks = max(1, math.ceil(len(rows_ND) * len(weight_VD) * 4 / chunk_bytes))
    losses: list[Tensor] = []
    grad_rows: list[Tensor] | None = [] if rows_need else None
    # one matmul, rounded to the weight's dtype, is what a sum of one in fp32 would be rounded to
    is_sum = num_chunks > 1 or weight_VD.dtype == torch.float32
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if weight_needs and is_sum else None
    grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and bias_needs else None
    for rows_CD, targets_C in zip(rows_ND.chunk(num_chunks), targets_N.chunk(num_chunks), strict=True):
        num_rows = len(rows_CD)
        rows_CD = pad_rows(rows_CD)
        logits_CV = matmul(rows_CD, weight_VD.t())
        if bias_V is not None:
            logits_CV += bias_V
        chunk_loss, grad_logits_CV = loss_and_gradient(logits_CV, targets_C)
        losses.append(chunk_loss)
        if grad_rows is not None:
            grad_rows.append(matmul(grad_logits_CV, weight_VD)[:num_rows])
        if weight_needs and not is_sum:
            grad_weight_VD = matmul(grad_logits_CV.t(), rows_CD)
        elif grad_weight_VD is not None:
            add_product(grad_weight_VD, grad_logits_CV.t(), rows_CD)
        if grad_bias_V is not None:
            grad_bias_V += grad_logits_CV.sum(dim=0, dtype=torch.float32)
    return losses, (
        None if grad_rows is None else torch.cat(grad_rows),
        None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
        None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype),
    )


def scaled(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients that a forward has left in `ctx.gradients`, scaled in place by that of its loss."""
    gradients, ctx.gradients = ctx.gradients, None
    assert gradients is not None, "backward scales the gradients in place: it can run only once"
    rows, weight, bias = (None if g is None else g.mul_(grad) for g in gradients)
    return rows, weight, bias
