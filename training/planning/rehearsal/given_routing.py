"""What depends on the data of a step, and is given to a dry run instead."""

from dataclasses import dataclass, replace

from ..imbalance import imbalance_of
from ..rates import rank_imbalance


@dataclass(frozen=True)
class Told:
    """samples: packed into one sequence, with `packing`, all equally long. shares: the fraction of all routed tokens
    that goes to each ep rank; none: as `busiest` says, the load of the busiest expert over the mean, None for what is
    natural. loaded: the ep rank that has it."""

    samples: int = 8
    shares: tuple[float, ...] = ()
    busiest: float | None = 1.0
    loaded: int = 0

    def among(self, num_experts: int, ep_size: int) -> "Told":
        """The same with the shares of so many experts on so many ranks."""
        if self.shares:
            return self
        busiest = imbalance_of(self.busiest, num_experts)
        return replace(self, shares=skewed(rank_imbalance(busiest, num_experts, ep_size), ep_size, self.loaded))


EVEN = Told()
"""Every ep rank gets as many rows."""


def skewed(imbalance: float, ep_size: int, ep_rank: int) -> tuple[float, ...]:
    """Fractions of which one ep rank's is `imbalance` times the mean, at most all; the rest is divided equally among
    the others. None where all are equal."""
    if imbalance == 1:
        return ()
    own = min(imbalance / ep_size, 1.0)
    others = (1 - own) / (ep_size - 1)
    return tuple(own if rank == ep_rank else others for rank in range(ep_size))
