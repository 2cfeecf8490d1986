"""The router's auxiliary losses, over the global batch.

Each function returns this rank's part: the parts of all ranks add up to the loss, and their gradients to its
gradient, however the tokens are spread. Only the counts, which carry no gradient, must be summed over ranks first.

Shape suffixes: L MoE layers, E experts, G groups of layers that are balanced together: 1, or L.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .router_stats import RouterStats


def load_balancing_loss(stats: Sequence[RouterStats], global_counts_GE: Tensor, global_tokens: Tensor | int) -> Tensor:
    """This rank's part of the balancing loss (Switch Transformer, eq. 4-6), averaged over groups, fp32 scalar.

    Counts and probabilities are pooled over a group's layers before they are multiplied. With one group this is
    `load_balancing_loss_func` in transformers, which reaches its minimum, K, even if every layer is uneven but the
    layers balance one another; with one group per layer, only if each layer is even.

    Counted are the experts that were chosen. transformers counts those of the K largest logits: others, where a router
    chooses by scores with a correction bias or among groups of experts, and so not the load that is to be even.

    Args:
        stats: one entry per MoE layer, of one forward.
        global_counts_GE: the layers' counts_E summed over each group's layers and over all ranks; G is 1 or L.
        global_tokens: tokens of all ranks in that forward, padding left out.
    """
    groups, experts = global_counts_GE.shape
    rows = global_tokens * (len(stats) // groups)
    prob_sums = [s.prob_sum_E for s in stats if s.prob_sum_E is not None]
    assert len(prob_sums) == len(stats), "a router without logits cannot be balanced by a loss"
    prob_sum_GE = torch.stack(prob_sums).view(groups, -1, experts).sum(dim=1)
    return experts * ((global_counts_GE / rows) * (prob_sum_GE / rows)).sum() / groups


def router_z_loss(stats: Sequence[RouterStats], global_tokens: Tensor | int) -> Tensor:
    """This rank's part of the mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, eq. 5), fp32 scalar."""
    z_sums = [s.z_sum for s in stats if s.z_sum is not None]
    assert len(z_sums) == len(stats), "a router without logits has no z-loss"
    return torch.stack(z_sums).sum() / (global_tokens * len(stats))
