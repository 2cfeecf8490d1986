"""What depends on the data of a step, and is given to a dry run instead."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertmesh.moe import ExpertMeshError

_MOST_LINE = 64 * 2**20


@dataclass(frozen=True)
class Told:
    """samples: packed into one sequence, with `packing`, all equally long. shares: the fraction of all routed tokens
    that goes to each ep rank: one tuple for all MoE layers, or one for each; none: equally many."""

    samples: int = 8
    shares: tuple[tuple[float, ...], ...] = ()

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
        return totals.index(max(totals)) if totals else 0


EVEN = Told()
"""Every ep rank gets as many rows."""


def skewed(imbalance: float, ep_size: int, ep_rank: int) -> tuple[tuple[float, ...], ...]:
    """Fractions of which one ep rank's is `imbalance` times the mean; the rest is divided equally among the others.

    Raises:
        ExpertMeshError: that is less than the mean, or more than there is.
    """
    if not 1 <= imbalance <= ep_size:
        raise ExpertMeshError(
            f"--imbalance {imbalance:g}: the most loaded of {ep_size} ep ranks gets 1 to {ep_size} times the mean"
        )
    if imbalance == 1:
        return ()
    others = (1 - imbalance / ep_size) / (ep_size - 1)
    return (tuple(imbalance / ep_size if rank == ep_rank else others for rank in range(ep_size)),)


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
    try:
        with file.open(encoding="utf-8") as lines:
            while line := lines.readline(_MOST_LINE):
                record = json.loads(line)
                if isinstance(record, dict) and record.get("expert_tokens"):
                    found = record["expert_tokens"]
    except (OSError, ValueError, RecursionError) as error:
        raise ExpertMeshError(f"--routing {file}: is no metrics.jsonl that can be read: {error}") from error
    is_table = isinstance(found, list) and all(isinstance(row, list) and row for row in found)
    if not is_table or not all(isinstance(n, int | float) and 0 <= n < 2**63 for row in found for n in row):
        raise ExpertMeshError(f"--routing {file}: no line has expert_tokens; give metrics.jsonl of a training run")
    counts_LE: Sequence[Sequence[int]] = found
    return counts_LE
