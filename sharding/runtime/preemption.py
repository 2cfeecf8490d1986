"""Being asked to stop: SIGTERM or SIGUSR1, as a cluster sends before it takes a node away.

Before the first step, and once the last checkpoint is complete, nothing is lost: the process ends wherever it is. While
a run trains, the step under way is finished, what comes between two steps is cut at its next `boundary`, by all ranks
together, and a checkpoint is saved.

Imports nothing that takes time: a run answers signals before it imports anything else.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from ...moe.util.process_place import process_place
from ..torchrun import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """A signal asked to stop here. A KeyboardInterrupt, so that libraries clean up as they do after Ctrl-C."""


_requests: list["StopRequest"] = []
"""Those that are entered, the innermost last: it decides."""


class StopRequest:
    """Use as a context manager: inside, these signals are marked, and answered. Threads other than the main one, as of
    Ray Train, get none.

    Args:
        answer: called by the first signal's handler; None: the mark is all.
    """

    def __init__(self, answer: Callable[[], object] | None = None) -> None:
        self.answer = answer
        self.received = False
        # within it one was marked, and nothing came of it
        self.is_due = False
        self.is_cutting = False
        self.process = os.getpid()
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        _requests.append(self)
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self.before[number] = signal.signal(number, self._mark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        _requests.remove(self)
        if _requests:
            _requests[-1].is_due |= self.received

    def _mark(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a forked worker, which ends as if it knew nothing of this
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # once: clusters repeat their signals, and what a process does to end is not to be cut too
        elif not self.received:
            self.received = True
            if self.answer is not None:
                self.answer()

    def is_asked(self) -> bool:
        """Whether this rank has received one."""
        return self.received

    def on_any_rank(self) -> bool:
        """Whether any rank has received one. All ranks call it together and get the same result."""
        import torch
        import torch.distributed as dist

        mark = torch.tensor(int(self.received))
        if dist.get_world_size() > 1:
            dist.all_reduce(mark, op=dist.ReduceOp.MAX)
        return bool(mark)

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """For work that all ranks leave together: within it, `boundary` asks them all."""
        self.is_cutting = True
        try:
            yield
        finally:
            self.is_cutting = False


def boundary() -> None:
    """To be called by whatever takes long, between two of its parts, such as batches; within `StopRequest.cutting` by
    all ranks together. Nothing happens where nobody handles signals, as in a training loop of one's own.

    Raises:
        Stopped: work ends here after a signal: to this rank, or within `StopRequest.cutting` to any, on all of them.
    """
    if _requests and _requests[-1].is_cutting:
        if _requests[-1].on_any_rank():
            raise Stopped
    elif is_leaving() or (_requests and _requests[-1].answer is not None and _requests[-1].is_due):
        raise Stopped


def is_leaving() -> bool:
    """Whether this process was asked to stop and is to end wherever it is."""
    return bool(_requests) and _requests[-1].answer is not None and _requests[-1].received


def leave() -> None:
    """An answer: ends the work under way, and with it the process, by an exception in the main thread.

    Raises:
        Stopped: always.
    """
    raise Stopped


def end_before_start() -> None:
    """An answer: ends the process at once, as there is nothing yet that could be half done. An import that is cut short
    by an exception might turn it into another."""
    if process_place().local_rank == 0:
        # not by a stream, which the main thread may just write to
        os.write(2, f"stopped by a signal before the run began; nothing was done (exit code {STOPPED})\n".encode())
    os._exit(STOPPED)
