"""Statistics of routing, and what is made of them: the auxiliary losses, and figures of where tokens went.

The losses are over the global batch. Each of their functions returns this rank's part: the parts of all ranks add up to
the loss, and their gradients to its gradient, however the tokens are spread. Only the counts, which carry no gradient,
must be summed over ranks first. The figures are summed up on the device over a logging interval, and over ranks only
when it is logged.

Shape suffixes: T tokens on this rank, L MoE layers, E experts, K experts per token, G groups of layers that are
balanced together: 1, or L.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..util.step_parts import register_step_part

register_step_part(__name__, "router")

LOG_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.log_softmax(dim=-1),
    "sigmoid": F.logsigmoid,
    "sqrtsoftplus": lambda logits_TE: F.softplus(logits_TE).log() / 2,
    "given": lambda scores_TE: scores_TE.log(),
}
"""Logarithm of an expert's score, up to a constant per token; "given": the router's logits are scores."""


@dataclass(frozen=True)
class RouterKind:
    """score: how logits become weights, a key of LOG_SCORES; None where it is none of them. num_groups: groups of
    experts, of which each token uses only some; 1 where there are none."""

    score: str | None
    num_groups: int = 1


UNKNOWN = RouterKind(None)


@dataclass(frozen=True)
class RouterStats:
    """Statistics of one layer's routing for the auxiliary losses and the log; padding tokens are left out.

    For a router whose logits are unavailable, or not one per expert, the sums are None; those of losses too where none
    are made of them.

    counts_E: tokens that chose each expert, int64, no gradient.
    prob_sum_E: softmax of the router's logits summed over tokens, fp32, differentiable.
    z_sum: sum over tokens of logsumexp(logits)^2, fp32 scalar, differentiable.
    entropy_sum: sum over tokens of the entropy of the experts' scores, normalized by their sum, in nats, fp32 scalar,
        no gradient; None too where the scores are unknown. They are those of all experts, before groups or a correction
        bias leave some out.
    rows_computed: rows that this rank's experts have computed, whichever rank's tokens they are.
    replayed_2: see `Forward`; None where nothing was replayed.
    """

    counts_E: Tensor
    prob_sum_E: Tensor | None
    z_sum: Tensor | None
    entropy_sum: Tensor | None
    rows_computed: int
    replayed_2: Tensor | None = None


def router_stats(
    counts_E: Tensor,
    logits_TE: Tensor | None,
    is_token_T: Tensor | None,
    rows_computed: int,
    score: str | None,
    has_losses: bool = True,
) -> RouterStats:
    """The statistics, from a router's logits as it returned them.

    Args:
        is_token_T: False for padding, and None when there is none.
        score: how the router scores experts from its logits (see `RouterKind`).
        has_losses: whether losses are made of them; if not, there is no graph.
    """
    if logits_TE is None:
        return RouterStats(counts_E, None, None, None, rows_computed)
    logits_TE = logits_TE.float() if has_losses else logits_TE.detach().float()
    probs_TE = logits_TE.softmax(dim=-1)
    lse_T = logits_TE.logsumexp(dim=-1)
    entropy_T = _entropy(logits_TE, probs_TE, lse_T, score)
    if is_token_T is not None and entropy_T is not None:
        entropy_T = entropy_T.masked_fill(~is_token_T, 0.0)
    entropy_sum = None if entropy_T is None else entropy_T.sum()
    if not has_losses:
        return RouterStats(counts_E, None, None, entropy_sum, rows_computed)
    z_T = lse_T.square()
    if is_token_T is not None:
        probs_TE = probs_TE.masked_fill(~is_token_T.unsqueeze(-1), 0.0)
        z_T = z_T.masked_fill(~is_token_T, 0.0)
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


@dataclass(frozen=True)
class Routing:
    """Sums over tokens.

    counts_LE: tokens that chose each expert, int64. entropy_L: of the router's probabilities, in nats, fp64; NaN where
    the router's logits are not to be had.
    rows_computed_L: rows that went through an expert, int64: all that were routed, since nothing is dropped.
    replayed_2: replayed choices that routers would have made otherwise, and all replayed ones, int64.
    """

    counts_LE: Tensor
    entropy_L: Tensor
    rows_computed_L: Tensor
    replayed_2: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))

    def __add__(self, other: "Routing") -> "Routing":
        return Routing(
            self.counts_LE + other.counts_LE,
            self.entropy_L + other.entropy_L,
            self.rows_computed_L + other.rows_computed_L,
            self.replayed_2 + other.replayed_2,
        )


NO_ROUTING = Routing(torch.empty(0, 0, dtype=torch.int64), torch.empty(0, dtype=torch.float64), torch.empty(0))
"""In the place of one that is kept elsewhere."""


def routing_of(stats: Sequence[RouterStats]) -> Routing:
    """This rank's part in one forward, on its device."""
    counts_LE = torch.stack([s.counts_E for s in stats])
    unknown = torch.full((), torch.nan, device=counts_LE.device)
    entropy_L = torch.stack([unknown if s.entropy_sum is None else s.entropy_sum for s in stats]).double()
    rows_L, none = torch.tensor([s.rows_computed for s in stats]), counts_LE.new_zeros(2)
    return Routing(counts_LE, entropy_L, rows_L, sum((s.replayed_2 for s in stats if s.replayed_2 is not None), none))


def over_ranks(routing: Routing) -> Routing:
    """Summed over all ranks, in one all-reduce, and brought to the host."""
    counts_LE, device = routing.counts_LE, routing.counts_LE.device
    # counts are exact in fp64 up to 2^53
    others = (routing.rows_computed_L, routing.replayed_2)
    parts = [counts_LE.double().flatten(), routing.entropy_L, *(x.double().to(device) for x in others)]
    sums = torch.cat(parts)
    dist.all_reduce(sums)
    counts, entropy_L, rows_L, replayed_2 = sums.cpu().split([part.numel() for part in parts])
    return Routing(counts.long().view_as(counts_LE), entropy_L, rows_L.long(), replayed_2.long())
