"""What the report shows of a pipeline: when each rank computes what in a step."""

from collections.abc import Mapping
from typing import Any

from expertmesh.sharding.pipeline.schedule import ScheduleName, schedule_without_queue
from expertmesh.sharding.pipeline.timeline import bubble, timeline_of_equal_stages

MOST_ACTIONS = 4_000
"""That are drawn, of all ranks together."""


def schedule_picture(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schedule of a step with stages that take equally long, backward twice as long as forward; None where there is
    no pipeline, or it is not known how many ranks there were.

    Returns:
        schedule: its name. bubble: the share of time in which ranks wait. micro_batches: of a step. shown: how many of
        them are drawn. seconds: of all, in units of a forward. ranks: of each pp index, [kind, stage, micro-batch,
        begin, end] of each action.
    """
    pp_size, chunks = _number(config, "pp_size"), _number(config, "pipeline_chunks")
    world_size = _number(environment, "ranks")
    if pp_size < 2 or world_size < pp_size:
        return None
    told = config.get("pipeline_schedule") or environment.get("pipeline_schedule")
    name: ScheduleName = told or schedule_without_queue(chunks)
    micro_batches = _micro_batches(config, world_size, pp_size)
    shown = max(1, min(micro_batches, MOST_ACTIONS // (3 * pp_size * chunks)))
    timeline = timeline_of_equal_stages(name, pp_size, chunks, shown)
    return {
        "schedule": name,
        "bubble": round(bubble(name, pp_size, chunks, micro_batches), 4),
        "micro_batches": micro_batches,
        "shown": shown,
        "seconds": timeline.seconds,
        "ranks": [
            [[span.action.kind, span.action.stage, span.action.micro_batch, span.start, span.end] for span in spans]
            for spans in timeline.ranks
        ],
    }


def _micro_batches(config: Mapping[str, Any], world_size: int, pp_size: int) -> int:
    """As `TrainConfig.micro_batches` has it, from what a file says."""
    if config.get("global_batch_size") is None:
        return _number(config, "gradient_accumulation_steps")
    readers = max(world_size // (pp_size * _number(config, "cp_size")), 1)
    each = readers * _number(config, "per_device_train_batch_size")
    return max(-(-_number(config, "global_batch_size") // each), 1)


def _number(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    return value if isinstance(value, int) and value > 0 else 1
