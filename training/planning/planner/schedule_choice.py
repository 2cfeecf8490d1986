"""The schedule of a pipeline for which none was asked: the fastest by forecast of those that fit, each with its layers
distributed over its stages."""

from dataclasses import replace

from ....sharding.pipeline.schedule import ScheduleName, schedule_without_queue
from .pipelines import leaves_weights
from .search import Cluster, Plan
from .stage_costs import balanced
from .step_order import PlannedRun

LEAST_GAIN = 0.01
"""A smaller one is less than what a forecast leaves out."""


def choose_schedule(
    run: PlannedRun, cluster: Cluster, asked: ScheduleName | None = None, can_queue: bool = True
) -> tuple[Plan, str]:
    """Choose between the schedules that a run's chunks allow: zero-bubble, and the one without queued weight gradients.
    Zero-bubble is taken only where weight gradients can wait, and that gains time.

    Args:
        run: of any schedule, which may leave its stages open.
        cluster: with the memory that the rank which holds the most may take.
        asked: that is to be taken.
        can_queue: whether the expert kernel can leave weight gradients for later.

    Returns:
        The run with its schedule and stages, and why it has this schedule, in a few words.
    """

    def scheduled(name: ScheduleName) -> PlannedRun:
        return replace(run, setting=replace(run.setting, schedule=name))

    def planned(name: ScheduleName) -> Plan:
        found = balanced(scheduled(name), cluster.hardware, cluster.gpus_per_node, cluster.memory)
        return Plan(*found, cluster)

    without_queue = schedule_without_queue(run.setting.chunks)
    if asked is not None:
        return planned(asked), "as asked"
    if not can_queue or not leaves_weights(scheduled("zero-bubble")):
        return planned(without_queue), "no expert weight gradients can wait for zero-bubble"
    plain, queued = planned(without_queue), planned("zero-bubble")
    if not plain.fits and not queued.fits:
        return plain, "none fits by forecast, and this one needs the least memory"
    for best, other in ((plain, queued), (queued, plain)):
        if best.fits and not other.fits:
            name, size = other.setting.schedule, other.memory.total / 2**30
            return best, f"by forecast {name} would take {size:,.1f} GiB per rank"
    # a queue has to be worth it, where there is a choice
    gain = plain.time.total / queued.time.total - 1
    if plain.time.total > (1 + LEAST_GAIN) * queued.time.total:
        return queued, f"by forecast {gain:.1%} faster than {without_queue}"
    return plain, f"by forecast zero-bubble gains less than {LEAST_GAIN:.0%}"
