"""What `benchmarks.first_gpu` makes of what a step's commands have left: as expected or not, and in words."""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks import kept_tests
from benchmarks.experts import BOTH, CEILING, EXPERTS, LAYER

Read = Callable[[Path, str], tuple[bool, str]]
"""Of a directory and what was printed: whether it is as expected, and what it is, in words."""
Verdict = Literal["as expected", "not as expected", "failed", "stopped at its limit", "not finished"]

OF_ALL_EXPERTS = (0.66, 1.1)
"""The least of all experts of a model: share of the dense ceiling, and speed over transformers' grouped_mm."""
OF_ONE_EXPERT = (0.8, 1.1)
MOST_MEMORY_ERROR = 0.03
OF_FORECAST_SPEED = (0.85, 1.15)
"""The least and the most of the speed that was forecast for the very same step: a step that is faster shows, too, that
the forecast is wrong."""


def judged(read: Read, directory: Path, output: str, codes: Sequence[int | None]) -> tuple[Verdict, str]:
    """Of a step whose parts ended with these codes."""
    try:
        is_right, found = read(directory, output)
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        is_right, found = False, f"nothing to read ({type(error).__name__}: {error})"
    if is_right and any(codes):
        return "failed", f"exit codes {list(codes)}; {found}"
    return ("as expected" if is_right else "not as expected"), found


def nothing_missing(directory: Path, output: str) -> tuple[bool, str]:
    found = _figures(directory, "preflight")
    missing = [f"{name}: {said}" for name, said in found.items() if said]
    return bool(found) and not missing, "; ".join(missing) or f"{', '.join(found)} work"


def passed(name: str) -> Read:
    """Of tests, whose results `benchmarks.kept_tests` has kept."""

    def read(directory: Path, output: str) -> tuple[bool, str]:
        results = kept_tests.read(directory / f"{name}.jsonl")
        counts = Counter(each["outcome"] for each in results)
        failed = [each["id"].rpartition("::")[2] for each in results if each["outcome"] == "failed"]
        which = f": {', '.join(failed[:8])}{' ...' * (len(failed) > 8)}" if failed else ""
        words = f"{counts['passed']} passed, {len(failed)} failed, {counts['skipped']} skipped{which}"
        return not failed and counts["passed"] > 0, words

    return read


def steps_found(*names: str) -> Read:
    """Of `benchmarks.gpu_step`, by the names of its files: speed and memory against its forecasts, on that GPU; and
    that the losses are finite. A CPU's speed is not judged."""

    def read(directory: Path, output: str) -> tuple[bool, str]:
        is_right, lines = True, []
        for name in names:
            found = _figures(directory, name)
            memory = found["peak_bytes"] / found["forecast_bytes"]
            line = f"{found['setting']}: {found['tokens_per_second']:,.0f} tokens/s"
            if found["forecast_seconds"] is not None:
                least, most = OF_FORECAST_SPEED
                speed = found["forecast_seconds"] / statistics.median(found["seconds"])
                waits = sum(found["waits"].values())
                is_right &= least <= speed <= most and abs(memory - 1) <= MOST_MEMORY_ERROR
                is_right &= waits <= 1 + found["micro_batches"] * found["moe_layers"]
                line += f", {speed:.2f} of the forecast speed"
                if found["mfu"] is not None:
                    line += f", MFU {found['mfu']:.1%} (forecast {found['forecast_mfu']:.1%})"
                idle = found["idle_share"]
                line += f", {waits} waits" if idle is None else f", idle {idle:.1%}, {waits} waits"
            if found["too_large"]:
                is_right, line = False, f"{line}; {found['too_large']} layers did not fit, against the forecast"
            # a dry run has none
            is_right &= all(map(math.isfinite, found["losses"])) and bool(found["losses"] or found["is_dry"])
            lines.append(f"{line}, peak memory {memory:.3f} of the forecast")
        return is_right, "; ".join(lines)

    return read


def kernels_found(least: Mapping[str, tuple[float, float]]) -> Read:
    """Of `benchmarks.experts`, by the names of its files: of the kernel that `auto` takes, forward and backward, its
    share of the dense ceiling, as experts alone, and its speed over transformers' grouped_mm, as a layer."""

    def read(directory: Path, output: str) -> tuple[bool, str]:
        is_right, lines = True, []
        for name, (least_share, least_gain) in least.items():
            found = _figures(directory, name)
            ms = {
                (result["part"], result["variant"]): result["median_ms"]
                for result in found["results"]
                if result["passes"] == BOTH
            }
            (auto,) = found["auto"].values()
            share = ms[EXPERTS, CEILING] / ms[EXPERTS, auto]
            gain = ms[LAYER, "HF grouped_mm"] / ms[LAYER, auto]
            is_right &= share >= least_share and gain >= least_gain
            lines.append(f"{name}: {auto} {share:.2f} of the ceiling, {gain:.2f} x grouped_mm")
        return is_right, "; ".join(lines)

    return read


def whole_steps(judges_speed: bool) -> Read:
    """Of `benchmarks.throughput`: that it has not been aborted, as where losses differ, and the variants' seconds a
    step."""

    def read(directory: Path, output: str) -> tuple[bool, str]:
        found = _figures(directory, "throughput")
        theirs, ours = (
            statistics.median(seconds for figures in rounds for seconds in figures["seconds"])
            for rounds in found["results"].values()
        )
        is_right = not found["aborted"] and (ours <= theirs or not judges_speed)
        return is_right, f"{theirs / ours:.2f} x the speed of transformers; aborted: {found['aborted'] or 'no'}"

    return read


def no_errors(directory: Path, output: str) -> tuple[bool, str]:
    """Of compute-sanitizer."""
    summaries = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    if not summaries:
        return "not here" in output, "compute-sanitizer is not here" if "not here" in output else "no summary"
    return not any(map(int, summaries)), f"{', '.join(summaries)} errors"


def _figures(directory: Path, name: str) -> Any:
    return json.loads((directory / f"{name}.json").read_text())
