"""What torch's flight recorder knows of this process's collectives.

It keeps the latest ones, over gloo as over NCCL, once TORCH_FR_BUFFER_SIZE is set: `start_process_group` sets it.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from ...moe.torch_private import FLIGHT_RECORDERS, _distributed_c10d
from ..collectives.groups import group_name


@dataclass(frozen=True)
class Collective:
    """name: such as all_to_all. group: see `group_name`; or the group's number. sizes, dtypes: of the
    inputs. began: seconds ago. state: scheduled, started or completed; empty over gloo, which does not update it."""

    name: str
    group: str
    sizes: list[list[int]]
    dtypes: list[str]
    began: float
    state: str

    def __str__(self) -> str:
        what = ", ".join(f"{dtype} {size}" for size, dtype in zip(self.sizes, self.dtypes, strict=False))
        state = f", {self.state}" if self.state else ""
        return f"{self.name} over {self.group} of {what or 'nothing'}, called {self.began:.1f} s ago{state}"


def recorded_collectives() -> list[Collective]:
    """The latest collectives, oldest first; none where nothing is recorded."""
    now = time.time_ns()
    entries: list[dict[str, Any]] = []
    for dump in FLIGHT_RECORDERS:
        if hasattr(_distributed_c10d, dump):
            entries += json.loads(getattr(_distributed_c10d, dump)()).get("entries", [])
    return [_collective(entry, now) for entry in sorted(entries, key=lambda e: int(e["time_created_ns"]))]


def _collective(entry: dict[str, Any], now: int) -> Collective:
    number, description = entry["process_group"]
    backend, _, name = entry["profiling_name"].partition(":")
    return Collective(
        name,
        group_name(description) or f"group {number}",
        entry["input_sizes"],
        entry["input_dtypes"],
        (now - int(entry["time_created_ns"])) / 1e9,
        "" if backend == "gloo" else entry["state"],
    )
