"""How a rank's process really ends: by itself where it hangs, and with which exit code."""

import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util.command import INTERRUPTED
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime import failures, watchdog
from expertmesh.sharding.runtime.failures import Notice, Notices
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.sharding.runtime.watchdog import Watchdog

CAME_TO_ITS_END = 7
BROKEN = RuntimeError("Connection closed by peer")


def end_of(work: Callable[[Watchdog], None], limit: float | None, directory: Path) -> tuple[int, str]:
    """(exit code, what is on standard error) of a forked rank that works under a watchdog, and then exits with
    CAME_TO_ITS_END."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no lock of other threads
        child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(directory / "stderr", os.O_WRONLY | os.O_CREAT, 0o600), 2)
            watchdog.sys.stderr = failures.sys.stderr = os.fdopen(2, "w")
            watchdog.NOTICE_SECONDS = watchdog.FAREWELL_SECONDS = 0.05
            watchdog.SILENT_SECONDS = failures.TOGETHER_SECONDS = failures.TORCHRUN_SECONDS = 0.3
            dog = Watchdog(Ranks(0, 2, torch.device("cpu"), dist.HashStore()), limit)  # type: ignore[arg-type]
            dog.parent, dog.directory = None, directory / "stuck"
            with dog.watching():
                work(dog)
            os._exit(CAME_TO_ITS_END)
        finally:
            os._exit(99)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]), (directory / "stderr").read_text()


def hang(dog: Watchdog) -> None:
    dog.at("forward of layer 3", step=7)
    time.sleep(30)


def go_on(dog: Watchdog) -> None:
    for step in range(12):
        dog.at("forward of layer 3", step)
        time.sleep(0.05)


def read_much(dog: Watchdog) -> None:
    dog.at("reading the data", limited=False)
    time.sleep(0.6)


def test_a_rank_that_hangs_is_ended(tmp_path: Path) -> None:
    code, told = end_of(hang, 0.2, tmp_path)
    assert code == 1, told
    assert "rank 0 has made no progress for 0 s (--ddp-timeout 0.2): step 7, forward of layer 3, in hang" in told
    (file,) = (tmp_path / "stuck").iterdir()
    assert "in hang" in file.read_text()


@pytest.mark.parametrize("work", [go_on, read_much])
def test_one_that_does_not_is_not(tmp_path: Path, work: Callable[[Watchdog], None]) -> None:
    assert end_of(work, 0.4, tmp_path) == (CAME_TO_ITS_END, "")


def _raise(error: BaseException) -> None:
    raise error


def _lose(dog: Watchdog, kind: str) -> None:
    """The other rank, which tells that it failed, or falls silent; this one waits for it."""
    other = Notices(dog.notices.store, 1, 2)
    other.give_sign("its last")
    if kind:
        other.post(Notice(1, kind, "OSError"))  # type: ignore[arg-type]
    time.sleep(30)


def _lose_store(dog: Watchdog) -> None:
    """The node that holds it is out of reach, while this rank waits where no time limit is."""
    dog.at("waiting for the checkpoint", limited=False)
    dog.notices.is_lost = True
    time.sleep(30)


ENDS: dict[str, tuple[int, Callable[[Watchdog], None], str]] = {
    "an error of its own": (1, lambda dog: _raise(OSError("no such file")), "no such file"),
    "a mistake that others do not meet": (1, lambda dog: _raise(ExpertMeshError("no such flag")), "no such flag"),
    "a connection that broke": (1, lambda dog: _raise(BROKEN), "lost the connection to another rank"),
    "a failure that was told": (1, lambda dog: _lose(dog, "error"), ""),
    "another's hang": (1, lambda dog: _lose(dog, "stuck"), "rank 0 has made no progress"),
    "silence": (1, lambda dog: _lose(dog, ""), "lost rank 1: no heartbeat"),
    "a store out of reach": (1, _lose_store, "lost rank 0: no answer from its node's store"),
    "an interruption": (INTERRUPTED, lambda dog: _raise(KeyboardInterrupt()), "rank 0 was interrupted"),
}


@pytest.mark.parametrize("what", ENDS)
def test_exit_codes(tmp_path: Path, what: str) -> None:
    """torchrun restarts, and a scheduler requeues, by these alone."""
    expected, work, told = ENDS[what]
    code, shown = end_of(work, 1800, tmp_path)
    assert code == expected, shown
    assert told in shown


def test_its_threads_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python's own end, as of a script that calls train_ep.main, aborts the process when one of them comes back
    from the store."""
    answer = Notices.give_sign

    def late(notices: Notices, text: str) -> bool:
        time.sleep(0.2)
        return answer(notices, text)

    monkeypatch.setattr(Notices, "give_sign", late)
    monkeypatch.setattr(watchdog, "NOTICE_SECONDS", 0.01)
    before = threading.enumerate()
    with Watchdog(Ranks(0, 1, torch.device("cpu"), dist.HashStore()), 1800).watching():
        time.sleep(0.1)
    assert threading.enumerate() == before
