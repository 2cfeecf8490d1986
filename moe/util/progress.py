"""How far long work is, said on standard error while one waits for it."""

import os
import shutil
import sys
import time
from contextlib import suppress
from typing import Literal, Self

QUIET = 2.0
"""Seconds of work of which nothing is said."""
APART = 15.0
"""Seconds between two lines in a file or a pipe, where they stay."""
REDRAWN = 0.2
"""And between two states of the line on a terminal."""
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """What is being done, and for how many seconds: on a terminal in one line, which goes away; elsewhere in a line
    every `APART` seconds. Where TQDM_DISABLE is set in the environment, nothing, as of tqdm's bars.

    Args:
        is_shown: whether anything is said: of several ranks, one should.
    """

    def __init__(self, is_shown: bool = True):
        self.begun = time.monotonic()
        self.is_shown = is_shown and os.environ.get("TQDM_DISABLE", "0") in ("", "0")
        self._next = self.begun + QUIET
        self._is_drawn = False

    def __enter__(self) -> Self:
        return self

    @property
    def is_due(self) -> bool:
        """Whether a line is to be said by now."""
        return self.is_shown and time.monotonic() >= self._next

    def say(self, what: str, left: str = "") -> None:
        """
        Args:
            what: is being done, and how far it is. left: for how long, in words.
        """
        seconds = time.monotonic() - self.begun
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            line, self._is_drawn = f"{what}, {seconds:.0f} s{left}", sys.stderr.isatty()
            if self._is_drawn:
                # what wraps into a second line would stay
                width = shutil.get_terminal_size().columns - 1
                line = _CLEAR + (line if len(line) <= width else f"…{line[1 - width :]}")
            print(line, end="" if self._is_drawn else "\n", file=sys.stderr, flush=True)
        self._next = self.begun + seconds + (REDRAWN if self._is_drawn else APART)

    def __exit__(self, *error: object) -> None:
        if self._is_drawn:
            with suppress(AttributeError, OSError, ValueError):
                print(_CLEAR, end="", file=sys.stderr, flush=True)


class CountedProgress(ProgressLine):
    """How much of some work is done, and about how many seconds are left.

    Args:
        what: is done, such as "loading DIR".
        total: 0: it is not known.
        unit: bytes are told in MB or GB.
    """

    def __init__(self, what: str, total: int = 0, unit: Literal["bytes", "records"] = "bytes", is_shown: bool = True):
        super().__init__(is_shown)
        self.what, self.total, self.unit, self.done = what, total, unit, 0

    def add(self, number: int = 1) -> None:
        """So many more are done."""
        self.done += number
        if not self.is_due:
            return
        scale, unit = (1, self.unit) if self.unit != "bytes" else (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        done, total = (f"{number / scale:,.{int(scale > 1)}f}" for number in (self.done, self.total))
        left = (time.monotonic() - self.begun) * (self.total - self.done) / max(self.done, 1)
        self.say(
            f"{self.what}: {done}{f' of {total}' if self.total else ''} {unit}",
            f", about {left:.0f} s left" if self.total else "",
        )
