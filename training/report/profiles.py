"""What `--profile` has left in OUTPUT_DIR/profile: a file per rank and stretch of steps, with what each part took."""

import json
import math
from pathlib import Path
from typing import Any

PROFILES = "profile"
FIGURES = ("seconds", "calls", "allocated_bytes")
"""Of a part, over all profiled steps."""
BETWEEN = "between operators"
"""The part that is no operator's."""
EXCHANGE = ("dispatch", "FSDP", "pipeline")
"""The parts in which ranks exchange tokens, parameters and gradients, and wait for one another."""

MAX_PROFILES = 64
"""Profiles that are shown: the first ranks of each stretch of steps."""
MAX_PARTS = 64
_MAX_BYTES = 2**16

Profile = dict[str, Any]


def read_profiles(output_dir: Path) -> tuple[list[Profile], int]:
    """The profiles of a run, by steps and then ranks, and how many more there are than may be shown.

    Returns:
        Of each `rank`, `steps` (their numbers), `device`, `wall_seconds`, and `parts`: by name FIGURES. What is no
        profile, or was damaged, is passed over.
    """
    found = [profile for file in (output_dir / PROFILES).glob("rank-*.json") if (profile := _read(file)) is not None]
    found.sort(key=lambda profile: (profile["steps"], profile["rank"]))
    return found[:MAX_PROFILES], max(0, len(found) - MAX_PROFILES)


def _read(file: Path) -> Profile | None:
    try:
        if file.stat().st_size > _MAX_BYTES:
            return None
        record = json.loads(file.read_text(encoding="utf-8"))
        parts = {
            str(name): {figure: float(figures[figure]) for figure in FIGURES}
            for name, figures in list(record["parts"].items())[:MAX_PARTS]
        }
        steps, wall = [int(step) for step in record["steps"]], float(record["wall_seconds"])
        known = {"rank": int(record["rank"]), "steps": steps, "device": str(record["device"]), "wall_seconds": wall}
        sizes = [wall, *(value for figures in parts.values() for value in figures.values())]
        are_sizes = all(0 <= size < math.inf for size in sizes)
        return {**known, "parts": parts} if steps and parts and are_sizes else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
