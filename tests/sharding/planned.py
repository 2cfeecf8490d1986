"""A tiny run as the planner sees it, and what torch's allocator really gave out."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from sharding.planner.setting import Setting
from sharding.planner.shapes import ModelShape, shape_of_config
from tests.tiny import tiny_config

ODD_SIZES = {"hidden_size": 40, "intermediate_size": 24, "vocab_size": 331, "num_attention_heads": 4, "head_dim": 16}
"""None of which the ranks divide: FSDP2 pads."""


def model_shape(**changes: Any) -> ModelShape:
    return shape_of_config(tiny_config(**changes), "tiny")


def cpu_setting(world_size: int, ep_size: int, **changes: Any) -> Setting:
    settings: dict[str, Any] = dict(micro_batch=2, seq_length=32, bf16=False, expert_kernel="loop", device="cpu")
    return Setting(world_size, ep_size, **{**settings, **changes})


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
