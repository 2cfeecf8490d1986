"""How a rank ends when something breaks, so that the error that began it is read first and the others' not at all.

A rank that fails shows its error and leaves a notice in the store before its connections close. The others, whose
collectives then break, or who find the notice while they wait, end without a traceback of their own. The store is not
part of any collective, and each use of it is limited in time: it may be what has become unreachable.
"""

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ...moe.util.command import end_at_once
from ...moe.util.errors import ExpertMeshError

STORE_SECONDS = 3.0
"""How long a rank that ends waits for the store."""

TOGETHER_SECONDS = 15.0
"""How long a rank that stops with an error waits for the others to stop with it."""

TORCHRUN_SECONDS = 3.0
"""How long a rank that was not the cause leaves it to torchrun to find the one that was and end the rest."""

_FAILURE = "expertmesh/failure"
_ALIVE = "expertmesh/alive"
_STOPPED = "expertmesh/stopped"
_LEFT = "expertmesh/left"
# gloo raises RuntimeError for everything
_BROKEN = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_TIMED_OUT = ("Timed out waiting", "timed out", "Application timeout")

T = TypeVar("T")


@dataclass(frozen=True)
class Notice:
    """What the first rank to end told the others. kind: "error", "stuck" where it hung for too long, or "stopped"
    after a signal."""

    rank: int
    kind: Literal["error", "stuck", "stopped"]
    text: str


class Notices:
    """The ranks' notices to one another, on a connection of their own to the store that they met at."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self.is_lost = False
        # of the listening thread and the main one; also held by a use that does not come back
        self.turn = threading.Lock()

    def post(self, notice: Notice) -> Notice:
        """Tell the others of a failure; returns the notice that counts, which is an earlier one where there is one."""
        text = json.dumps(asdict(notice))
        found = self._limited(lambda: self.store.compare_set(_FAILURE, "", text))
        return notice if found is None else Notice(**json.loads(found))

    def read(self) -> Notice | None:
        """The notice of the first rank to fail, if any has."""
        found = self._limited(lambda: self.store.get(_FAILURE) if self.store.check([_FAILURE]) else None)
        return None if found is None else Notice(**json.loads(found))

    def give_sign(self, sign: str) -> bool:
        """Send a heartbeat, a different one each time; returns whether it has arrived."""

        def leave() -> bool:
            self.store.set(f"{_ALIVE}/{self.rank}", sign)
            return True

        return self._limited(leave) is not None

    def sign_of(self, rank: int) -> str | None:
        """The latest heartbeat of a rank; None where there is none, or the store does not answer."""
        key = f"{_ALIVE}/{rank}"
        found = self._limited(lambda: self.store.get(key) if self.store.check([key]) else None)
        return None if found is None else found.decode()

    def all_stopped(self) -> bool:
        """Whether all ranks come here within `TOGETHER_SECONDS`, as they do after an error that all of them met, and
        none has given up waiting."""
        deadline = time.monotonic() + TOGETHER_SECONDS
        count = self._limited(lambda: self.store.add(_STOPPED, 1))
        while count is not None and count < self.world_size and time.monotonic() < deadline and self.read() is None:
            time.sleep(0.05)
            count = self._limited(lambda: self.store.add(_STOPPED, 0))
        return count == self.world_size and self.read() is None

    def leave(self, patience: float) -> None:
        """Before this rank ends after a signal: wait for the others to have come here too, as the store ends with its
        rank.

        Args:
            patience: seconds.
        """
        deadline = time.monotonic() + patience
        count = self._limited(lambda: self.store.add(_LEFT, 1))
        while count is not None and count < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            count = self._limited(lambda: self.store.add(_LEFT, 0))

    def _limited(self, work: Callable[[], T]) -> T | None:
        """The result of a use of the store; None where it fails or takes too long, as over a link that is down.

        A store that has failed is not used again, nor is one that has not answered yet.
        """
        result: list[T] = []

        def run() -> None:
            try:
                result.append(work())
            except RuntimeError:
                self.is_lost = True  # the process that held it is gone
            finally:
                self.turn.release()

        if self.is_lost or not self.turn.acquire(timeout=STORE_SECONDS):
            return None
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        return result[0] if result else None


def is_broken_collective(error: BaseException) -> bool:
    """Whether this rank only met the failure of another: a collective that a peer left, or did not come to."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _BROKEN)
    )


def is_timeout(error: BaseException) -> bool:
    """Whether a collective timed out."""
    return is_broken_collective(error) and any(words in str(error) for words in _TIMED_OUT)


def show(text: str) -> None:
    """Print on standard error, at once and in one piece, if anybody is there to read it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()


def end_as_cause(error: BaseException, where: str, notices: Notices) -> NoReturn:
    """End the process after an error of its own: shown, and told to the others and to torchrun, which puts it into its
    summary. A user's mistake, which others did not meet, is told in a line, all else with its traceback."""
    if isinstance(error, ExpertMeshError):
        show(f"rank {notices.rank} failed in {where}: error: {error}")
    else:
        show(f"rank {notices.rank} failed in {where}:\n" + "".join(traceback.format_exception(error)))
    notices.post(Notice(notices.rank, "error", f"{type(error).__name__}: {error}, in {where}"))
    get_error_handler().record_exception(error)
    end_at_once(1)


def end_as_consequence(error: BaseException, where: str, notices: Notices) -> NoReturn:
    """End the process after another rank's failure, which is told of only where that rank has not done so itself."""
    if notices.read() is None:
        show(
            f"rank {notices.rank} lost the connection to another rank in {where}. If no other rank "
            "printed an error above, that rank was killed (out of memory?) or its node went down. "
            f"{type(error).__name__}: {error}"
        )
    time.sleep(TORCHRUN_SECONDS)
    end_at_once(1)
