"""The head's loss with the vocabulary divided over a tensor-parallel group (loss parallelism; after Megatron-LM,
arXiv 1909.08053, section 3): each rank has the head's rows for some of the tokens, and computes these tokens' logits at
all positions of the group.

No rank ever has a position's complete logits. Their softmax takes three numbers per position and rank, exchanged once
per chunk: the highest logit, the sum of exponentials, and the target's logit, which only one rank has.

Shape suffixes: n ranks, B sequences, L positions of each on this rank, R positions with a target on all ranks together,
N of them on this rank, C in a chunk, D model width, V vocabulary, v = V/n of it on this rank.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...moe.experts.forward import Targets
from ...moe.util.errors import ExpertMeshError
from ...moe.util.gpu import takes_triton
from ...sharding.collectives.tensor_parallel import TPGroup
from .chunks import losses_by_chunk, scaled, target_rows, target_tokens


def vocabulary_loss_sum(
    x_BLD: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor | None,
    targets: Targets,
    group: TPGroup,
    num_targets: Sequence[int],
) -> Tensor:
    """This rank's part of `training.loss.head.full_loss_sum`, an fp32 scalar: of its own positions. All ranks of the
    group call it together, and its backward.

    The gradient of x_BLD is complete, and that of the weight is complete for the rows that are here: it is of the
    losses of all ranks, which must all have the same factor in what is differentiated.

    Args:
        x_BLD: this rank's positions.
        weight_vD: this rank's rows, the index-th of `group.size` equal parts.
        targets: of this rank's positions, tokens of the complete vocabulary.
        num_targets: how many each rank of the group has. Known to the host, so that it waits for nothing, and computes
            no logits of positions without a target: there are often more of these than of the others, and those with
            one are mostly on the last ranks, which have the ends of sequences.
    """
    rows_ND, targets_N = target_rows(x_BLD, targets), target_tokens(targets)
    assert len(rows_ND) == num_targets[group.index], (len(rows_ND), num_targets)
    loss: Tensor = _VocabularyLossSum.apply(
        rows_ND, weight_vD, bias_v, targets_N, group, num_targets, torch.is_grad_enabled()
    )
    return loss


def complete_logits(x_BSD: Tensor, weight_vD: Tensor, bias_v: Tensor | None, group: TPGroup) -> Tensor:
    """logits_BSV of positions that all ranks of the group have, the same on each. Without a gradient.

    Raises:
        ExpertMeshError: a gradient is asked for.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_BSD, weight_vD, bias_v)):
        raise ExpertMeshError(
            "--tp-size: where the vocabulary is divided, a model's logits have no gradient; take the loss from the "
            "engine (forward_backward), call the model under torch.no_grad(), or keep the head complete by "
            "--cross-entropy full"
        )
    return group.all_gather(F.linear(x_BSD, weight_vD, bias_v), dim=-1)


class _VocabularyLossSum(torch.autograd.Function):
    """Gradients are taken in forward, while a chunk's logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        weight_vD: Tensor,
        bias_v: Tensor | None,
        targets_N: Tensor,
        group: TPGroup,
        num_targets: Sequence[int],
        with_gradients: bool,
    ) -> Tensor:
        needs = [with_gradients and needs for needs in ctx.needs_input_grad[:3]]
        rows_RD, targets_R = _gather(group, rows_ND, num_targets), _gather(group, targets_N, num_targets)
        # counted from this rank's first token
        targets_R -= group.index * len(weight_vD)
        losses, (grad_RD, *others) = losses_by_chunk(
            rows_RD, weight_vD, bias_v, targets_R, needs, partial(_losses_and_logit_gradient, group)
        )
        grad_ND = None if grad_RD is None else _sum_scatter(group, grad_RD, num_targets)
        ctx.gradients = (grad_ND, *others)
        losses_R = torch.cat(losses)
        return losses_R.split(list(num_targets))[group.index].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled(ctx, grad), None, None, None, None


def _losses_and_logit_gradient(group: TPGroup, logits_Cv: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies in fp32, the same on all ranks, and their gradient by this rank's logits, in the dtype of these;
    zero for logits beyond the targets, which are padding.

    Computed in place on the logits, or on an fp32 copy of them. On a GPU in two Triton kernels, between which the ranks
    exchange what they found.

    Args:
        targets_C: counted from this rank's first token; those of other ranks are not from 0 to v - 1.
    """
    if takes_triton(logits_Cv) and len(targets_C) == len(logits_Cv):
        from .head_triton import fused_gradient, fused_row_figures

        losses_C, highest_C, exp_sum_C = _exchange(group, *fused_row_figures(logits_Cv, targets_C))
        return losses_C, fused_gradient(logits_Cv, targets_C, highest_C, exp_sum_C)
    num_rows, num_columns = len(targets_C), logits_Cv.shape[1]
    all_Cv = logits_Cv.float()
    all_Cv[num_rows:] = 0
    x_Cv, targets_C1 = all_Cv[:num_rows], targets_C.unsqueeze(1)
    is_here_C1 = (targets_C1 >= 0) & (targets_C1 < num_columns)
    place_C1 = targets_C1 % num_columns
    at_target_C1 = x_Cv.gather(1, place_C1).where(is_here_C1, 0.0)
    own_C1 = x_Cv.amax(dim=1, keepdim=True)
    # -inf less -inf would be no number: tokens that are ruled out may be all that a rank has
    x_Cv -= own_C1.clamp(min=torch.finfo(torch.float32).min)
    own_sum_C1 = x_Cv.exp_().sum(dim=1, keepdim=True)
    own_C = own_C1.squeeze(1)
    losses_C, highest_C, exp_sum_C = _exchange(group, own_C, own_sum_C1.squeeze(1), at_target_C1.squeeze(1))
    x_Cv *= ((own_C - highest_C).exp() / exp_sum_C).unsqueeze(1)
    x_Cv.scatter_(1, place_C1, x_Cv.gather(1, place_C1) - is_here_C1.float())
    return losses_C, all_Cv.to(logits_Cv.dtype)


def _exchange(
    group: TPGroup, highest_C: Tensor, exp_sum_C: Tensor, at_target_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the highest logit and the sum of exp(logit - highest) of the complete vocabulary, from each
    rank's own."""
    figures_n3C = group.all_gather(torch.stack([highest_C, exp_sum_C, at_target_C]).unsqueeze(0), dim=0)
    highest_nC, exp_sum_nC, at_target_nC = figures_n3C.unbind(1)
    highest_C = highest_nC.amax(dim=0)
    exp_sum_C = (exp_sum_nC * (highest_nC - highest_C).exp()).sum(dim=0)
    # large logits are subtracted from one another before anything small is added
    losses_C = (highest_C - at_target_nC.sum(dim=0)) + exp_sum_C.log()
    return losses_C, highest_C, exp_sum_C


def _gather(group: TPGroup, part_N: Tensor, numbers: Sequence[int]) -> Tensor:
    """All ranks' rows, one rank's after the other. They travel padded to as many as the rank with the most has.

    Args:
        numbers: of each rank's rows.
    """
    most = max(numbers)
    if most == 0:
        return part_N
    padded_nM = group.all_gather(_padded(part_N, most), dim=0)
    if min(numbers) == most:
        return padded_nM
    return torch.cat([part[:number] for part, number in zip(padded_nM.split(most), numbers, strict=True)])


def _sum_scatter(group: TPGroup, rows_RD: Tensor, numbers: Sequence[int]) -> Tensor:
    """This rank's rows, as `_gather` has ordered them, summed over the ranks."""
    most = max(numbers)
    if most == 0:
        return rows_RD
    if min(numbers) < most:
        rows_RD = torch.cat([_padded(part, most) for part in rows_RD.split(list(numbers))])
    return group.sum_scatter(rows_RD, dim=0)[: numbers[group.index]]


def _padded(rows: Tensor, number: int) -> Tensor:
    missing = number - len(rows)
    return rows if missing == 0 else F.pad(rows, (0,) * (2 * rows.dim() - 1) + (missing,))
