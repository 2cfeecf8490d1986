"""What metrics.jsonl says, in bounded space however long the run was.

Shape suffixes: L MoE layers, E experts.
"""

import json
import math
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...moe.util.errors import ExpertMeshError
from ..metrics import METRICS

MAX_POINTS = 1000  # of a curve
MAX_CELLS = 200_000  # layers x experts x stretches of the expert load
MAX_GENERATIONS = 16  # logged steps whose generations are shown, evenly spread
MAX_SAMPLES = 16  # of a logged step
MAX_TEXT = 4000  # characters of a prompt or generation
MAX_WARNINGS = 50  # the latest
MAX_MARKS = 200  # saves, and resumes, evenly spread
MAX_OTHERS = 50  # figures that METRICS do not have, as those that another script has registered

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

    def join(self, later: "Stretch") -> "Stretch":
        low, high = min(self.low, later.low), max(self.high, later.high)
        total, count = self.total + later.total, self.count + later.count
        return Stretch(self.first_step, later.last_step, total, low, high, count)

    @property
    def mean(self) -> Any:
        return self.total / self.count


def _first(item: Any, later: Any) -> Any:
    return item


class Bounded:
    """What was added, in order, as at most `limit` items, an even number.

    When there would be more, neighbours are joined, by default into the first of them: from then on an item stands for
    twice as many.
    """

    def __init__(self, limit: int, join: Callable[[Any, Any], Any] = _first) -> None:
        self.limit, self.join = limit, join
        self.length, self.number = 1, 0  # what an item stands for, the last perhaps for less; what has been added
        self.items: list[Any] = []
        self.last: Any = None

    def add(self, item: Any) -> None:
        self.last = item
        if self.number % self.length:
            self.items[-1] = self.join(self.items[-1], item)
        else:
            if len(self.items) == self.limit:
                self.items = [self.join(*pair) for pair in zip(self.items[::2], self.items[1::2], strict=True)]
                self.length *= 2
            self.items.append(item)
        self.number += 1

    def with_last(self) -> list[Any]:
        """Returns the items and the last that was added, where it is none of them."""
        return [*self.items, self.last] if self.number and (self.number - 1) % self.length else self.items


class Curve(Bounded):
    """One figure over the steps it was logged at.

    Attributes:
        lowest, lowest_step: the lowest value, and the first step that had it.
    """

    def __init__(self) -> None:
        super().__init__(MAX_POINTS, Stretch.join)
        self.lowest, self.lowest_step = math.inf, 0

    def add(self, item: Stretch) -> None:
        if item.mean < self.lowest:
            self.lowest, self.lowest_step = item.mean, item.last_step
        super().add(item)

    def median(self) -> float:
        return float(np.median([point.mean for point in self.items]))

    def highest(self) -> float:
        return max(point.high for point in self.items)

    def summary(self) -> Record:
        """What the page draws of it.

        Returns:
            `steps` (the last one of each point), `mean`, `per_point` (logged values, of the last point perhaps fewer);
            `low` and `high` where they differ from the mean.
        """
        columns = {"mean": [_short(point.mean) for point in self.items]}
        if any(point.low < point.high for point in self.items):
            columns |= {side: [_short(getattr(point, side)) for point in self.items] for side in ("low", "high")}
        return {"steps": [point.last_step for point in self.items], "per_point": self.length, **columns}


class ExpertLoad(Bounded):
    """Of each layer the tokens of each expert and, last, the router's entropy."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(min(max(MAX_CELLS // (num_layers * num_experts), 8), 64) // 2 * 2, Stretch.join)
        self.num_experts = num_experts

    def summary(self) -> Record:
        """What the page draws of it.

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


class History:
    """A run so far, in bounded memory. Every figure may be absent: older files have fewer.

    Attributes:
        seconds: of wall time, as the main process's clock has it: in `steps`, of which waiting for `data`, on the rank
            that waits longest; and in the pauses between steps.
        positions: step, tokens, epoch and seconds at logged steps.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.load: ExpertLoad | None = None
        self.generations = Bounded(MAX_GENERATIONS)
        self.last_step = self.tokens = self.skipped_steps = self.unreadable_lines = 0
        self.dropped_tokens: int | None = None
        self.warnings: deque[Record] = deque(maxlen=MAX_WARNINGS)
        self.num_starts = 1
        self.num_timed = 0
        self.seconds = dict.fromkeys(("steps", "data", "eval", "generate", "save"), 0.0)
        self.positions = Bounded(MAX_POINTS)
        self.saves, self.resumes = Bounded(MAX_MARKS), Bounded(MAX_MARKS)
        self._last_logged = 0
        self._seconds_before = self._seconds = 0.0

    @property
    def wall_seconds(self) -> float:
        """Up to each start's last logged step, over all starts that the file has steps of."""
        return self._seconds_before + self._seconds

    def add(self, record: Record) -> None:
        """Take in a line of the file: of training, evaluation, generations, or a warning."""
        step = record["step"]
        self.last_step = max(self.last_step, step)
        self._add_times(record)
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
        for samples in (record[key] for key in ("generations", "answers") if key in record):
            shown = [{name: _cut(text) for name, text in s.items()} for s in samples[:MAX_SAMPLES]]
            self.generations.add({"step": step, "samples": shown, "not_shown": len(samples) - len(shown)})
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
        return dict(zip(names, map(list, zip(*self.positions.with_last(), strict=True)), strict=False))

    def _add_times(self, record: Record) -> None:
        number, seconds = int(_number(record.get("steps")) or 0), _number(record.get("step_seconds"))
        if seconds is not None:
            self.num_timed += number
            self.seconds["steps"] += number * seconds
            self.seconds["data"] += number * (_number(record.get("data_seconds")) or 0.0)
        for pause in ("eval", "generate", "save"):
            self.seconds[pause] += _number(record.get(f"{pause}_seconds")) or 0.0

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
    try:
        with metrics.open(encoding="utf-8", errors="replace") as lines:
            for record in map(read_record, lines):
                if record is None:
                    history.unreadable_lines += 1
                else:
                    history.add(record)
    except OSError as error:
        raise ExpertMeshError(
            f"{metrics}: cannot be read: {error.strerror}; give the directory that --output-dir of a run named"
        ) from error
    return history


def read_record(line: str | bytes) -> Record | None:
    """A line of metrics.jsonl; None where it is no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


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
