"""The language model's head that gives the loss of the target tokens without the logits of the full sequence.

Logits take V values per position, V/D times what the model itself holds there, and their loss takes several such
tensors in fp32. Here only positions with a target get logits at all, a chunk of them at a time, and the gradients are
taken from a chunk before the next one is begun.

Shape suffixes: B sequences, S positions, T = B·S, N positions with a target, C of them in a chunk, D model width,
V vocabulary.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...moe.experts.forward import Forward, Targets, current_forward
from ...moe.experts.model_facts import facts_of
from ...moe.util.errors import ExpertMeshError
from ...moe.util.gpu import takes_triton
from ...sharding.collectives.tensor_parallel import TPGroup
from ...sharding.state import local_tensor
from ..config.settings import CrossEntropy
from ..data.batch import IGNORED, SplitSequences
from .chunks import losses_by_chunk, scaled, target_rows, target_tokens
from .vocabulary import complete_logits, vocabulary_loss_sum


class LossHead(nn.Linear):
    """Stands for a HF model's head: logits_BSV as ever or, in a forward that has targets, what `loss_of` wants.

    That is their loss already; or, of a family that scales or caps its logits after the head, the logits of the target
    positions alone, (1, N, V), on which it does so.

    Attributes:
        kind: how the loss is computed, a key of `LOSS_SUMS`.
        is_last: whether the model's logits are what this gave, as they were.
        vocabulary: the tensor-parallel group that divides the vocabulary, set when the weight is (see
            `vocabulary`), which then is this rank's rows; `kind` says nothing then. None: it is not
            divided.
    """

    def __init__(self, head: nn.Linear, kind: str, is_last: bool):
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight = head.weight
        self.bias = head.bias
        self.kind: str = kind
        self.is_last = is_last
        self.vocabulary: TPGroup | None = None

    def forward(self, x_BSD: Tensor) -> Tensor:
        forward = current_forward()
        if self.vocabulary is not None:
            return self._of_divided(x_BSD, forward, self.vocabulary)
        if forward is None or forward.targets is None:
            return super().forward(x_BSD)
        if self.is_last:
            return LOSS_SUMS[self.kind](x_BSD, self.weight, self.bias, forward.targets)
        return super().forward(target_rows(x_BSD, forward.targets)).unsqueeze(0)

    def _of_divided(self, x_BLD: Tensor, forward: Forward | None, group: TPGroup) -> Tensor:
        assert self.is_last
        weight_vD, bias_v = local_tensor(self.weight), None if self.bias is None else local_tensor(self.bias)
        if forward is None or forward.targets is None:
            assert forward is None or forward.split is None, "logits are of sequences that all ranks have"
            return complete_logits(x_BLD, weight_vD, bias_v, group)
        # the group is part of those that split sequences, and its ranks are adjacent
        split: SplitSequences = forward.split
        first = split.cp_group.index - group.index
        num_targets = split.num_targets[first : first + group.size]
        return vocabulary_loss_sum(x_BLD, weight_vD, bias_v, forward.targets, group, num_targets)

    def loss_of(self, logits: Tensor, targets: Targets) -> Tensor:
        """The loss, from what a forward with these targets has given as logits."""
        if self.is_last:
            return logits
        return F.cross_entropy(logits.squeeze(0).float(), target_tokens(targets), reduction="sum")


def attach_loss_head(model: Any, kind: str) -> None:
    """Put a `LossHead` in the place of the model's head, in place, with the same weight (tied or not).

    A `Forward` of the model with targets then has in `.logits` what `loss_head(model).loss_of` makes the sum of the
    target tokens' cross-entropies of, an fp32 scalar: zero, but with gradients of zero, where there is no target. Any
    other has logits there. (FSDP begins its backward at the tensors that the model gives: a loss must come of these.)

    Args:
        model: from `build_model`; to be parallelised afterwards, since the head computes with the gathered weight.
        kind: from `choose_cross_entropy`.
    """
    model.set_output_embeddings(LossHead(model.get_output_embeddings(), kind, facts_of(model).head_is_last))


def loss_head(model: Any) -> LossHead:
    """The head of a model that `attach_loss_head` was given."""
    head: LossHead = model.get_output_embeddings()
    return head


def choose_cross_entropy(name: CrossEntropy, device_type: str) -> str:
    """The kind of loss for `--cross-entropy name`; "auto" takes liger-kernel on a GPU where it is installed.

    Raises:
        ExpertMeshError: liger was asked for, and there is no GPU or no liger-kernel.
    """
    if name == "auto":
        return "liger" if device_type == "cuda" and find_spec("liger_kernel") else "chunked"
    if name == "liger" and device_type != "cuda":
        raise ExpertMeshError("--cross-entropy liger needs a GPU; use --cross-entropy chunked, which runs anywhere")
    if name == "liger" and not find_spec("liger_kernel"):
        raise ExpertMeshError(
            "--cross-entropy liger: liger-kernel is not installed; pip install 'liger-kernel>=0.8.5', "
            "or use --cross-entropy chunked"
        )
    return name


def full_loss_sum(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """From the logits of all positions (`ForCausalLMLoss` in transformers, before its division): the reference."""
    logits_TV = F.linear(x_BSD, weight_VD, bias_V).flatten(0, 1).float()
    return F.cross_entropy(logits_TV, targets.targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def chunked_loss_sum(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """`full_loss_sum` from positions with a target alone, and never more of their logits than CHUNK_BYTES in fp32."""
    rows_ND, targets_N = target_rows(x_BSD, targets), target_tokens(targets)
    loss: Tensor = _ChunkedLossSum.apply(rows_ND, weight_VD, bias_V, targets_N, torch.is_grad_enabled())
    return loss


def liger_loss_sum(x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: Targets) -> Tensor:
    """`chunked_loss_sum` by the Triton kernel of liger-kernel; the weight's gradient is summed up in fp32."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    rows_ND, targets_N = target_rows(x_BSD, targets), target_tokens(targets)
    if len(targets_N) == 0:
        # liger-kernel divides by the number of rows
        return chunked_loss_sum(x_BSD, weight_VD, bias_V, targets)
    class_weights = softcap = None
    z_weight = label_smoothing = 0.0
    return_z_loss, accumulate_in = False, torch.float32
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        *(rows_ND, weight_VD, targets_N, bias_V, class_weights, IGNORED, z_weight, label_smoothing),
        *("sum", softcap, return_z_loss, accumulate_in),
    )
    return loss


LOSS_SUMS: dict[str, Callable[[Tensor, Tensor, Tensor | None, Targets], Tensor]] = {
    "chunked": chunked_loss_sum,
    "full": full_loss_sum,
    "liger": liger_loss_sum,
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
    """Sum of cross-entropies in fp32, and its gradient (softmax less one-hot) in the dtype of the logits; zero for
    logits beyond the targets, which are padding.

    Computed in place on the logits, or on an fp32 copy of them: they are the largest tensor there is. In one Triton
    kernel on a GPU.
    """
    if takes_triton(logits_CV) and len(targets) == len(logits_CV):
        from .head_triton import fused_loss_and_gradient

        return fused_loss_and_gradient(logits_CV, targets)
    all_CV = logits_CV.float()
    all_CV[len(targets) :] = 0
    x_NV, targets_N1 = all_CV[: len(targets)], targets.unsqueeze(1)
    x_NV -= x_NV.amax(dim=1, keepdim=True)
    at_target_N1 = x_NV.gather(1, targets_N1)
    exp_sum_N1 = x_NV.exp_().sum(dim=1, keepdim=True)
    loss = (exp_sum_N1.log() - at_target_N1).sum()
    x_NV /= exp_sum_N1
    x_NV.scatter_(1, targets_N1, x_NV.gather(1, targets_N1) - 1)
    return loss, all_CV.to(logits_CV.dtype)
