"""Which decoder layers each stage of a pipeline has. Pure arithmetic: no torch."""

from collections.abc import Collection, Sequence
from typing import Protocol

from expertmesh.moe import ExpertMeshError


class Cuttable(Protocol):
    """What is known of a model that is to be cut into stages.

    Attributes:
        name: of its class.
        num_layers: decoder layers.
        flops: of a token's forward in each layer, then after the last.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def flops(self) -> Sequence[float]: ...

    def uncuttable(self, cut: int) -> tuple[int, int] | None:
        """The (from, to) that forbids to end a stage with layer `cut` (see `crossing`)."""
        ...


def crossing(skips: Collection[tuple[int, int]], cut: int) -> tuple[int, int] | None:
    """The first (from, to) that forbids to end a stage with layer `cut`: what layer `from` gives is used beyond the
    layer that follows it, and beyond the cut. None if it can be the last one of its stage.

    Args:
        skips: see `Survey`; what comes from before the first layer forbids nothing.
    """
    found = [(i, j) for i, j in sorted(skips) if 0 <= i < cut < j]
    return found[0] if found else None


def cut_stages(model: Cuttable, pp_size: int, chunks: int, counts: Sequence[int] | None) -> tuple[range, ...]:
    """The layers of each of pp_size x chunks stages.

    Args:
        model: that is cut.
        counts: of layers, stage after stage; None: such that the stage that takes longest takes as short as can be, by
            the floating point operations of each layer and of the head.

    Raises:
        ExpertMeshError: there are too few layers, or the family's forward cannot be cut there.
    """
    number, num_layers = pp_size * chunks, model.num_layers
    flags = f"--pp-size {pp_size}" + (f" --pipeline-chunks {chunks}" if chunks > 1 else "")
    if number > num_layers:
        raise ExpertMeshError(
            f"{flags}: {number} stages need as many decoder layers, and {model.name} has {num_layers}; use "
            f"at most {num_layers // chunks} x {chunks}"
        )
    allowed = [cut for cut in range(num_layers - 1) if model.uncuttable(cut) is None]
    if counts is not None:
        return _as_told(model, counts, number, flags)
    if len(allowed) < number - 1:
        i, j = next(skip for cut in range(num_layers - 1) if (skip := model.uncuttable(cut)) is not None)
        raise ExpertMeshError(
            f"{flags}: {model.name} can be cut into {len(allowed) + 1} stages at most: what layer {i} gives "
            f"is used {_where(j, num_layers)}, beyond the layer that follows it"
        )
    return _balanced(model.flops, allowed, number)


def _as_told(model: Cuttable, counts: Sequence[int], number: int, flags: str) -> tuple[range, ...]:
    flag = f"--pipeline-layers {','.join(map(str, counts))}"
    if len(counts) != number or min(counts) < 1 or sum(counts) != model.num_layers:
        raise ExpertMeshError(
            f"{flag}: has {len(counts)} stages with {sum(counts)} layers; {flags} needs {number} stages of one layer "
            f"or more, with {model.num_layers} layers in all"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(number)]
    for end in ends[:-1]:
        if (skip := model.uncuttable(end - 1)) is not None:
            raise ExpertMeshError(
                f"{flag}: no stage can end with layer {end - 1}: what layer {skip[0]} gives is used "
                f"{_where(skip[1], model.num_layers)}"
            )
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _where(place: int, num_layers: int) -> str:
    return "after the last layer" if place == num_layers else f"in layer {place}"


def _balanced(costs: Sequence[float], allowed: Sequence[int], number: int) -> tuple[range, ...]:
    """Stages with the least maximum of their costs.

    Args:
        costs: of each layer, then of what comes after the last.
        allowed: the layers that may be the last of a stage that is not the last.
        number: of stages.
    """
    num_layers = len(costs) - 1
    sums = [0.0]
    for layer in range(num_layers):
        sums.append(sums[-1] + costs[layer])
    ends = [*(cut + 1 for cut in allowed), num_layers]
    # best[end] = (largest cost, then the sum of squares, cuts) of the first stages, which end there
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(number):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, cuts) in best.items():
            for end in ends:
                if end <= start or (end == num_layers) != (stage == number - 1):
                    continue
                cost = sums[end] - sums[start] + (costs[-1] if end == num_layers else 0.0)
                found = (max(largest, cost), squares + cost * cost, (*cuts, end))
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    _, _, cuts = best[num_layers]
    return tuple(range(start, end) for start, end in zip((0, *cuts), cuts, strict=False))
