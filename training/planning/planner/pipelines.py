"""A pipeline's schedule in a setting, how long it takes, and what it sends."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ....sharding.pipeline.schedule import Kind, ScheduleName, make_schedule
from ....sharding.pipeline.timeline import Costs, Timetable
from .measured import MeasuredSpan
from .setting import Setting
from .step_order import Name, PlannedRun

STEADY = 3
"""After so many rounds, of as many micro-batches as there are pp indices, each takes as long as the one before."""


def pipeline_seconds(setting: Setting, costs: Sequence[Costs]) -> list[float]:
    """Seconds from the first forward of a step to the last backward, with each of the costs.

    Of many rounds of micro-batches the later ones are alike: so many are left out, and added as often as there are.
    """
    pp_size, accumulation = setting.pp_size, setting.accumulation
    few = STEADY * pp_size + accumulation % pp_size
    name, chunks = setting.schedule, setting.chunks
    if accumulation <= few + pp_size:
        return _timetable(name, pp_size, chunks, accumulation).seconds(costs)
    first, second = (_timetable(name, pp_size, chunks, number).seconds(costs) for number in (few, few + pp_size))
    rounds = (accumulation - few) // pp_size
    return [once + rounds * (more - once) for once, more in zip(first, second, strict=True)]


@cache
def _timetable(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> Timetable:
    return Timetable(make_schedule(name, pp_size, chunks, micro_batches))


def beside_actions(setting: Setting) -> list[dict[tuple[Kind, int], Any]]:
    """What there is of other micro-batches while a rank computes one.

    Returns:
        For each pp index, and there for each kind of action and stage, (moments, 2 * chunks): of each of the rank's
        stages how many micro-batches are in flight, and of how many the weight gradients wait. Moments that are alike
        count once.
    """
    return _beside_actions(*_steady(setting))


@cache
def _beside_actions(
    name: ScheduleName, pp_size: int, chunks: int, micro_batches: int
) -> list[dict[tuple[Kind, int], Any]]:
    is_split = name == "zero-bubble"
    ranks = []
    for actions in make_schedule(name, pp_size, chunks, micro_batches):
        found: dict[tuple[Kind, int], set[tuple[int, ...]]] = defaultdict(set)
        now = [0] * (2 * chunks)
        for action in actions:
            in_flight, waiting = action.stage // pp_size, chunks + action.stage // pp_size
            now[in_flight] -= action.kind == "backward"
            now[waiting] -= action.kind == "weights"
            found[action.kind, action.stage].add(tuple(now))
            now[in_flight] += action.kind == "forward"
            now[waiting] += action.kind == "backward" and is_split
        ranks.append({key: np.array(sorted(counts)) for key, counts in found.items()})
    return ranks


def held_by_stages(setting: Setting) -> list[list[tuple[int, int]]]:
    """Of each stage, how many micro-batches are in flight, and of how many the weight gradients wait, at any moment."""
    return _held_by_stages(*_steady(setting))


@cache
def _held_by_stages(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> list[list[tuple[int, int]]]:
    is_split = name == "zero-bubble"
    found: list[set[tuple[int, int]]] = [set() for _ in range(pp_size * chunks)]
    for actions in make_schedule(name, pp_size, chunks, micro_batches):
        now = dict.fromkeys((action.stage for action in actions), (0, 0))
        for action in actions:
            in_flight, waiting = now[action.stage]
            in_flight += {"forward": 1, "backward": -1, "weights": 0}[action.kind]
            waiting += is_split * {"forward": 0, "backward": 1, "weights": -1}[action.kind]
            now[action.stage] = in_flight, waiting
            found[action.stage].add((in_flight, waiting))
    return [sorted(moments) for moments in found]


def _steady(setting: Setting) -> tuple[ScheduleName, int, int, int]:
    """A schedule of a few rounds, that has all that the complete one has at once."""
    micro_batches = min(setting.accumulation, STEADY * setting.pp_size)
    return setting.schedule, setting.pp_size, setting.chunks, micro_batches


def queued_bytes(run: PlannedRun, layer: int) -> float:
    """Bytes of what the experts' weight gradients of a layer are computed of, where that is left for later: the inputs
    and outputs of their matmuls."""
    if not leaves_weights(run):
        return 0.0
    kernels = (kernel for span in expert_spans(run, layer) for kernel in span.kernels)
    moved = sum(times * moved for flops, moved, _, times in kernels if flops > 0)
    experts = run.units.get(Name("experts", layer))
    return max(0.0, moved - (0 if experts is None else experts.gathered))


def leaves_weights(run: PlannedRun) -> bool:
    """Whether the experts' weight gradients are computed later than the other ones."""
    trained = [parameter.is_trained for kind in run.model.kinds for parameter in kind.experts]
    return run.setting.schedule == "zero-bubble" and all(trained)


def expert_spans(run: PlannedRun, layer: int) -> list[MeasuredSpan]:
    """The forward of a layer's experts."""
    return [span for span in run.measured.kinds[run.model.layers[layer]].forward if span.mark == "use experts"]
