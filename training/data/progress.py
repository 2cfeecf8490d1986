"""Progress of reading and tokenizing."""

import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

SECONDS_AT_TERMINAL = 0.5
SECONDS_IN_LOG = 15.0


class TokenizingProgress:
    """Tells on standard error how many records are done: at a terminal in one line, which is then erased; elsewhere in
    a new line every 15 seconds.

    Records are counted by the bytes of a file in `directory`, which any process may add to.

    Attributes:
        counter: the file's path, for `count`.
    """

    def __init__(self, doing: str, total: int | None, tells: bool, directory: Path):
        self._doing, self._total, self._tells, self._directory = doing, total, tells, directory
        self._began = time.monotonic()
        self._at_terminal = os.isatty(2)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        descriptor, self.counter = tempfile.mkstemp(dir=self._directory)
        os.close(descriptor)
        if self._tells:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._finished.set()
        if self._tells:
            self._thread.join()
        os.unlink(self.counter)

    def line(self) -> str:
        """What is told now."""
        done = f"{os.stat(self.counter).st_size:,}" + ("" if self._total is None else f" of {self._total:,}")
        return f"{self._doing}: {done} records, {time.monotonic() - self._began:.0f} s"

    def _follow(self) -> None:
        # by its descriptor: a process that is forked meanwhile must not inherit a stream that is locked
        erase, end = ("\r\x1b[K", "") if self._at_terminal else ("", "\n")
        told = False
        while not self._finished.wait(SECONDS_AT_TERMINAL if self._at_terminal else SECONDS_IN_LOG):
            _write(f"{erase}{self.line()}{end}")
            told = True
        if told:
            _write(erase)


def count(counter: str, number: int) -> None:
    """Add to what `Progress` counts, from any process."""
    descriptor = os.open(counter, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, b"." * number)
    finally:
        os.close(descriptor)


def _write(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        os.write(2, text.encode(errors="backslashreplace"))
