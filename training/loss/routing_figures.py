"""Where tokens went, summed up on the device over a logging interval and over ranks only when it is logged.

Shape suffixes: L MoE layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.experts.router_stats import RouterStats


@dataclass(frozen=True)
class Routing:
    """Sums over tokens.

    counts_LE: tokens that chose each expert, int64. entropy_L: of the router's probabilities, in nats, fp64; NaN where
    the router's logits are not to be had.
    rows_computed_L: rows that went through an expert, int64: all that were routed, since nothing is dropped.
    """

    counts_LE: Tensor
    entropy_L: Tensor
    rows_computed_L: Tensor

    def __add__(self, other: "Routing") -> "Routing":
        return Routing(
            self.counts_LE + other.counts_LE,
            self.entropy_L + other.entropy_L,
            self.rows_computed_L + other.rows_computed_L,
        )


def routing_of(stats: Sequence[RouterStats]) -> Routing:
    """This rank's part in one forward, on its device."""
    counts_LE = torch.stack([s.counts_E for s in stats])
    unknown = torch.full((), torch.nan, device=counts_LE.device)
    entropy_L = torch.stack([unknown if s.entropy_sum is None else s.entropy_sum for s in stats]).double()
    rows_L = torch.tensor([s.rows_computed for s in stats])
    return Routing(counts_LE, entropy_L, rows_L)


def over_ranks(routing: Routing) -> Routing:
    """Summed over all ranks, in one all-reduce, and brought to the host."""
    counts_LE, device = routing.counts_LE, routing.counts_LE.device
    # counts are exact in fp64 up to 2^53
    parts = [counts_LE.double().flatten(), routing.entropy_L, routing.rows_computed_L.double().to(device)]
    sums = torch.cat(parts)
    dist.all_reduce(sums)
    counts, entropy_L, rows_L = sums.cpu().split([part.numel() for part in parts])
    return Routing(counts.long().view_as(counts_LE), entropy_L, rows_L.long())
