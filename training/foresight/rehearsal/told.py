"""What depends on the data of a step, and is given to a dry run instead."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expertmesh.moe import ExpertMeshError
from expertmesh.training.foresight.imbalance import imbalance_of, metrics_of
from expertmesh.training.foresight.rates import rank_imbalance


@dataclass(frozen=True)
class Told:
    """samples: packed into one sequence, with `packing`, all equally long. shares: the fraction of all routed tokens
    that goes to each ep rank: one tuple for all MoE layers, or one for each; none: as `busiest` says, the load of the
    busiest expert over the mean, None for what is natural. loaded: the ep rank that has it."""

    samples: int = 8
    shares: tuple[tuple[float, ...], ...] = ()
    busiest: float | None = 1.0
    loaded: int = 0

    def among(self, num_experts: int, ep_size: int) -> "Told":
        """The same with the shares of so many experts on so many ranks."""
        if self.shares:
            return self
        busiest = imbalance_of(self.busiest, num_experts)
        return replace(self, shares=skewed(rank_imbalance(busiest, num_experts, ep_size), ep_size, self.loaded))

    def of_layer(self, number: int) -> tuple[float, ...]:
        """The shares at the MoE layer of that number.

        Raises:
            ExpertMeshError: the routing was recorded in a model with fewer layers.
        """
        if len(self.shares) < 2:
            return self.shares[0] if self.shares else ()
        if number >= len(self.shares):
            raise ExpertMeshError(
                f"--routing: was recorded in a model with {len(self.shares)} MoE layers; this has more"
            )
        return self.shares[number]

    @property
    def most_loaded(self) -> int:
        """The ep rank that gets the most tokens, over all layers."""
        totals = [sum(of_rank) for of_rank in zip(*self.shares, strict=True)]
        return totals.index(max(totals)) if totals else self.loaded


EVEN = Told()
"""Every ep rank gets as many rows."""


def skewed(imbalance: float, ep_size: int, ep_rank: int) -> tuple[tuple[float, ...], ...]:
    """Fractions of which one ep rank's is `imbalance` times the mean, at most all; the rest is divided equally among
    the others."""
    if imbalance == 1:
        return ()
    own = min(imbalance / ep_size, 1.0)
    others = (1 - own) / (ep_size - 1)
    return (tuple(own if rank == ep_rank else others for rank in range(ep_size)),)


def recorded(file: Path, ep_size: int) -> tuple[tuple[float, ...], ...]:
    """Shares at each MoE layer, as the last line of a run's metrics.jsonl that tells of routing has them.

    Raises:
        ExpertMeshError: the file cannot be read, or tells of none; or its experts cannot be divided among so many
            ranks.
    """
    counts_LE = _last_counts(file)
    experts = len(counts_LE[0])
    if any(len(counts_E) != experts or sum(counts_E) <= 0 for counts_E in counts_LE) or experts % ep_size:
        raise ExpertMeshError(
            f"--routing {file}: its expert_tokens are no table with tokens at each layer, of experts that --ep-size "
            f"{ep_size} divides"
        )
    here = experts // ep_size
    return tuple(
        tuple(sum(counts_E[rank * here : (rank + 1) * here]) / sum(counts_E) for rank in range(ep_size))
        for counts_E in counts_LE
    )


def _last_counts(file: Path) -> Sequence[Sequence[int]]:
    found: Any = None
    for record in metrics_of("--routing", file):
        found = record.get("expert_tokens") or found
    is_table = isinstance(found, list) and all(isinstance(row, list) and row for row in found)
    if not is_table or not all(isinstance(n, int | float) and 0 <= n < 2**63 for row in found for n in row):
        raise ExpertMeshError(f"--routing {file}: no line has expert_tokens; give metrics.jsonl of a training run")
    counts_LE: Sequence[Sequence[int]] = found
    return counts_LE
