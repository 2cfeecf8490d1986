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
from functools import partial
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

LossAndGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of a chunk's (logits_CV, targets_C), its loss and the gradient by the logits; see `losses_by_chunk`."""


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
        if self.vocabulary is not None:
            assert self.is_last
            assert split is not None
            assert not targets.top_k
            # the group is part of those that split sequences, and its ranks are adjacent
            first = split.cp_group.index - self.vocabulary.index
            of_group = num_targets[first : first + self.vocabulary.size]
            of_divided = vocabulary_logprobs if targets.by_token else vocabulary_loss_sum
            return of_divided(x_BSD, weight, bias, targets, self.vocabulary, of_group)
        if self.is_last:
            by_token = full_logprobs if self.kind == "full" and targets.candidates_NK is None else token_logprobs
            compute = by_token if targets.by_token else LOSS_SUMS[self.kind]
            compute = top_logprobs if targets.top_k else compute
            return compute(x_BSD, weight, bias, targets)
        return F.linear(target_rows(x_BSD, targets), weight, bias).unsqueeze(0)

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
        if targets.by_token:
            return -_row_losses(logits_NV, asked_tokens(targets))[0]
        return F.cross_entropy(logits_NV, target_tokens(targets), reduction="sum")


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
    """From the logits of all positions (`ForCausalLMLoss` in transformers, before its division): the reference."""
    logits_TV = F.linear(x_BSD, weight_VD, bias_V).flatten(0, 1).float()
    return F.cross_entropy(logits_TV, targets.targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def full_logprobs(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """`token_logprobs` from the logits of all positions."""
    logits_TV = F.linear(x_BSD, weight_VD, bias_V).flatten(0, 1).float()
    targets_T = targets.targets_BS.flatten()
    return -F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="none")[targets.index_N]


def chunked_loss_sum(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """`full_loss_sum` from positions with a target alone, and never more of their logits than CHUNK_BYTES in fp32."""
    rows_ND, targets_N = target_rows(x_BSD, targets), target_tokens(targets)
    loss: Tensor = _ChunkedLossSum.apply(rows_ND, weight_VD, bias_V, targets_N, torch.is_grad_enabled())
    return loss


LOSS_SUMS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Targets], Tensor]] = {
    "chunked": chunked_loss_sum,
    "full": full_loss_sum,
}


class _ChunkedLossSum(torch.autograd.Function):
    """Gradients are taken in forward, while a chunk's logits are there; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, with_gradients: bool
    ) -> Tensor:
        needs = [with_gradients and needs for needs in ctx.needs_input_grad[:3]]
        losses, ctx.gradients = losses_by_chunk(rows_ND, weight_VD, bias_V, targets_N, needs, _loss_and_logit_gradient)
        loss = torch.zeros((), dtype=torch.float32, device=rows_ND.device)
        for chunk_loss in losses:
            loss += chunk_loss
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled(ctx, grad), None, None


def _loss_and_logit_gradient(logits_CV: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of cross-entropies in fp32, and its gradient (softmax less one-hot) in the dtype of the logits.

    Computed in place on the logits, or on an fp32 copy of them: they are the largest tensor there is. In one Triton
    kernel on a GPU.
    """
    if takes_triton(logits_CV):
        from .head_triton import fused_loss_and_gradient

        return fused_loss_and_gradient(logits_CV, targets)
    x_CV, targets_C1 = logits_CV.float(), targets.unsqueeze(1)
    x_CV -= x_CV.amax(dim=1, keepdim=True)
    at_target_C1 = x_CV.gather(1, targets_C1)
    exp_sum_C1 = x_CV.exp_().sum(dim=1, keepdim=True)
    loss = (exp_sum_C1.log() - at_target_C1).sum()
    x_CV /= exp_sum_C1
    x_CV.scatter_(1, targets_C1, x_CV.gather(1, targets_C1) - 1)
    return loss, x_CV.to(logits_CV.dtype)


def token_logprobs(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """The log-probability of each target, (N,) fp32, and of the candidates behind it, (N, 1 + K). No more of the logits
    than CHUNK_BYTES in fp32 is held at a time: backward computes each chunk's anew, since only then their gradient is
    known."""
    rows_ND, tokens = target_rows(x_BSD, targets), asked_tokens(targets)
    logprobs: Tensor = _TokenLogprobs.apply(rows_ND, weight_VD, bias_V, tokens)
    return logprobs


def top_logprobs(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """The log-probabilities of the K most likely tokens at each position with a target, and these tokens, (N, 2, K)
    fp32, the likeliest first; without gradients."""
    rows_ND = target_rows(x_BSD, targets)
    found, _ = losses_by_chunk(
        *(rows_ND, weight_VD, bias_V, target_tokens(targets), _NO_GRADIENTS),
        lambda logits_CV, _: (most_likely(logits_CV.float(), targets.top_k), logits_CV),
    )
    return torch.cat(found)


def most_likely(logits_CV: Tensor, top_k: int) -> Tensor:
    """The log-probabilities of the K most likely tokens, and these tokens, (C, 2, K) fp32, the likeliest first."""
    logprobs_CK, tokens_CK = logits_CV.log_softmax(dim=1).topk(top_k, dim=1)
    # fp32 has all integers up to 2^24, more than any vocabulary has tokens
    return torch.stack([logprobs_CK, tokens_CK.float()], dim=1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(rows_ND, weight_VD, bias_V, tokens)
        losses, _ = losses_by_chunk(rows_ND, weight_VD, bias_V, tokens, _NO_GRADIENTS, _row_losses)
        return -torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, weight_VD, bias_V, tokens = ctx.saved_tensors
        weigh = _of_several(None, -grad) if grad.dim() > 1 else weighted(_loss_and_logit_gradient, -grad)
        _, gradients = losses_by_chunk(rows_ND, weight_VD, bias_V, tokens, ctx.needs_input_grad[:3], weigh)
        return *gradients, None


_NO_GRADIENTS = (False, False, False)


def _row_losses(logits_CV: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each token, (C,) or (C, K), fp32; the logits stand for a gradient that nobody needs."""
    if tokens.dim() > 1:
        return -logits_CV.float().log_softmax(dim=1).gather(1, tokens), logits_CV
    return F.cross_entropy(logits_CV.float(), tokens, reduction="none"), logits_CV


def weighted(loss_and_gradient: LossAndGradient, weights_N: Tensor) -> LossAndGradient:
    """The same for a sum of losses that have a weight each; the losses it gives are without weights.

    Args:
        weights_N: in the order in which the chunks come.
    """
    begin = 0

    def weighted_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal begin
        loss, grad_CV = loss_and_gradient(logits_CV, targets_C)
        grad_CV *= weights_N[begin : begin + len(targets_C)].unsqueeze(1)
        begin += len(targets_C)
        return loss, grad_CV

    return weighted_gradient


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


def losses_by_chunk(
    rows_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    needs: Sequence[bool],
    loss_and_gradient: LossAndGradient,
) -> tuple[list[Tensor], Gradients]:
    """Each chunk's loss, and the gradients of their sum.

    Args:
        needs: which gradients, of rows, weight and bias.
        loss_and_gradient: of (logits_CV, targets_C), makes the chunk's loss and the gradient of the logits, in their
            dtype and preferably in their memory.
    """
    rows_need, weight_needs, bias_needs = needs
    chunk_bytes = CHUNK_BYTES["cpu" if computes_on_cpu(rows_ND) else "cuda"]
    num_chunks = chunks_of(len(rows_ND), len(weight_VD), chunk_bytes)
    losses: list[Tensor] = []
    grad_rows: list[Tensor] | None = [] if rows_need else None
    adds = weight_needs and weight_VD.dtype == torch.float32
    grad_weight_VD = torch.zeros_like(weight_VD) if adds else None
    grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and bias_needs else None
    for rows_CD, targets_C in zip(rows_ND.chunk(num_chunks), targets_N.chunk(num_chunks), strict=True):
        logits_CV = rows_CD @ weight_VD.t()
        if bias_V is not None:
            logits_CV += bias_V
        chunk_loss, grad_logits_CV = loss_and_gradient(logits_CV, targets_C)
        losses.append(chunk_loss)
        if grad_rows is not None:
            grad_rows.append(grad_logits_CV @ weight_VD)
        if grad_weight_VD is not None:
            _add_product(grad_weight_VD, grad_logits_CV.t(), rows_CD)
        elif weight_needs:
            # a product is rounded to its own dtype before it is added: the first needs no zeros to be added to, and if
            # it is all, no sum in fp32
            grad_weight_VD = grad_logits_CV.t() @ rows_CD
            grad_weight_VD = grad_weight_VD.float() if num_chunks > 1 else grad_weight_VD
        if grad_bias_V is not None:
            grad_bias_V += grad_logits_CV.sum(dim=0, dtype=torch.float32)
    return losses, (
        None if grad_rows is None else torch.cat(grad_rows),
        None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
        None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype),
    )


def _add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """sum_MN += a_MK @ b_KN; a product in another dtype than the sum's is first rounded once to its own dtype."""
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    else:
        sum_MN += a_MK @ b_KN


def scaled(ctx: Any, grad: Tensor) -> Gradients:
    """The gradients that a forward has left in `ctx.gradients`, scaled in place by that of its loss."""
    gradients, ctx.gradients = ctx.gradients, None
    assert gradients is not None, "backward scales the gradients in place: it can run only once"
    rows, weight, bias = (None if g is None else g.mul_(grad) for g in gradients)
    return rows, weight, bias


def vocabulary_loss_sum(
    x_BLD: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor | None,
    targets: Targets,
    group: TPGroup,
    num_targets: Sequence[int],
) -> Tensor:
    """This rank's part of `full_loss_sum`, an fp32 scalar: of its own positions. All ranks of the
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
            "--tp-size: with a sharded vocabulary, logits have no gradient; use the engine's "
            "forward_backward, call the model under torch.no_grad(), or give --cross-entropy full"
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
        compute = partial(_losses_and_logit_gradient, group)
        losses, ctx.gradients = _of_all_ranks(rows_ND, weight_vD, bias_v, targets_N, group, num_targets, needs, compute)
        losses_R = torch.cat(losses)
        return losses_R.split(list(num_targets))[group.index].sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled(ctx, grad), None, None, None, None


def vocabulary_logprobs(
    x_BLD: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor | None,
    targets: Targets,
    group: TPGroup,
    num_targets: Sequence[int],
) -> Tensor:
    """`token_logprobs` of this rank's positions, of a vocabulary that is divided (see `vocabulary_loss_sum`). All ranks
    of the group call it together, and its backward."""
    rows_ND, tokens = target_rows(x_BLD, targets), asked_tokens(targets)
    logprobs: Tensor = _VocabularyLogprobs.apply(rows_ND, weight_vD, bias_v, tokens, group, num_targets)
    return logprobs


class _VocabularyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        weight_vD: Tensor,
        bias_v: Tensor | None,
        tokens: Tensor,
        group: TPGroup,
        num_targets: Sequence[int],
    ) -> Tensor:
        ctx.save_for_backward(rows_ND, weight_vD, bias_v, tokens)
        ctx.group, ctx.num_targets = group, num_targets
        compute = _of_several(group) if tokens.dim() > 1 else partial(_losses_and_logit_gradient, group)
        losses, _ = _of_all_ranks(rows_ND, weight_vD, bias_v, tokens, group, num_targets, _NO_GRADIENTS, compute)
        return -torch.cat(losses).split(list(num_targets))[group.index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, num_targets = ctx.group, ctx.num_targets
        weights = _gather(group, -grad.contiguous(), num_targets)
        several = weights.dim() > 1
        compute = (
            _of_several(group, weights) if several else weighted(partial(_losses_and_logit_gradient, group), weights)
        )
        needs = ctx.needs_input_grad[:3]
        rows_ND, weight_vD, bias_v, tokens = ctx.saved_tensors
        _, gradients = _of_all_ranks(rows_ND, weight_vD, bias_v, tokens, group, num_targets, needs, compute)
        return *gradients, None, None, None


def _of_all_ranks(
    rows_ND: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor | None,
    targets_N: Tensor,
    group: TPGroup,
    num_targets: Sequence[int],
    needs: Sequence[bool],
    compute: LossAndGradient,
) -> tuple[list[Tensor], Gradients]:
    """`losses_by_chunk` of the positions of all ranks of a group; the rows' gradient is of this rank's own."""
    rows_RD, targets_R = _gather(group, rows_ND, num_targets), _gather(group, targets_N, num_targets)
    # counted from this rank's first token
    targets_R = targets_R - group.index * len(weight_vD)
    losses, (grad_RD, *others) = losses_by_chunk(rows_RD, weight_vD, bias_v, targets_R, needs, compute)
    grad_ND = None if grad_RD is None else _sum_scatter(group, grad_RD, num_targets)
    return losses, (grad_ND, others[0], others[1])


def _losses_and_logit_gradient(group: TPGroup, logits_Cv: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies in fp32, the same on all ranks, and their gradient by this rank's logits, in the dtype of these.

    Computed in place on the logits, or on an fp32 copy of them. On a GPU in two Triton kernels, between which the ranks
    exchange what they found.

    Args:
        targets_C: counted from this rank's first token; those of other ranks are not from 0 to v - 1.
    """
    if takes_triton(logits_Cv):
        from .head_triton import fused_gradient, fused_row_figures

        losses_C, highest_C, exp_sum_C = _exchange(group, *fused_row_figures(logits_Cv, targets_C))
        return losses_C, fused_gradient(logits_Cv, targets_C, highest_C, exp_sum_C)
    num_columns = logits_Cv.shape[1]
    x_Cv, targets_C1 = logits_Cv.float(), targets_C.unsqueeze(1)
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
    return losses_C, x_Cv.to(logits_Cv.dtype)


def _of_several(group: TPGroup | None, weights_NK: Tensor | None = None) -> LossAndGradient:
    """What gives the cross-entropies of several tokens at each row, (C, K) fp32, and the gradient of their weighted sum
    by this rank's logits, in the dtype of these.

    Args:
        group: that divides the vocabulary; tokens are then counted from this rank's first one. None: it is not divided.
        weights_NK: in the order in which the chunks come; None: no gradient is needed.
    """
    begin = 0

    def compute(logits_Cv: Tensor, tokens_CK: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal begin
        num_rows, num_columns = len(tokens_CK), logits_Cv.shape[1]
        x_Cv = logits_Cv.float()
        is_here_CK, place_CK = (tokens_CK >= 0) & (tokens_CK < num_columns), tokens_CK % num_columns
        at_token_CK, own_C = x_Cv.gather(1, place_CK).where(is_here_CK, 0.0), x_Cv.amax(dim=1)
        # -inf less -inf would be no number: tokens that are ruled out may be all that a rank has
        x_Cv = (x_Cv - own_C.clamp(min=torch.finfo(torch.float32).min).unsqueeze(1)).exp_()
        losses_CK, highest_C, exp_sum_C = _exchange(group, own_C, x_Cv.sum(dim=1), at_token_CK)
        if weights_NK is None:
            return losses_CK, logits_Cv
        weights_CK = weights_NK[begin : begin + num_rows]
        begin += num_rows
        x_Cv *= ((own_C - highest_C).exp() / exp_sum_C * weights_CK.sum(dim=1)).unsqueeze(1)
        x_Cv.scatter_add_(1, place_CK, -weights_CK.where(is_here_CK, 0.0))
        return losses_CK, x_Cv.to(logits_Cv.dtype)

    return compute


def _exchange(
    group: TPGroup | None, highest_C: Tensor, exp_sum_C: Tensor, at_tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the highest logit and the sum of exp(logit - highest) of the complete vocabulary, from each
    rank's own.

    Args:
        at_tokens: (C,), or (C, K) of several tokens; 0 for those that are elsewhere.
    """
    at_KC = at_tokens.unsqueeze(0) if at_tokens.dim() == 1 else at_tokens.t()
    figures_nFC = torch.cat([torch.stack([highest_C, exp_sum_C]), at_KC]).unsqueeze(0)
    if group is not None:
        figures_nFC = group.all_gather(figures_nFC, dim=0)
    highest_nC, exp_sum_nC, at_nKC = figures_nFC[:, 0], figures_nFC[:, 1], figures_nFC[:, 2:]
    highest_C = highest_nC.amax(dim=0)
    exp_sum_C = (exp_sum_nC * (highest_nC - highest_C).exp()).sum(dim=0)
    # large logits are subtracted from one another before anything small is added
    losses_KC = (highest_C - at_nKC.sum(dim=0)) + exp_sum_C.log()
    return losses_KC.t().reshape(at_tokens.shape), highest_C, exp_sum_C


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
