"""Work in a process of its own, which knows all that this one does and changes nothing of it."""

import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MOST_SECONDS = 900.0


def cores() -> int:
    """Cores that this process and its children may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_child(work: Callable[[], T]) -> T:
    """What `work` returns in a fork of this process; what it raises is raised here.

    Raises:
        ChildProcessError: the process has ended before it was done, or took longer than it may.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of threads, of which the child uses none
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    try:
        content = _read(reading, time.monotonic() + MOST_SECONDS)
    finally:
        os.close(reading)
        # it has ended, or is to end
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not content:
        raise ChildProcessError("the process that was to find it out has ended before it was done")
    has_failed, found = pickle.loads(content)
    if has_failed:
        raise found
    result: T = found
    return result


def _read(reading: int, until: float) -> bytes:
    """All that is written, or nothing where that takes too long."""
    content = b""
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        more = os.read(reading, 2**20)
        if not more:
            return content
        content += more
    return b""


def _answer(work: Callable[[], Any], writing: int) -> None:
    """Write what comes of the work, and end the process without anything of what this one would do at its end."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        try:
            outcome = pickle.dumps((False, work()))
        except Exception as error:
            outcome = pickle.dumps((True, error))
        with os.fdopen(writing, "wb") as answer:
            answer.write(outcome)
    finally:
        os._exit(0)
