"""A pipeline's schedule in a setting, how long it takes, and what it sends."""

from collections.abc import Sequence
from functools import cache

from expertmesh.sharding.pipeline.schedule import Schedule, ScheduleName, make_schedule
from expertmesh.sharding.pipeline.timeline import Costs, Timetable
from expertmesh.training.foresight.planner.measured import MeasuredSpan
from expertmesh.training.foresight.planner.setting import Setting
from expertmesh.training.foresight.planner.step_order import Name, PlannedRun

STEADY = 3
"""After so many rounds, of as many micro-batches as there are pp indices, each takes as long as the one before."""


def schedule_of(setting: Setting, steady: bool = False) -> Schedule:
    """The schedule of a step; with `steady` one of a few rounds, that has all that the complete one has at once."""
    micro_batches = min(setting.accumulation, STEADY * setting.pp_size) if steady else setting.accumulation
    return make_schedule(setting.schedule, setting.pp_size, setting.chunks, micro_batches)


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
