"""Commands that end in time, with all that they have started.

torchrun starts its workers, and tests start runs, in sessions of their own, which no signal to a process group reaches,
and orphans have another parent. What is found by is a mark in the environment, which all of them inherit.
"""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

BEGUN = time.monotonic()
"""When this process began, before it imports torch, which a machine that is new reads from its disk."""
MARK = "EXPERTMESH_STARTED_BY"
GRACE = 15.0
"""Seconds between SIGINT, at which a command may write what it has, and SIGKILL."""


def in_time(
    command: Sequence[str], output: IO[Any], environment: Mapping[str, str], directory: Path, seconds: float
) -> int | None:
    """Run a command; its exit code, or None where it was ended at its limit. None of what it started is left."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**environment, MARK: mark},
        cwd=directory,
        preexec_fn=_heed_sigint,
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)
        return None
    finally:
        kill_all(mark)
        process.wait()


def _heed_sigint() -> None:
    """In what a shell has started in the background, SIGINT is ignored, and so it would be in what that starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kill_all(mark: str) -> None:
    for left in with_mark(mark):
        with contextlib.suppress(psutil.Error):
            left.kill()


def with_mark(mark: str) -> list[psutil.Process]:
    """The processes that have it, youngest first, so that nobody restarts a child that is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append((process.create_time(), process))
        except (psutil.Error, OSError):
            continue
    return [process for _, process in sorted(found, key=lambda each: -each[0])]


def seconds_until(moment: float) -> float:
    """Of `time.monotonic`; 0 where it is past."""
    return max(0.0, moment - time.monotonic())
