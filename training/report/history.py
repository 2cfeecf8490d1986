"""What metrics.jsonl says, in bounded space however long the run was.

Shape suffixes: L MoE layers, E experts.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe import ExpertMeshError

MAX_POINTS = 1000
"""Points of a curve."""
MAX_CELLS = 200_000
"""Layers x experts x stretches of the expert load."""

CURVES = (
    "loss",
    "eval_loss",
    "eval_perplexity",
    "learning_rate",
    "grad_norm",
    "balance_loss",
    "z_loss",
    "tokens_per_second",
    "tflops_per_second",
    "mfu",
    "peak_memory_mb",
    "expert_load_max_over_mean",
    "dead_experts",
)

Record = dict[str, Any]


class Curve:
    """One figure over the steps it was logged at, with the lowest and highest of what it is the mean of."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.lows: list[float] = []
        self.highs: list[float] = []

    def add(self, step: int, value: float, low: float, high: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        self.lows.append(low)
        self.highs.append(high)

    def downsampled(self) -> Record:
        """At most MAX_POINTS points, each for the same number of logged values (the last one perhaps for fewer).

        Returns:
            `steps` (the last one of each point), `mean`, `per_point`; `low` and `high` where they differ from the mean.
        """
        per_point = max(math.ceil(len(self.steps) / MAX_POINTS), 1)
        starts = np.arange(0, len(self.steps), per_point)
        ends = np.append(starts[1:], len(self.steps))
        mean = np.add.reduceat(np.array(self.values), starts) / (ends - starts)
        low, high = np.minimum.reduceat(self.lows, starts), np.maximum.reduceat(self.highs, starts)
        curve: Record = {
            "steps": [self.steps[end - 1] for end in ends],
            "mean": _rounded(mean),
            "per_point": per_point,
        }
        if (low < high).any():
            curve |= {"low": _rounded(low), "high": _rounded(high)}
        return curve


@dataclass
class Stretch:
    """Consecutive logged steps: tokens of each expert and the routers' entropies, summed over them."""

    first_step: int
    last_step: int
    num_logged: int
    tokens_LE: np.ndarray
    entropy_L: np.ndarray

    def add(self, later: "Stretch") -> None:
        self.last_step = later.last_step
        self.num_logged += later.num_logged
        self.tokens_LE = self.tokens_LE + later.tokens_LE
        self.entropy_L = self.entropy_L + later.entropy_L


class ExpertLoad:
    """Tokens of each expert in a limited number of stretches of equally many logged steps (the last perhaps fewer).

    When the room is used up, neighbours are added together: from then on a stretch is twice as long.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.max_stretches = min(max(MAX_CELLS // (num_layers * num_experts), 8), 64) // 2 * 2
        self.per_stretch = 1
        self.stretches: list[Stretch] = []

    def add(self, logged: Stretch) -> None:
        if self.stretches and self.stretches[-1].num_logged < self.per_stretch:
            self.stretches[-1].add(logged)
            return
        if len(self.stretches) == self.max_stretches:
            for even, odd in zip(self.stretches[::2], self.stretches[1::2], strict=True):
                even.add(odd)
            del self.stretches[1::2]
            self.per_stretch *= 2
        self.stretches.append(logged)

    def summary(self) -> Record:
        """What the page shows of it.

        Returns:
            `per_stretch`, the logged steps of each; their `first_steps` and `last_steps`; `load`, by stretch, layer and
            expert, in hundredths of the even share of 1/E (0 only for no token at all); `entropy`, by stretch and
            layer, mean of the logged steps in nats, None where absent.
        """
        return {
            "per_stretch": self.per_stretch,
            "first_steps": [s.first_step for s in self.stretches],
            "last_steps": [s.last_step for s in self.stretches],
            "load": [_hundredths(s.tokens_LE).tolist() for s in self.stretches],
            "entropy": [[_short(h) for h in s.entropy_L / s.num_logged] for s in self.stretches],
        }


class History:
    """A run so far. Every figure may be absent: older files have fewer."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.load: ExpertLoad | None = None
        self.generations: list[Record] = []
        self.adapter_norms: list[list[float]] = []
        self.last_step = 0
        self.epoch, self.epoch_step = 0.0, 0
        self.tokens = 0
        self.dropped_tokens: int | None = None
        self.skipped_steps = 0
        self.warnings: list[Record] = []
        self.num_starts = 1
        self.unreadable_lines = 0
        self._seconds_before = 0.0
        self._seconds = 0.0

    @property
    def wall_seconds(self) -> float:
        """Up to each start's last logged step, over all starts that the file has steps of."""
        return self._seconds_before + self._seconds

    def add(self, record: Record) -> None:
        """Take in a line of the file: of training, evaluation, generations, or a warning."""
        step = record["step"]
        self.last_step = max(self.last_step, step)
        for name in CURVES:
            if (value := _number(record.get(name))) is not None:
                self._add_point(name, step, value, value, value)
        entropy_L = np.array(record["router_entropy"], float) if record.get("router_entropy") else None
        # null is that of a layer whose router gives no scores
        known = entropy_L[~np.isnan(entropy_L)] if entropy_L is not None else np.empty(0)
        if len(known) and np.isfinite(known).all():
            self._add_point("router_entropy", step, known.mean(), known.min(), known.max())
        if record.get("expert_tokens"):
            self._add_load(step, np.array(record["expert_tokens"], np.int64), entropy_L)
        if record.get("adapter_norms"):
            self.adapter_norms = np.array(record["adapter_norms"], float).tolist()
        if "generations" in record:
            self.generations.append({"step": step, "samples": record["generations"]})
        if record.get("dropped_tokens") is not None:
            self.dropped_tokens = (self.dropped_tokens or 0) + record["dropped_tokens"]
        if "warning" in record:
            self.warnings.append({"step": step, "text": record["warning"]})
        self.skipped_steps += record.get("skipped_steps", 0)
        self.tokens += record.get("tokens", 0)
        if "epoch" in record:
            self.epoch, self.epoch_step = record["epoch"], step
        self._add_seconds(record.get("seconds", self._seconds))

    def _add_point(self, name: str, step: int, value: float, low: float, high: float) -> None:
        self.curves.setdefault(name, Curve()).add(step, value, low, high)

    def _add_load(self, step: int, tokens_LE: np.ndarray, entropy_L: np.ndarray | None) -> None:
        if self.load is None:
            self.load = ExpertLoad(*tokens_LE.shape)
        if entropy_L is None:
            entropy_L = np.full(len(tokens_LE), np.nan)
        self.load.add(Stretch(step, step, 1, tokens_LE, entropy_L))

    def _add_seconds(self, seconds: float) -> None:
        if seconds < self._seconds:  # the clock of a start begins at 0
            self.num_starts += 1
            self._seconds_before += self._seconds
        self._seconds = seconds


def read_history(metrics: Path) -> History:
    """Read metrics.jsonl, line by line. Lines that are no record (a killed run may cut its last one off) are counted.

    Raises:
        ExpertMeshError: the file is not there, or cannot be read.
    """
    history = History()
    for record in _records(metrics):
        if record is None:
            history.unreadable_lines += 1
        else:
            history.add(record)
    return history


def read_record(line: str | bytes) -> Record | None:
    """A line of metrics.jsonl; None where it is no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _records(metrics: Path) -> Iterator[Record | None]:
    try:
        with metrics.open(encoding="utf-8", errors="replace") as lines:
            yield from map(read_record, lines)
    except OSError as error:
        raise ExpertMeshError(
            f"{metrics}: cannot be read: {error.strerror}; give the directory that --output-dir of a run named"
        ) from error


def _hundredths(tokens_LE: np.ndarray) -> np.ndarray:
    total_L1 = np.maximum(tokens_LE.sum(axis=1, keepdims=True), 1)
    rounded_LE = np.rint(tokens_LE * (100 * tokens_LE.shape[1] / total_L1)).astype(np.int64)
    return np.where(tokens_LE > 0, np.maximum(rounded_LE, 1), 0)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _short(value: float) -> float | None:
    """Six digits: more than a page can show, in half the bytes. None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _rounded(values: np.ndarray) -> list[float | None]:
    return [_short(value) for value in values.tolist()]
