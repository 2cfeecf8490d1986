"""Which experts a token goes to, and with what weight.

Shape suffixes: T tokens on this rank, D model width, E experts, K experts a token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RouterStats:
    """What the auxiliary losses and the log need from one layer's routing; padding tokens are left out.

    counts_E: tokens that chose each expert, int64, no gradient.
    prob_sum_E: router probabilities summed over tokens, fp32, differentiable.
    z_sum: sum over tokens of logsumexp(logits)^2, fp32 scalar, differentiable.
    entropy_sum: sum over tokens of the entropy of their probabilities, in nats, fp32 scalar, no gradient.
    rows_computed: rows that this rank's experts have computed, of whichever rank's tokens; the layer fills it in.
    """

    counts_E: Tensor
    prob_sum_E: Tensor
    z_sum: Tensor
    entropy_sum: Tensor
    rows_computed: int = 0


@dataclass(frozen=True)
class Routing:
    """weights_TK: fp32, zero for padding. experts_TK: int64; a padding token's entries are E, which is no expert."""

    weights_TK: Tensor
    experts_TK: Tensor
    stats: RouterStats


class Router(nn.Module):
    """Softmax in fp32 over all experts, then the top k (`MixtralTopKRouter` in transformers).

    Args:
        model_width: D.
        num_experts: E.
        top_k: K.
        normalize_top_k: whether the K weights of a token are divided by their sum.
    """

    def __init__(self, model_width: int, num_experts: int, top_k: int, normalize_top_k: bool):
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize_top_k = normalize_top_k
        self.weight = nn.Parameter(torch.empty(num_experts, model_width))

    def forward(self, x_TD: Tensor, is_token_T: Tensor | None = None) -> Routing:
        """Route x_TD; `is_token_T` (bool) is False for padding, and None when there is none."""
        logits_TE = F.linear(x_TD, self.weight).float()
        probs_TE = logits_TE.softmax(dim=-1)
        weights_TK, experts_TK = probs_TE.topk(self.top_k, dim=-1)
        if self.normalize_top_k:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        lse_T = logits_TE.logsumexp(dim=-1)
        z_T = lse_T.square()
        # -sum p log p, with log p = logits - lse: no logarithm of a probability that has become 0
        entropy_T = lse_T.detach() - (probs_TE.detach() * logits_TE.detach()).sum(dim=-1)
        if is_token_T is not None:
            padding_T1 = ~is_token_T.unsqueeze(-1)
            weights_TK = weights_TK.masked_fill(padding_T1, 0.0)
            experts_TK = experts_TK.masked_fill(padding_T1, self.num_experts)
            probs_TE = probs_TE.masked_fill(padding_T1, 0.0)
            z_T = z_T.masked_fill(~is_token_T, 0.0)
            entropy_T = entropy_T.masked_fill(~is_token_T, 0.0)
        stats = RouterStats(
            count_experts(experts_TK, self.num_experts), probs_TE.sum(dim=0), z_T.sum(), entropy_T.sum()
        )
        return Routing(weights_TK, experts_TK, stats)


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Tokens that chose each expert, (E,) int64. Without `bincount`, which waits for the device to know its maximum."""
    one_hot = experts_TK.reshape(-1, 1) == torch.arange(num_experts, device=experts_TK.device)
    return one_hot.sum(dim=0)
