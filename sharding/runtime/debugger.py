"""A debugger on some ranks while the others wait: after the old trick of giving a forked process's pdb the terminal."""

import fcntl
import os
import pdb
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from ...moe.util.command import end_at_once
from ...moe.util.errors import ExpertMeshError
from .failures import Notice, show
from .process import Ranks
from .watchdog import Watchdog


class RankDebugger(pdb.Pdb):
    """Python's debugger, talking to the terminal that torchrun was started from, one rank of a node at a time.

    Args:
        lock: a file or directory that all ranks of the node can open; who holds it talks.
        watchdog: to be told of a `quit`, which ends the run.
        terminal: what is typed.
    """

    def __init__(self, lock: Path, watchdog: Watchdog, terminal: TextIO):
        super().__init__(stdin=terminal, stdout=sys.__stdout__)
        self.lock = lock
        self.watchdog = watchdog
        self.prompt = f"(rank {watchdog.rank}) "
        self.use_rawinput = False

    def interaction(self, frame: FrameType | None, traceback: TracebackType | BaseException | None) -> None:
        """Talk until told to go on."""
        descriptor = os.open(self.lock, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            print(f"rank {self.watchdog.rank} is in {self.watchdog.where()}; the other ranks wait", file=self.stdout)
            super().interaction(frame, traceback)  # type: ignore[arg-type]
        finally:
            os.close(descriptor)

    def set_quit(self) -> NoReturn:
        """What `quit`, and the end of the input, do: end the run at once."""
        show(f"rank {self.watchdog.rank}: the run was ended from the debugger")
        self.watchdog.notices.post(Notice(self.watchdog.rank, "error", "ended from the debugger"))
        end_at_once(1)


@contextmanager
def debugging(debug_ranks: Collection[int], ranks: Ranks, watchdog: Watchdog, lock: Path) -> Iterator[None]:
    """Within it, a debugger opens on the ranks named, and nowhere else: at the beginning, at `breakpoint()`, at errors.

    Args:
        debug_ranks: an empty collection changes nothing.
        lock: see `RankDebugger`.

    Raises:
        ExpertMeshError: there is no such rank.
    """
    if not debug_ranks:
        yield
        return
    if max(debug_ranks) >= ranks.world_size or min(debug_ranks) < 0:
        raise ExpertMeshError(
            f"--debug-ranks {' '.join(map(str, debug_ranks))}: the ranks are 0 to {ranks.world_size - 1}"
        )
    before = sys.breakpointhook
    if ranks.rank in debug_ranks:
        # Whatever has become of sys.stdin, what torchrun was given stays file number 0. One object for all debuggers:
        # each would read ahead of what it uses.
        make_debugger = partial(RankDebugger, lock, watchdog, os.fdopen(os.dup(0)))
        sys.breakpointhook = lambda *args, **kwargs: make_debugger().set_trace(sys._getframe(1))
        # of whoever has the `with` statement, contextlib between them
        caller = sys._getframe(2)
        debugger = make_debugger()
        debugger.set_trace(caller)
        sys.settrace(None)  # or set_next itself would be stepped into
        debugger.set_next(caller)
        sys.settrace(debugger.trace_dispatch)
    else:
        sys.breakpointhook = _pass_over
    try:
        yield
    except Exception as error:
        if ranks.rank in debug_ranks:
            show(f"rank {ranks.rank}: {type(error).__name__}: {error}")
            debugger = make_debugger()
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
        raise
    finally:
        sys.breakpointhook = before


def _pass_over(*args: Any, **kwargs: Any) -> None:
    pass
