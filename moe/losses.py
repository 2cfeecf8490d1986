"""The router's auxiliary losses, over the global batch.

Each function returns this rank's part: the parts of all ranks add up to the loss, and their gradients to its
gradient, however the tokens are spread. Only the counts, which carry no gradient, must be summed over ranks first.

Shape suffixes: L MoE layers, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.router import RouterStats


def load_balancing_loss(stats: Sequence[RouterStats], global_counts_E: Tensor, global_tokens: Tensor | int) -> Tensor:
    """This rank's part of `load_balancing_loss_func` in transformers (Switch Transformer, eq. 4-6), fp32 scalar.

    As there, counts and probabilities are pooled over the layers before they are multiplied.

    Args:
        stats: one entry a MoE layer, of one forward.
        global_counts_E: the layers' counts_E summed over layers and over all ranks.
        global_tokens: tokens of all ranks in that forward, padding left out.
    """
    rows = global_tokens * len(stats)
    prob_sum_E = torch.stack([s.prob_sum_E for s in stats]).sum(dim=0)
    return global_counts_E.numel() * ((global_counts_E / rows) * (prob_sum_E / rows)).sum()


def router_z_loss(stats: Sequence[RouterStats], global_tokens: Tensor | int) -> Tensor:
    """This rank's part of the mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, eq. 5), fp32 scalar."""
    return torch.stack([s.z_sum for s in stats]).sum() / (global_tokens * len(stats))
