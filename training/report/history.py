"""What metrics.jsonl says, in bounded space however long the run was.

Shape suffixes: L MoE layers, E experts.
"""

import json
import math
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...moe.util.errors import ExpertMeshError
from ..metrics import METRICS

MAX_POINTS = 1000
"""Points of a curve."""
MAX_CELLS = 200_000
"""Layers x experts x stretches of the expert load."""
MAX_GENERATIONS = 20
"""Logged steps whose generations are shown, evenly spread from the first to the last."""
MAX_SAMPLES = 16
"""Generations of a logged step that are shown."""
MAX_TEXT = 4000
"""Characters of a prompt or generation that are shown."""
MAX_WARNINGS = 50
"""Warnings that are shown, the latest."""
MAX_MARKS = 200
"""Saves, and resumes, that curves are marked with, evenly spread."""
MAX_OTHERS = 50
"""Figures that METRICS do not have, as those that another script has registered, of which there are curves."""

Record = dict[str, Any]


@dataclass
class Stretch:
    """Consecutive logged values: their steps, their sum (a number or an array), how many, and the lowest and highest of
    what they are means of."""

    first_step: int
    last_step: int
    total: Any
    low: float = 0.0
    high: float = 0.0
    count: int = 1

    def add(self, later: "Stretch") -> None:
        self.last_step = later.last_step
        self.total = self.total + later.total
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.count += later.count

    @property
    def mean(self) -> Any:
        return self.total / self.count


class Stretches:
    """Logged values in at most `limit` stretches, an even number, of equally many each (the last perhaps fewer).

    When the limit is reached, neighbours are added together: from then on a stretch is twice as long.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.length = 1
        self.items: list[Stretch] = []

    def add(self, logged: Stretch) -> None:
        """Take in a value, which may be added to by later ones."""
        if self.items and self.items[-1].count < self.length:
            self.items[-1].add(logged)
            return
        if len(self.items) == self.limit:
            for even, odd in zip(self.items[::2], self.items[1::2], strict=True):
                even.add(odd)
            del self.items[1::2]
            self.length *= 2
        self.items.append(logged)


class Curve(Stretches):
    """One figure over the steps it was logged at, in at most MAX_POINTS points.

    Attributes:
        last, lowest, lowest_step: the latest value; the lowest, and the first step that had it.
    """

    def __init__(self) -> None:
        super().__init__(MAX_POINTS)
        self.last = self.lowest = math.inf
        self.lowest_step = 0

    def add(self, logged: Stretch) -> None:
        self.last = logged.mean
        if self.last < self.lowest:
            self.lowest, self.lowest_step = self.last, logged.last_step
        super().add(logged)

    def median(self) -> float:
        """Returns the median of the points."""
        return float(np.median([point.mean for point in self.items]))

    def highest(self) -> float:
        return max(point.high for point in self.items)

    def summary(self) -> Record:
        """What the page shows of it.

        Returns:
            `steps` (the last one of each point), `mean`, `per_point` (logged values, of the last point perhaps fewer);
            `low` and `high` where they differ from the mean.
        """
        curve: Record = {
            "steps": [point.last_step for point in self.items],
            "mean": [_short(point.mean) for point in self.items],
            "per_point": self.length,
        }
        if any(point.low < point.high for point in self.items):
            curve["low"] = [_short(point.low) for point in self.items]
            curve["high"] = [_short(point.high) for point in self.items]
        return curve


class ExpertLoad(Stretches):
    """Of each layer the tokens of each expert and, last, the router's entropy, in at most MAX_CELLS."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(min(max(MAX_CELLS // (num_layers * num_experts), 8), 64) // 2 * 2)
        self.num_experts = num_experts

    def summary(self) -> Record:
        """What the page shows of it.

        Returns:
            `per_stretch`, the logged steps of each; their `first_steps` and `last_steps`; `load`, by stretch, layer and
            expert, in hundredths of the even share of 1/E (0 only for no token at all); `entropy`, by stretch and
            layer, mean of the logged steps in nats, None where absent.
        """
        return {
            "per_stretch": self.length,
            "first_steps": [s.first_step for s in self.items],
            "last_steps": [s.last_step for s in self.items],
            "load": [_hundredths(s.total[:, :-1]).tolist() for s in self.items],
            "entropy": [[_short(h) for h in s.mean[:, -1]] for s in self.items],
        }


class Spread:
    """Every n-th of what is added, the first included, and the last: at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._every, self._number = 1, 0
        self._kept: list[Any] = []
        self._last: Any = None

    def add(self, item: Any) -> None:
        if self._number % self._every == 0:
            self._kept.append(item)
        self._last = item
        self._number += 1
        if len(self._kept) == self.limit:
            del self._kept[1::2]
            self._every *= 2

    def items(self) -> list[Any]:
        is_last_kept = not self._kept or (self._number - 1) % self._every == 0
        return self._kept if is_last_kept else [*self._kept, self._last]


@dataclass
class Seconds:
    """Where wall time was spent, as the host's clock of the main process has it.

    number: of steps. steps: training, waiting for data included; data: that alone, on the rank that waits longest. The
    others are pauses between steps.
    """

    number: int = 0
    steps: float = 0.0
    data: float = 0.0
    evaluations: float = 0.0
    generations: float = 0.0
    saves: float = 0.0

    def add(self, record: Record) -> None:
        """Take in a line of the file."""
        if (step_seconds := _number(record.get("step_seconds"))) is not None:
            number = int(_number(record.get("steps")) or 0)
            self.number += number
            self.steps += number * step_seconds
            self.data += number * (_number(record.get("data_seconds")) or 0.0)
        self.evaluations += _number(record.get("eval_seconds")) or 0.0
        self.generations += _number(record.get("generate_seconds")) or 0.0
        self.saves += _number(record.get("save_seconds")) or 0.0


class Generations:
    """The first and the latest sample generations, and of those between them some, evenly spread.

    Attributes:
        number: how many were logged.
    """

    def __init__(self) -> None:
        self.number = 0
        self._every = 1
        self._kept: dict[int, Record] = {}

    def add(self, step: int, samples: list[dict[str, str]]) -> None:
        """Take in what was generated at a step, of which MAX_SAMPLES are kept, each cut to MAX_TEXT."""
        if (self.number - 1) % self._every:
            del self._kept[self.number - 1]  # was only there as the latest
        names = ("prompt", "text", "reference")
        shown = [{name: _cut(s[name]) for name in names if name in s} for s in samples[:MAX_SAMPLES]]
        self._kept[self.number] = {"step": step, "samples": shown, "not_shown": len(samples) - len(shown)}
        self.number += 1
        if len(self._kept) > 2 * MAX_GENERATIONS:
            self._every *= 2
            self._kept = {n: kept for n, kept in self._kept.items() if n % self._every == 0 or n == self.number - 1}

    def spread(self) -> list[Record]:
        """At most MAX_GENERATIONS of them: `step`, `samples` (each with `prompt`, `text` and perhaps `reference`), and
        how many more were `not_shown`."""
        kept = list(self._kept.values())
        if len(kept) <= MAX_GENERATIONS:
            return kept
        return [kept[i] for i in np.linspace(0, len(kept) - 1, MAX_GENERATIONS).round().astype(int)]


class History:
    """A run so far, in bounded memory. Every figure may be absent: older files have fewer."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.load: ExpertLoad | None = None
        self.generations = Generations()
        self.last_step = 0
        self.tokens = 0
        self.dropped_tokens: int | None = None
        self.skipped_steps = 0
        self.warnings: deque[Record] = deque(maxlen=MAX_WARNINGS)
        self.num_starts = 1
        self.unreadable_lines = 0
        self.seconds = Seconds()
        self.positions = Spread(MAX_POINTS)
        self.saves = Spread(MAX_MARKS)
        self.resumes = Spread(MAX_MARKS)
        self._last_logged = 0
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
        self.seconds.add(record)
        if "save_seconds" in record:
            self.saves.add(step)
        drawn = [metric.name for metric in METRICS if metric.chart is not None]
        for name in [*drawn, *self._others(record)]:
            self._add_value(name, step, record.get(name))
        if record.get("expert_tokens"):
            tokens_LE = np.array(record["expert_tokens"], float)
            entropy_L = record.get("router_entropy") or [math.nan] * len(tokens_LE)
            self.load = self.load or ExpertLoad(*tokens_LE.shape)
            self.load.add(Stretch(step, step, np.column_stack([tokens_LE, np.array(entropy_L, float)])))
        if "generations" in record:
            self.generations.add(step, record["generations"])
        if record.get("dropped_tokens") is not None:
            self.dropped_tokens = (self.dropped_tokens or 0) + record["dropped_tokens"]
        if "warning" in record:
            self.warnings.append({"step": step, "text": record["warning"]})
        self.skipped_steps += record.get("skipped_steps", 0)
        self.tokens += record.get("tokens", 0)
        if "seconds" in record:
            speed = record.get("tokens_per_second")
            self._add_seconds(record["seconds"], record["tokens"] / speed if speed else 0.0)
            self.positions.add((step, self.tokens, _number(record.get("epoch")), round(self.wall_seconds, 1)))
            self._last_logged = step

    def place(self) -> Record:
        """Where the run was at some of its logged steps, by each measure of progress; None where it is not known."""
        names = ("steps", "tokens", "epochs", "seconds")
        return dict(zip(names, map(list, zip(*self.positions.items(), strict=True)), strict=False))

    def _others(self, record: Record) -> list[str]:
        """Names of scalars that no metric has."""
        known = {"step", "save_seconds", "generate_seconds", *(metric.name for metric in METRICS)}
        names = [name for name in record if name not in known and _number(record[name]) is not None]
        room = MAX_OTHERS - len(self.curves.keys() - known)
        return [name for name in names if name in self.curves] + [n for n in names if n not in self.curves][:room]

    def _add_value(self, name: str, step: int, value: Any) -> None:
        """Take in a number, or one for each layer, null where a layer has none, of which all must be finite."""
        if isinstance(value, list) and value and all(v is None or isinstance(v, int | float) for v in value):
            of_layers = np.array(value, float)
            known = of_layers[~np.isnan(of_layers)]
            if len(known) and np.isfinite(known).all():
                self._add_point(name, step, known.mean(), known.min(), known.max())
        elif (number := _number(value)) is not None:
            self._add_point(name, step, number, number, number)

    def _add_point(self, name: str, step: int, value: float, low: float, high: float) -> None:
        self.curves.setdefault(name, Curve()).add(Stretch(step, step, value, low, high))

    def _add_seconds(self, seconds: float, taken: float) -> None:
        """Take in the clock of a start at a record, and how long its steps took. If less has passed on the clock since
        the record before, by more than both are rounded by, it is another start's, which began at 0."""
        if seconds - self._seconds < 0.99 * taken - 0.002:
            self.num_starts += 1
            self.resumes.add(self._last_logged)
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
    # an integer may be larger than any float
    return value if isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max else None


def _short(value: float) -> float | None:
    """Six digits: more than a page can show, in half the bytes. None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT:,} more characters)"
