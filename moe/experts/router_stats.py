"""Statistics of one layer's routing for losses and log.

Shape suffixes: T tokens on this rank, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .scores import LOG_SCORES


@dataclass(frozen=True)
class RouterStats:
    """Statistics of one layer's routing for the auxiliary losses and the log; padding tokens are left out.

    For a router whose logits are unavailable, or not one per expert, the sums are None.

    counts_E: tokens that chose each expert, int64, no gradient.
    prob_sum_E: softmax of the router's logits summed over tokens, fp32, differentiable.
    z_sum: sum over tokens of logsumexp(logits)^2, fp32 scalar, differentiable.
    entropy_sum: sum over tokens of the entropy of the experts' scores, normalized by their sum, in nats, fp32 scalar,
        no gradient; None too where the scores are unknown. They are those of all experts, before groups or a correction
        bias leave some out.
    rows_computed: rows that this rank's experts have computed, whichever rank's tokens they are.
    """

    counts_E: Tensor
    prob_sum_E: Tensor | None
    z_sum: Tensor | None
    entropy_sum: Tensor | None
    rows_computed: int


def router_stats(
    counts_E: Tensor, logits_TE: Tensor | None, is_token_T: Tensor | None, rows_computed: int, score: str | None
) -> RouterStats:
    """The statistics, from a router's logits as it returned them.

    Args:
        is_token_T: False for padding, and None when there is none.
        score: how the router scores experts from its logits (see `moe.experts.scores`).
    """
    if logits_TE is None:
        return RouterStats(counts_E, None, None, None, rows_computed)
    logits_TE = logits_TE.float()
    probs_TE = logits_TE.softmax(dim=-1)
    lse_T = logits_TE.logsumexp(dim=-1)
    z_T = lse_T.square()
    entropy_T = _entropy(logits_TE, probs_TE, lse_T, score)
    if is_token_T is not None:
        probs_TE = probs_TE.masked_fill(~is_token_T.unsqueeze(-1), 0.0)
        z_T = z_T.masked_fill(~is_token_T, 0.0)
        entropy_T = None if entropy_T is None else entropy_T.masked_fill(~is_token_T, 0.0)
    entropy_sum = None if entropy_T is None else entropy_T.sum()
    return RouterStats(counts_E, probs_TE.sum(dim=0), z_T.sum(), entropy_sum, rows_computed)


@torch.no_grad()
def _entropy(logits_TE: Tensor, probs_TE: Tensor, lse_T: Tensor, score: str | None) -> Tensor | None:
    """-sum p log p over the experts of each token."""
    if score is None:
        return None
    if score == "softmax":
        # with log p = logits - lse: no logarithm of a probability that has become 0
        return lse_T - (probs_TE * logits_TE).sum(dim=-1)
    log_scores_TE = LOG_SCORES[score](logits_TE)
    log_p_TE = log_scores_TE.log_softmax(dim=-1)
    return -(log_p_TE.exp() * log_p_TE.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
