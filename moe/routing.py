"""What losses and log need to know of one layer's routing.

Shape suffixes: T tokens on this rank, E experts, K experts a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RouterStats:
    """What the auxiliary losses and the log need from one layer's routing; padding tokens are left out.

    Of a router whose logits are not to be had, or not one an expert, the sums are None.

    counts_E: tokens that chose each expert, int64, no gradient.
    prob_sum_E: softmax of the router's logits summed over tokens, fp32, differentiable.
    z_sum: sum over tokens of logsumexp(logits)^2, fp32 scalar, differentiable.
    entropy_sum: sum over tokens of the entropy of that softmax, in nats, fp32 scalar, no gradient.
    rows_computed: rows that this rank's experts have computed, of whichever rank's tokens.
    """

    counts_E: Tensor
    prob_sum_E: Tensor | None
    z_sum: Tensor | None
    entropy_sum: Tensor | None
    rows_computed: int


def router_stats(
    counts_E: Tensor, logits_TE: Tensor | None, is_token_T: Tensor | None, rows_computed: int
) -> RouterStats:
    """Of a router's logits as it gave them; `is_token_T` is False for padding, and None when there is none."""
    if logits_TE is None:
        return RouterStats(counts_E, None, None, None, rows_computed)
    logits_TE = logits_TE.float()
    probs_TE = logits_TE.softmax(dim=-1)
    lse_T = logits_TE.logsumexp(dim=-1)
    z_T = lse_T.square()
    # -sum p log p, with log p = logits - lse: no logarithm of a probability that has become 0
    entropy_T = lse_T.detach() - (probs_TE.detach() * logits_TE.detach()).sum(dim=-1)
    if is_token_T is not None:
        probs_TE = probs_TE.masked_fill(~is_token_T.unsqueeze(-1), 0.0)
        z_T = z_T.masked_fill(~is_token_T, 0.0)
        entropy_T = entropy_T.masked_fill(~is_token_T, 0.0)
    return RouterStats(counts_E, probs_TE.sum(dim=0), z_T.sum(), entropy_T.sum(), rows_computed)


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Tokens that chose each expert, (E,) int64. Without `bincount`, which waits for the device to know its maximum."""
    one_hot = experts_TK.reshape(-1, 1) == torch.arange(num_experts, device=experts_TK.device)
    return one_hot.sum(dim=0)
