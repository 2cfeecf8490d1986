"""The schedule of a pipeline for which none was asked: the fastest by forecast of those that fit, each with its layers
distributed over its stages."""

from dataclasses import dataclass, replace

from ....sharding.pipeline.schedule import ScheduleName, schedule_without_queue
from .cost import step_time
from .peak_memory import Peak
from .pipelines import leaves_weights
from .search import Cluster
from .stage_costs import balanced
from .step_order import PlannedRun

LEAST_GAIN = 0.01
"""A smaller one is less than what a forecast leaves out."""


@dataclass(frozen=True)
class Chosen:
    """run: with its schedule and stages. peak: its memory. why: in a few words, this schedule."""

    run: PlannedRun
    peak: Peak
    why: str


def choose_schedule(
    run: PlannedRun, cluster: Cluster, asked: ScheduleName | None = None, can_queue: bool = True
) -> Chosen:
    """Choose between the schedules that a run's chunks allow: zero-bubble, and the one without queued weight gradients.
    Zero-bubble is taken only where weight gradients can wait, and that gains time.

    Args:
        run: of any schedule, which may leave its stages open.
        cluster: with the memory that the rank which holds the most may take.
        asked: that is to be taken.
        can_queue: whether the expert kernel can leave weight gradients for later.
    """
    if asked is not None:
        return Chosen(*_balanced(_scheduled(run, asked), cluster), "as asked")
    plain = _scheduled(run, schedule_without_queue(run.setting.chunks))
    queued = _scheduled(run, "zero-bubble")
    if not can_queue or not leaves_weights(queued):
        return Chosen(*_balanced(plain, cluster), "no expert weight gradients can wait for zero-bubble")
    both = [_Candidate.of(each, cluster) for each in (plain, queued)]
    fitting = [each for each in both if each.peak.memory.total <= cluster.memory]
    if not fitting:
        return Chosen(both[0].run, both[0].peak, "none fits by forecast, and this one holds the least")
    # a queue has to be worth it, where there is a choice
    takes_queue = both[0] not in fitting or (
        both[1] in fitting and both[0].seconds > (1 + LEAST_GAIN) * both[1].seconds
    )
    best, other = reversed(both) if takes_queue else both
    return Chosen(best.run, best.peak, _why(best, other, other in fitting))


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A run, its memory, and the seconds of its step."""

    run: PlannedRun
    peak: Peak
    seconds: float

    @staticmethod
    def of(run: PlannedRun, cluster: Cluster) -> "_Candidate":
        run, held = _balanced(run, cluster)
        return _Candidate(run, held, step_time(run, cluster.hardware, cluster.gpus_per_node).total)


def _balanced(run: PlannedRun, cluster: Cluster) -> tuple[PlannedRun, Peak]:
    return balanced(run, cluster.hardware, cluster.gpus_per_node, cluster.memory)


def _scheduled(run: PlannedRun, schedule: ScheduleName) -> PlannedRun:
    return replace(run, setting=replace(run.setting, schedule=schedule))


def _why(best: _Candidate, other: _Candidate, other_fits: bool) -> str:
    """Why a schedule was preferred to the other one."""
    name = other.run.setting.schedule
    if not other_fits:
        return f"by forecast {name} would take {other.peak.memory.total / 2**30:,.1f} GiB per rank"
    if name == "zero-bubble":
        return f"by forecast zero-bubble gains less than {LEAST_GAIN:.0%}"
    return f"by forecast {other.seconds / best.seconds - 1:.1%} faster than {name}"
