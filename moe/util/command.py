"""How the process of a command begins and ends."""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_YOUNG = 50_000
"""Objects made before the youngest are searched for cyclic garbage; Python's default is some hundreds."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as in shells."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command's `main` as a process of its own, and end with its exit code; after Ctrl-C, silently.

    Importing torch and transformers makes hundreds of thousands of objects that stay; with Python's own thresholds a
    fifth of the time is spent looking for garbage among them. Nor does the process end with sys.exit: that would take
    another second to free them one by one, and some of torch's threads now and then abort a process at that point,
    after a run in which nothing was wrong.
    """
    gc.set_threshold(_YOUNG)
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End without Python's own shutdown, which would wait for threads that wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # of a process started without it
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)
