"""Work in a process of its own, which changes nothing of this one: a fork, which knows all that this one does, or where
torch could not compute in a fork, a new one."""

import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

MOST_SECONDS = 900.0


def cores() -> int:
    """Cores that this process and its children may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hide_gpus() -> None:
    """For a command without use for them, before it asks torch: it can compute in forks then."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def forks_compute() -> bool:
    """Whether torch can compute in a fork of this process. It cannot once it has looked for a GPU and found one, nor
    behind a backward with a GPU, or one that was pretended: it has threads then that a fork lacks."""
    import torch

    try:
        return not torch.cuda.is_available() and in_fork(_compute)
    except (RuntimeError, ChildProcessError):
        return False


def _compute() -> bool:
    import torch

    torch.ones(1, requires_grad=True).sum().backward()
    return True


def in_child(work: Callable[[], T]) -> T:
    """What `work` returns in another process; what it raises is raised here.

    Args:
        work: of torch on the CPU; can be pickled, for where a fork cannot compute.

    Raises:
        ChildProcessError: the process has ended before it was done, or took longer than it may.
    """
    return in_fork(work) if forks_compute() else in_new_process(work)


def in_new_process(work: Callable[[], T]) -> T:
    """As `in_child`, in a process that imports what it needs, and sees no GPU."""
    reading, writing = os.pipe()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import answer_to; answer_to({writing})"],
        stdin=subprocess.PIPE,
        env=environment,
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin:
            pickle.dump(work, child.stdin)
        return _outcome(reading)
    finally:
        child.kill()
        child.wait()


def answer_to(writing: int) -> NoReturn:
    """What the new process does."""
    _answer(lambda: pickle.load(sys.stdin.buffer)(), writing)


def in_fork(work: Callable[[], T]) -> T:
    """As `in_child`, in a fork of this process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of threads, of which the child uses none
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        leave_inherited()
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    try:
        return _outcome(reading)
    finally:
        # it has ended, or is to end
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def leave_inherited() -> None:
    """In a fork, before anything else: have Python's collector leave alone what was there before. There may be garbage
    among it whose end waits for threads that a fork lacks, as that of a process group of gloo does, for good."""
    gc.freeze()


def _outcome(reading: int) -> Any:
    try:
        content = _read(reading, time.monotonic() + MOST_SECONDS)
    finally:
        os.close(reading)
    if not content:
        raise ChildProcessError("the process that was to find it out has ended before it was done")
    has_failed, found = pickle.loads(content)
    if has_failed:
        raise found
    return found


def _read(reading: int, until: float) -> bytes:
    """All that is written, or nothing where that takes too long."""
    content = b""
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        more = os.read(reading, 2**20)
        if not more:
            return content
        content += more
    return b""


def _answer(work: Callable[[], Any], writing: int) -> NoReturn:
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
