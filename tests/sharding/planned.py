"""A tiny run as the planner sees it, the flags of a plan's launch line, and what torch's allocator really gave out."""

import shlex
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from torch.profiler import ProfilerActivity, profile

from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.step_order import PlannedRun
from expertmesh.training.planning.rehearsal.run_setting import planned
from tests.tiny import tiny_config

ODD_SIZES = {"hidden_size": 40, "intermediate_size": 24, "vocab_size": 331, "num_attention_heads": 4, "head_dim": 16}
"""None of which the ranks divide: FSDP pads."""


def flags_of(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = dict(per_device_train_batch_size=2, max_seq_length=32, learning_rate=1e-5)
    return TrainConfig(model="-", dataset=["-"], **{**settings, **changes})


def tiny_run(
    world_size: int,
    flags: dict[str, Any],
    sizes: dict[str, Any] | None = None,
    device: Literal["cuda", "cpu"] = "cpu",
    **changes: Any,
) -> PlannedRun:
    """A tiny Mixtral of these sizes with these flags, of which all tokens but each row's first have a loss."""
    return _tiny_run(world_size, tuple(flags.items()), tuple((sizes or {}).items()), device, tuple(changes.items()))


@cache
def _tiny_run(world_size: int, flags: Any, sizes: Any, device: Literal["cuda", "cpu"], changes: Any) -> PlannedRun:
    config = flags_of(**dict(flags))
    trained = {"trained": 1 - 1 / config.max_seq_length}
    return planned(
        config, tiny_config(**dict(sizes)), world_size, device, is_kept=False, **{**trained, **dict(changes)}
    )


def allocated(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """(what `work` returned, bytes it left allocated, the most it had allocated), of this thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return result, held, most


def launched(line: str) -> list[str]:
    """The flags of a plan's launch line."""
    return shlex.split(line.split("expertmesh.train_ep ")[1])
