"""Which decoder layers each stage of a pipeline has. Pure arithmetic: no torch."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from ...moe.util.errors import ExpertMeshError


class Cuttable(Protocol):
    """What is known of a model that is to be cut into stages.

    Attributes:
        name: of its class.
        num_layers: decoder layers.
        flops: of a token's forward in each layer, then after the last.
        skips: (from, to) where layer `to` uses what layer `from` gave, other than the one before it.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def flops(self) -> Sequence[float]: ...

    @property
    def skips(self) -> Collection[tuple[int, int]]: ...


@dataclass(frozen=True)
class StageCosts:
    """What stages cost, in seconds, in bytes or in any unit: a sum over what is on them. Nothing is negative.

    Attributes:
        layers: of each stage, what each decoder layer would cost there.
        beside: of each stage, what it costs beside its layers.
    """

    layers: Sequence[Sequence[float]]
    beside: Sequence[float]

    @staticmethod
    def alike(number: int, layers: Sequence[float], first: float, last: float) -> "StageCosts":
        """Of so many stages on which layers cost the same, with what the first and the last one cost beside them."""
        beside = [0.0] * number
        beside[0] += first
        beside[-1] += last
        return StageCosts([layers] * number, beside)

    def of(self, stage: int, layers: range) -> float:
        """The cost of a stage with these layers."""
        return self.beside[stage] + sum(self.layers[stage][layer] for layer in layers)


@dataclass(frozen=True)
class StageMemory:
    """Bytes that stages hold, and that one may hold at the most."""

    costs: StageCosts
    limit: float


def crossing(skips: Collection[tuple[int, int]], cut: int) -> tuple[int, int] | None:
    """The first (from, to) that forbids to end a stage with layer `cut`: what layer `from` gives is used beyond the
    layer that follows it, and beyond the cut; or others use what it made and did not give. None if it can be the last
    one of its stage.

    Args:
        skips: see `Survey`; what comes from before the first layer forbids nothing.
    """
    found = [(i, j) for i, j in sorted(skips) if i >= 0 and (i < cut < j or (i == cut and j == i + 1))]
    return found[0] if found else None


def cut_stages(
    model: Cuttable,
    pp_size: int,
    chunks: int,
    counts: Sequence[int] | None,
    seconds: StageCosts | None = None,
    memory: StageMemory | None = None,
) -> tuple[range, ...]:
    """The layers of each of pp_size x chunks stages.

    Args:
        model: that is cut.
        counts: of layers, stage after stage; None: such that the stage that takes longest takes as short as can be,
            among the cuts whose every stage fits; where none does, such that the one that holds the most holds the
            least.
        seconds: that stages take; None: by the floating point operations of each layer and of the head.
        memory: that they take; None: anything fits.

    Raises:
        ExpertMeshError: there are too few layers, or the family's forward cannot be cut there.
    """
    number, num_layers = pp_size * chunks, model.num_layers
    flags = f"--pp-size {pp_size}" + (f" --pipeline-chunks {chunks}" if chunks > 1 else "")
    if number > num_layers:
        raise ExpertMeshError(
            f"{flags}: {number} stages need {number} decoder layers or more; {model.name} has "
            f"{num_layers}; use at most {num_layers // chunks} x {chunks}"
        )
    allowed = [cut for cut in range(num_layers - 1) if crossing(model.skips, cut) is None]
    if counts is not None:
        return _as_told(model, counts, number, flags)
    if len(allowed) < number - 1:
        i, j = next(skip for cut in range(num_layers - 1) if (skip := crossing(model.skips, cut)) is not None)
        raise ExpertMeshError(
            f"{flags}: {model.name} can have at most {len(allowed) + 1} stages: the output of layer "
            f"{i} is used {_where(j, num_layers)}, beyond the next layer"
        )
    if seconds is None:
        seconds = StageCosts.alike(number, model.flops[:-1], 0.0, model.flops[-1])
    return balanced_ranks(seconds, allowed, memory, pp_size)


def _as_told(model: Cuttable, counts: Sequence[int], number: int, flags: str) -> tuple[range, ...]:
    flag = f"--pipeline-layers {','.join(map(str, counts))}"
    if len(counts) != number or min(counts) < 1 or sum(counts) != model.num_layers:
        raise ExpertMeshError(
            f"{flag}: has {len(counts)} stages with {sum(counts)} layers; {flags} needs {number} stages of one layer "
            f"or more, with {model.num_layers} layers in all"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(number)]
    for end in ends[:-1]:
        if (skip := crossing(model.skips, end - 1)) is not None:
            raise ExpertMeshError(
                f"{flag}: no stage can end with layer {end - 1}: the output of layer {skip[0]} is used "
                f"{_where(skip[1], model.num_layers)}"
            )
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _where(place: int, num_layers: int) -> str:
    return "after the last layer" if place == num_layers else f"in layer {place}"


ROUNDS = 3
"""In which the stages of a rank are balanced against one another, at the most."""


def balanced_ranks(
    seconds: StageCosts, allowed: Sequence[int], memory: StageMemory | None, pp_size: int
) -> tuple[range, ...]:
    """As `balanced_stages`. With several stages per rank, of the cuts that are as good in that, one whose slowest rank
    takes less, if a few tries find it."""
    number = len(seconds.beside)
    best = balanced_stages(seconds, allowed, memory)
    for _ in range(ROUNDS if number > pp_size else 0):
        taken, ranks = _by_rank(seconds, best, pp_size)
        others = [ranks[stage % pp_size] - own for stage, own in enumerate(taken)]
        tried = balanced_stages(seconds, allowed, memory, others)
        if max(_by_rank(seconds, tried, pp_size)[1]) >= max(ranks) * (1 - 1e-9):
            break
        best = tried
    return best


def _by_rank(costs: StageCosts, stages: Sequence[range], pp_size: int) -> tuple[list[float], list[float]]:
    """What each stage costs, and what each rank's stages do."""
    taken = [costs.of(stage, layers) for stage, layers in enumerate(stages)]
    return taken, [sum(taken[rank::pp_size]) for rank in range(pp_size)]


def balanced_stages(
    seconds: StageCosts,
    allowed: Sequence[int],
    memory: StageMemory | None = None,
    others: Sequence[float] | None = None,
) -> tuple[range, ...]:
    """Stages with the least maximum of seconds, and of those the least sum of squares, among those whose every stage
    fits; where none does, the same of memory.

    Args:
        allowed: the layers that may be the last of a stage that is not the last. They are enough.
        others: seconds of each stage's rank in its other stages, which the squares are to include.
    """
    number, num_layers = len(seconds.beside), len(seconds.layers[0])
    ends = np.full(num_layers + 1, False)
    ends[[cut + 1 for cut in allowed]] = True

    def possible(costs: StageCosts) -> Callable[[int], Any]:
        return lambda stage: np.where(_may_end(ends, stage == number - 1), _by_ends(costs, stage), np.inf)

    in_time = possible(seconds)
    if memory is None:
        found = _least_maximum(in_time, number, others)
    else:
        held, limit = possible(memory.costs), memory.limit
        found = _least_maximum(lambda stage: np.where(held(stage) <= limit, in_time(stage), np.inf), number, others)
        found = found or _least_maximum(held, number)
    assert found is not None, "there are as many stages as can be"
    return found


def _may_end(ends: Any, is_last: bool) -> Any:
    """By (start, end) whether a stage may have the layers between."""
    layers = np.arange(len(ends))
    may = (layers == len(ends) - 1) if is_last else ends & (layers < len(ends) - 1)
    return may & (layers[:, None] < layers)


def _by_ends(costs: StageCosts, stage: int) -> Any:
    """By (start, end) the cost of a stage with the layers between."""
    sums = np.array([*accumulate(costs.layers[stage], initial=0.0)])
    return costs.beside[stage] + sums - sums[:, None]


def _least_maximum(
    cost: Callable[[int], Any], number: int, others: Sequence[float] | None = None
) -> tuple[range, ...] | None:
    """The stages whose largest cost is least and, of these, whose squares have the least sum; None where all cost
    infinitely much.

    Args:
        cost: of a stage, by (start, end).
        others: what each stage costs more in the squares.
    """
    costs = [cost(stage) for stage in range(number)]
    largest, _ = _least(costs, np.maximum)
    if not np.isfinite(largest):
        return None
    # sums of the same layers differ by their roundings
    within = [np.where(each <= largest * (1 + 1e-9), each, np.inf) for each in costs]
    _, ends = _least([(each + more) ** 2 for each, more in zip(within, others or [0.0] * number, strict=True)], np.add)
    return tuple(range(start, end) for start, end in pairwise((0, *ends)))


def _least(costs: Sequence[Any], join: Callable[[Any, Any], Any]) -> tuple[float, list[int]]:
    """The least that all stages' costs joined can be, and where each stage ends then."""
    best = np.full(len(costs[0]), np.inf)
    best[0] = 0.0
    starts = []
    for cost in costs:
        joined = join(best[:, None], cost)
        starts.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    ends = [len(best) - 1]
    for start in reversed(starts[1:]):
        ends.append(int(start[ends[-1]]))
    return float(best[-1]), ends[::-1]
