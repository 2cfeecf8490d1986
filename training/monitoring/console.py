"""The table that a run prints as it trains: a line per logged step, in columns that stay where they are.

A header names the columns, and is repeated so that one is always in sight. Up to 99,999 steps, a line fits a terminal
of 80 columns.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from ...moe.util.sizes import duration, thousands
from ..metrics import Record, told_of

HEADER_EVERY = 20
"""Lines from one header to the next."""
_NO_VALUE = "-"


class LineColumn(NamedTuple):
    """title, width: of the header. cell: its text, from a line of metrics.jsonl."""

    title: str
    width: int
    cell: Callable[[Record], str]


class StepTable:
    """Lines for logged steps.

    Args:
        num_steps: of the run.
        verbose: whether a line also has what few need, such as the load of the busiest expert.
    """

    def __init__(self, num_steps: int, verbose: bool = False):
        self.num_steps = num_steps
        self.verbose = verbose
        self.printed = 0
        step = max(2 * len(str(num_steps)) + 1, len("step"))
        self.columns = [
            LineColumn("time", 8, lambda line: time.strftime("%H:%M:%S")),
            LineColumn("step", step, lambda line: f"{line['step']}/{num_steps}"),
            LineColumn("epoch", 6, lambda line: f"{line['epoch']:.2f}"),
            LineColumn("loss", 7, lambda line: _of(line, "loss", ".4f")),
            LineColumn("norm", 7, lambda line: _of(line, "grad_norm", ".3g")),
            LineColumn("lr", 7, lambda line: _short(line["learning_rate"], ".2e")),
            LineColumn("s/step", 6, _seconds),
            LineColumn("tok/s", 5, lambda line: thousands(line["tokens_per_second"])),
            LineColumn("GiB", 5, lambda line: _gib(line["peak_memory_mb"])),
        ]

    def lines(self, line: Record, seconds_left: float) -> list[str]:
        """A logged step's line, below a header where one is due."""
        cells = [column.cell(line).rjust(column.width) for column in self.columns]
        columns = " ".join([*cells, duration(seconds_left).rjust(_LEFT)])
        text = "  ".join([columns, *told_of(line, self.verbose)])
        header = [] if self.printed % HEADER_EVERY else [self.header()]
        self.printed += 1
        return [*header, text]

    def header(self) -> str:
        """The names of the columns."""
        titles = [column.title.rjust(column.width) for column in self.columns]
        return " ".join([*titles, "left".rjust(_LEFT)])


_LEFT = 8
"""Width of the time left, such as 12:02:03."""


def _of(line: Record, name: str, digits: str) -> str:
    """A figure that an interval without a finite step does not have."""
    value = line[name]
    if value is None or not math.isfinite(value):
        return _NO_VALUE
    return _short(value, ".2e" if 0 < abs(value) < 1e-3 else digits)


def _short(value: float, digits: str) -> str:
    """With an exponent as short as it can be: 2.96e-3."""
    mantissa, e, exponent = f"{value:{digits}}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def _seconds(line: Record) -> str:
    if not line["tokens"]:
        return _NO_VALUE
    seconds = line["step_seconds"]
    return f"{seconds:.3g}" if seconds >= 0.1 else f"{seconds:.4f}"


def _gib(megabytes: float) -> str:
    gib = megabytes * 1e6 / 2**30
    return f"{gib:.2f}" if gib < 10 else f"{gib:.1f}"
