"""The language model's head that gives the loss of the target tokens without the logits of the full sequence.

Logits take V values per position, V/D times what the model itself holds there, and their loss takes several such
tensors in fp32. Here only positions with a target get logits at all, a chunk of them at a time, and the gradients are
taken from a chunk before the next one is begun.

The vocabulary may be divided over a tensor-parallel group (loss parallelism; after Megatron-LM, arXiv 1909.08053,
section 3): each rank has the head's rows for some of the tokens, and computes these tokens' logits at all positions of
the group. No rank ever has a position's complete logits. Their softmax takes three numbers per position and rank,
exchanged once per chunk: the highest logit, the sum of exponentials, and the target's logit, which only one rank has.

Shape suffixes: B sequences, S positions, T = B·S, N positions with a target, C of them in a chunk, K tokens that are
asked for at each of them, D model width, V vocabulary or this rank's part; with a group of n ranks: L positions of each
sequence on this rank, R positions with a target on all ranks together, v = V/n.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...moe.experts.forward import Targets, current_forward
from ...moe.experts.model_facts import facts_of
from ...moe.util.change_order import begin_change
from ...moe.util.errors import ExpertMeshError
from ...moe.util.gpu import computes_on_cpu, takes_triton
from ...moe.util.step_parts import register_step_part
from ...sharding.collectives.tensor_parallel import TPGroup
from ...sharding.state import local_tensor
from ..data.batch import IGNORED, SplitSequences
from ..model_setup.new_tokens import with_new_rows

register_step_part(__name__, "LM head, loss")

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""What the logits of one chunk may take if they were fp32: on a CPU 524 positions at a vocabulary of 32,000, on a GPU
8,388, as each chunk reads and writes the weight's gradient once more."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of rows, weight and bias; None for one that is not needed."""


class LossHead(nn.Linear):
    """Stands for a HF model's head: logits_BSV as ever or, in a forward that has targets, what `loss_of` wants.

    That is their loss already; or, of a family that scales or caps its logits after the head, the logits of the target
    positions alone, (1, N, V), on which it does so.

    Attributes:
        kind: how the loss is computed, a key of `LOSS_SUMS`.
        is_last: whether the model's logits are what this gave, as they were.
        new_rows_of: the module with the rows of new tokens, if they alone are trained.
        vocabulary: the tensor-parallel group that divides the vocabulary, set when the weight is, which then is this
            rank's rows; `kind` says nothing then. None: it is not divided.
        detaches_drafts: whether the loss of drafts (see `mtp`) gives the weight no gradient.
    """

    def __init__(self, head: nn.Linear, kind: str, is_last: bool):
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight = head.weight
        self.bias = head.bias
        self.kind: str = kind
        self.is_last = is_last
        self.vocabulary: TPGroup | None = None
        self.detaches_drafts = False
        self.new_rows_of: tuple[nn.Module, ...] = ()

    def forward(self, x_BSD: Tensor) -> Tensor:
        forward = current_forward()
        if forward is None or forward.targets is None:
            if self.vocabulary is None:
                return F.linear(x_BSD, *self._here())
            assert forward is None or forward.split is None, "logits are of sequences that all ranks have"
            return complete_logits(x_BSD, *self._here(), self.vocabulary)
        split: SplitSequences | None = forward.split
        loss = self._of_targets(x_BSD, forward.targets, split, () if split is None else split.num_targets)
        if forward.ahead is None:
            return loss
        assert forward.drafts_BSD is not None
        ahead, drafts_BSD, forward.drafts_BSD = forward.ahead, forward.drafts_BSD, None
        return torch.stack([loss, self._of_targets(drafts_BSD, ahead.targets, split, ahead.num_targets, is_draft=True)])

    def _of_targets(
        self,
        x_BSD: Tensor,
        targets: Targets,
        split: SplitSequences | None,
        num_targets: Sequence[int],
        is_draft: bool = False,
    ) -> Tensor:
        """
        Args:
            num_targets: of each rank that shares sequences, where they are split.
        """
        weight, bias = self._here()
        if is_draft and self.detaches_drafts:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        group, of_group = self.vocabulary, num_targets
        if group is not None:
            assert self.is_last
            assert split is not None
            assert not targets.top_k
            # the group is part of those that split sequences, and its ranks are adjacent
            first = split.cp_group.index - group.index
            of_group = num_targets[first : first + group.size]
        if not self.is_last:
            return F.linear(target_rows(x_BSD, targets), weight, bias).unsqueeze(0)
        if targets.top_k:
            return top_logprobs(x_BSD, weight, bias, targets)
        if self.kind == "full" and group is None and targets.candidates_NK is None:
            return (full_logprobs if targets.by_token else full_loss_sum)(x_BSD, weight, bias, targets)
        return (token_logprobs if targets.by_token else chunked_loss_sum)(x_BSD, weight, bias, targets, group, of_group)

    def _here(self) -> tuple[Tensor, Tensor | None]:
        """Weight, with the rows of new tokens, and bias; where the vocabulary is divided, this rank's rows."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        first = 0
        if self.vocabulary is not None:
            weight, bias = local_tensor(weight), None if bias is None else local_tensor(bias)
            first = self.vocabulary.index * len(weight)
        return with_new_rows(weight, self.new_rows_of[0], first) if self.new_rows_of else weight, bias

    def loss_of(self, logits: Tensor, targets: Targets) -> Tensor:
        """The loss, from what a forward with these targets has given as logits: a scalar or, with `by_token`, (N,)
        log-probabilities, with candidates (N, 1 + K), or (N, 2, K) with `top_k` (see `top_logprobs`); fp32. With
        drafts (2,): their loss behind it."""
        if self.is_last:
            return logits
        logits_NV = logits.squeeze(0).float()
        if targets.top_k:
            return most_likely(logits_NV, targets.top_k)
        if targets.weights_N is None and not targets.by_token:
            return F.cross_entropy(logits_NV, target_tokens(targets), reduction="sum")
        tokens = asked_tokens(targets)
        if tokens.dim() > 1:
            return logits_NV.log_softmax(dim=1).gather(1, tokens)
        losses_N = F.cross_entropy(logits_NV, tokens, reduction="none")
        return -losses_N if targets.weights_N is None else (targets.weights_N * losses_N).sum()


def attach_loss_head(model: Any, kind: str) -> None:
    """Put a `LossHead` in the place of the model's head, in place, with the same weight (tied or not).

    A `Forward` of the model with targets then has in `.logits` what `loss_head(model).loss_of` makes the sum of the
    target tokens' cross-entropies of, an fp32 scalar: zero, but with gradients of zero, where there is no target. Any
    other has logits there. (FSDP begins its backward at the tensors that the model gives: a loss must come of these.)

    Args:
        model: from `build_model`; to be parallelised afterwards, since the head computes with the gathered weight.
        kind: a key of `LOSS_SUMS`.
    """
    begin_change(model, "loss head")
    model.set_output_embeddings(LossHead(model.get_output_embeddings(), kind, facts_of(model).head_is_last))


def loss_head(model: Any) -> LossHead:
    """The head of a model that `attach_loss_head` was given."""
    head: LossHead = model.get_output_embeddings()
    return head


def full_loss_sum(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """From the logits of all positions (`ForCausalLMLoss` in transformers, before its division, times `weights_N`): the
    reference."""
    if targets.weights_N is not None:
        return -(targets.weights_N * full_logprobs(x_BSD, weight_VD, bias_V, targets)).sum()
    logits_TV = F.linear(x_BSD, weight_VD, bias_V).flatten(0, 1).float()
    return F.cross_entropy(logits_TV, targets.targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def full_logprobs(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """`token_logprobs` from the logits of all positions."""
    logits_TV = F.linear(x_BSD, weight_VD, bias_V).flatten(0, 1).float()
    targets_T = targets.targets_BS.flatten()
    return -F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="none")[targets.index_N]


def chunked_loss_sum(
    x_BSD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets: Targets,
    group: TPGroup | None = None,
    num_targets: Sequence[int] = (),
) -> Tensor:
    """`full_loss_sum` from positions with a target alone, and never more of their logits than CHUNK_BYTES in fp32.

    Of a vocabulary that a group divides, it is this rank's part, of its own positions; all ranks of the group call it
    together, and its backward. The gradient of x_BSD is complete, and that of the weight is complete for the rows that
    are here: it is of the losses of all ranks, which must all have the same factor in what is differentiated.

    Args:
        x_BSD: this rank's positions.
        weight_VD: with a group this rank's rows, the index-th of `group.size` equal parts.
        targets: of this rank's positions, tokens of the complete vocabulary.
        group: that divides the vocabulary; None: it is not divided.
        num_targets: how many each rank of the group has. Known to the host, so that it waits for nothing, and computes
            no logits of positions without a target: there are often more of these than of the others, and those with
            one are mostly on the last ranks, which have the ends of sequences.
    """
    rows_ND, tokens_N1 = target_rows(x_BSD, targets), target_tokens(targets).unsqueeze(1)
    weights_N1 = None if targets.weights_N is None else targets.weights_N.unsqueeze(1)
    of_tokens = tokens_N1, weights_N1, group, num_targets
    loss: Tensor = _LossSum.apply(rows_ND, weight_VD, bias_V, *of_tokens, torch.is_grad_enabled())
    return loss


LOSS_SUMS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Targets], Tensor]] = {
    "chunked": chunked_loss_sum,
    "full": full_loss_sum,
}


class _LossSum(torch.autograd.Function):
    """Gradients are taken in forward, while a chunk's logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        tokens_N1: Tensor,
        weights_N1: Tensor | None,
        group: TPGroup | None,
        num_targets: Sequence[int],
        with_gradients: bool,
    ) -> Tensor:
        needs = [with_gradients and needs for needs in ctx.needs_input_grad[:3]]
        given = rows_ND, weight_VD, bias_V, tokens_N1, weights_N1, group, num_targets
        losses, ctx.gradients = _losses_by_chunk(*given, needs)
        return sum((some.sum() for some in losses), torch.zeros((), device=rows_ND.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "backward scales the gradients in place: it can run only once"
        return *(None if g is None else g.mul_(grad) for g in gradients), *[None] * 5


def token_logprobs(
    x_BSD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets: Targets,
    group: TPGroup | None = None,
    num_targets: Sequence[int] = (),
) -> Tensor:
    """The log-probability of each target, (N,) fp32, and of the candidates behind it, (N, 1 + K). No more of the logits
    than CHUNK_BYTES in fp32 is held at a time: backward computes each chunk's anew, since only then their gradient is
    known.

    Args:
        group, num_targets: see `chunked_loss_sum`, also for what all ranks do together.
    """
    given = target_rows(x_BSD, targets), weight_VD, bias_V, asked_tokens(targets)
    logprobs: Tensor = _Logprobs.apply(*given, group, num_targets)
    return logprobs


class _Logprobs(torch.autograd.Function):
    """What a gradient says of each log-probability is its weight in a sum of losses, negated."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        tokens: Tensor,
        group: TPGroup | None,
        num_targets: Sequence[int],
    ) -> Tensor:
        tokens_NK = tokens.unsqueeze(1) if tokens.dim() == 1 else tokens
        ctx.save_for_backward(rows_ND, weight_VD, bias_V, tokens_NK)
        ctx.group, ctx.num_targets = group, num_targets
        losses, _ = _losses_by_chunk(rows_ND, weight_VD, bias_V, tokens_NK, None, group, num_targets, (False,) * 3)
        # no view: an operation in place on one would drop FSDP's hook on what the model gives
        return -torch.cat(losses).reshape(tokens.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weight_VD, bias_V, tokens_NK = ctx.saved_tensors
        weights_NK = -grad.contiguous().view_as(tokens_NK)
        given = rows_ND, weight_VD, bias_V, tokens_NK, weights_NK, ctx.group, ctx.num_targets
        _, gradients = _losses_by_chunk(*given, ctx.needs_input_grad[:3])
        return *gradients, None, None, None


def top_logprobs(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """The log-probabilities of the K most likely tokens at each position with a target, and these tokens, (N, 2, K)
    fp32, the likeliest first; without gradients."""
    rows_ND = target_rows(x_BSD, targets)
    chunks = rows_ND.chunk(_num_chunks(rows_ND, weight_VD))
    return torch.cat([most_likely(_logits(c, weight_VD, bias_V).float(), targets.top_k) for c in chunks])


def most_likely(logits_CV: Tensor, top_k: int) -> Tensor:
    """The log-probabilities of the K most likely tokens, and these tokens, (C, 2, K) fp32, the likeliest first."""
    logprobs_CK, tokens_CK = logits_CV.log_softmax(dim=1).topk(top_k, dim=1)
    # fp32 has all integers up to 2^24, more than any vocabulary has tokens
    return torch.stack([logprobs_CK, tokens_CK.float()], dim=1)


def complete_logits(x_BSD: Tensor, weight_vD: Tensor, bias_v: Tensor | None, group: TPGroup) -> Tensor:
    """logits_BSV of positions that all ranks of the group have, the same on each. Without a gradient.

    Raises:
        ExpertMeshError: a gradient is asked for.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_BSD, weight_vD, bias_v)):
        raise ExpertMeshError(
            "--tp-size: with a sharded vocabulary, logits have no gradient; use the engine's "
            "forward_backward, call the model under torch.no_grad(), or give --cross-entropy full"
        )
    return group.all_gather(F.linear(x_BSD, weight_vD, bias_v), dim=-1)


def target_rows(x_BSD: Tensor, targets: Targets) -> Tensor:
    """rows_ND of the positions that have a target."""
    rows_ND: Tensor = _Positions.apply(x_BSD.flatten(0, 1), targets.index_N)
    return rows_ND


class _Positions(torch.autograd.Function):
    """Rows of a matrix, none of them twice: backward writes each where it came from, while torch's own adds it to what
    is there, in a copy."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.num_rows = x_TD.shape[0]
        return x_TD.index_select(0, index_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
        (index_N,) = ctx.saved_tensors
        return grad_ND.new_zeros(ctx.num_rows, grad_ND.shape[1]).index_copy_(0, index_N, grad_ND), None


def target_tokens(targets: Targets) -> Tensor:
    """targets_N of those positions."""
    return targets.targets_BS.flatten().index_select(0, targets.index_N)


def asked_tokens(targets: Targets) -> Tensor:
    """The tokens whose log-probabilities are asked for: targets_N, or (N, 1 + K) with the candidates behind them."""
    targets_N = target_tokens(targets)
    if targets.candidates_NK is None:
        return targets_N
    return torch.cat([targets_N.unsqueeze(1), targets.candidates_NK], dim=1)


def chunks_of(num_rows: int, vocabulary: int, chunk_bytes: int) -> int:
    """In how many chunks the logits of so many positions are computed."""
    return max(1, math.ceil(num_rows * vocabulary * 4 / chunk_bytes))


def _num_chunks(rows_ND: Tensor, weight_VD: Tensor) -> int:
    return chunks_of(len(rows_ND), len(weight_VD), CHUNK_BYTES["cpu" if computes_on_cpu(rows_ND) else "cuda"])


def _logits(rows_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    logits_CV = rows_CD @ weight_VD.t()
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV


def _losses_by_chunk(
    rows_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    tokens_NK: Tensor,
    weights_NK: Tensor | None,
    group: TPGroup | None,
    num_targets: Sequence[int],
    needs: Sequence[bool],
) -> tuple[list[Tensor], Gradients]:
    """The losses of this rank's positions, (N, K) in several parts, and the gradients of the sum of those of all ranks.

    Args:
        tokens_NK, weights_NK: see `_losses_and_gradient`, of the complete vocabulary.
        group, num_targets: see `chunked_loss_sum`.
        needs: which gradients, of rows, weight and bias.
    """
    rows_need, weight_needs, bias_needs = needs
    if group is not None:
        # of all ranks; tokens are counted from this rank's first one
        rows_ND, tokens_NK = (_gather(group, part, num_targets) for part in (rows_ND, tokens_NK))
        tokens_NK = tokens_NK - group.index * len(weight_VD)
        weights_NK = None if weights_NK is None else _gather(group, weights_NK, num_targets)
    num_chunks = _num_chunks(rows_ND, weight_VD)
    losses: list[Tensor] = []
    grad_rows: list[Tensor] | None = [] if rows_need else None
    adds = weight_needs and weight_VD.dtype == torch.float32
    grad_weight_VD = torch.zeros_like(weight_VD) if adds else None
    grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and bias_needs else None
    cut = [part.chunk(num_chunks) for part in (rows_ND, tokens_NK, weights_NK) if part is not None]
    for rows_CD, tokens_CK, *weights in zip(*cut, strict=True):
        of_tokens = tokens_CK, weights[0] if weights else None, group
        losses_CK, grad_CV = _losses_and_gradient(_logits(rows_CD, weight_VD, bias_V), *of_tokens, any(needs))
        losses.append(losses_CK)
        if grad_CV is None:
            continue
        if grad_rows is not None:
            grad_rows.append(grad_CV @ weight_VD)
        if grad_weight_VD is not None:
            _add_product(grad_weight_VD, grad_CV.t(), rows_CD)
        elif weight_needs:
            # a product is rounded to its own dtype before it is added: the first needs no zeros to be added to, and if
            # it is all, no sum in fp32
            grad_weight_VD = grad_CV.t() @ rows_CD
            grad_weight_VD = grad_weight_VD.float() if num_chunks > 1 else grad_weight_VD
        if grad_bias_V is not None:
            grad_bias_V += grad_CV.sum(dim=0, dtype=torch.float32)
    grad_ND = None if grad_rows is None else torch.cat(grad_rows)
    if group is not None:
        losses = [torch.cat(losses).split(list(num_targets))[group.index]]
        grad_ND = None if grad_ND is None else _sum_scatter(group, grad_ND, num_targets)
    of_weight, of_bias = (None if g is None else g.to(weight_VD.dtype) for g in (grad_weight_VD, grad_bias_V))
    return losses, (grad_ND, of_weight, of_bias)


def _add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """sum_MN += a_MK @ b_KN; a product in another dtype than the sum's is first rounded once to its own dtype."""
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    else:
        sum_MN += a_MK @ b_KN


def _losses_and_gradient(
    logits_CV: Tensor, tokens_CK: Tensor, weights_CK: Tensor | None, group: TPGroup | None, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropies log Σ exp(x_v) - x_t of tokens t, times their weights, (C, K) fp32, the same on all ranks; and
    the gradient of their sum by this rank's logits, in the dtype of these: the softmax, times the sum of a position's
    weights, less the weights at their tokens (after Goodfellow et al., Deep Learning, 2016, equation 6.30).

    Computed in place on the logits, or on an fp32 copy of them: they are the largest tensor there is. With one token a
    position in a Triton kernel on a GPU, with a group in two, between which the ranks exchange what they found.

    Args:
        tokens_CK: counted from this rank's first token; those of other ranks are not from 0 to V - 1.
        weights_CK: None: each is 1.
        group: that divides the vocabulary; None: it is not divided.
        needs_gradient: whether it is asked for; else it may be None.
    """
    grad_CV: Tensor | None = None
    if tokens_CK.shape[1] == 1 and takes_triton(logits_CV):
        from .head_triton import fused_gradient, fused_losses_and_gradient, fused_row_figures

        tokens_C, weights_C = tokens_CK.squeeze(1), None if weights_CK is None else weights_CK.squeeze(1)
        if group is None:
            losses_C, grad_CV = fused_losses_and_gradient(logits_CV, tokens_C, weights_C)
            losses_CK = losses_C.unsqueeze(1)
        else:
            own_C, own_sum_C, at_token_C = fused_row_figures(logits_CV, tokens_C)
            losses_CK, highest_C, exp_sum_C = _exchange(group, own_C, own_sum_C, at_token_C.unsqueeze(1))
            if needs_gradient:
                grad_CV = fused_gradient(logits_CV, tokens_C, highest_C, exp_sum_C, weights_C)
        return losses_CK if weights_CK is None else losses_CK * weights_CK, grad_CV
    x_CV, num_columns = logits_CV.float(), logits_CV.shape[1]
    is_here_CK, place_CK = (tokens_CK >= 0) & (tokens_CK < num_columns), tokens_CK % num_columns
    at_token_CK, own_C = x_CV.gather(1, place_CK).where(is_here_CK, 0.0), x_CV.amax(dim=1)
    # -inf less -inf would be no number: tokens that are ruled out may be all that a rank has
    x_CV -= own_C.clamp(min=torch.finfo(torch.float32).min).unsqueeze(1)
    losses_CK, highest_C, exp_sum_C = _exchange(group, own_C, x_CV.exp_().sum(dim=1), at_token_CK)
    if needs_gradient:
        if group is None and weights_CK is None:
            # a quotient is rounded once, and a product with a reciprocal twice
            x_CV /= exp_sum_C.unsqueeze(1)
        else:
            share_C = (own_C - highest_C).exp() / exp_sum_C
            x_CV *= (share_C if weights_CK is None else share_C * weights_CK.sum(dim=1)).unsqueeze(1)
        less_CK = is_here_CK.float() if weights_CK is None else weights_CK.where(is_here_CK, 0.0)
        # a token may be asked for twice
        grad_CV = x_CV.scatter_add_(1, place_CK, -less_CK).to(logits_CV.dtype)
    return losses_CK if weights_CK is None else losses_CK * weights_CK, grad_CV


def _exchange(
    group: TPGroup | None, highest_C: Tensor, exp_sum_C: Tensor, at_token_CK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the highest logit and the sum of exp(logit - highest) of the complete vocabulary, from each
    rank's own.

    Args:
        at_token_CK: logits; 0 for tokens that are elsewhere.
    """
    figures_nFC = torch.cat([torch.stack([highest_C, exp_sum_C]), at_token_CK.t()]).unsqueeze(0)
    if group is not None:
        figures_nFC = group.all_gather(figures_nFC, dim=0)
    highest_nC, exp_sum_nC, at_token_nKC = figures_nFC[:, 0], figures_nFC[:, 1], figures_nFC[:, 2:]
    highest_C = highest_nC.amax(dim=0)
    exp_sum_C = (exp_sum_nC * (highest_nC - highest_C).exp()).sum(dim=0)
    # large logits are subtracted from one another before anything small is added
    losses_KC = (highest_C - at_token_nKC.sum(dim=0)) + exp_sum_C.log()
    return losses_KC.t(), highest_C, exp_sum_C


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
