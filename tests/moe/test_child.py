"""Work in a fork of this process."""

import os
import signal
import time
from pathlib import Path

import pytest

from expertmesh.moe.util.child import in_child
from expertmesh.moe.util.errors import ExpertMeshError


def test_it_gives_what_the_work_gives_and_changes_nothing_here() -> None:
    held = [1]

    def work() -> tuple[list[int], bool]:
        held.append(2)
        return held, os.getpid() == parent

    parent = os.getpid()
    assert in_child(work) == ([1, 2], False)
    assert held == [1]


def test_more_than_a_pipe_holds() -> None:
    assert in_child(lambda: b"x" * 2**20) == b"x" * 2**20


def test_what_it_raises_is_raised_here() -> None:
    def fail() -> None:
        raise ExpertMeshError("no such thing")

    with pytest.raises(ExpertMeshError, match="no such thing"):
        in_child(fail)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_its_death_is_told(number: signal.Signals) -> None:
    def die() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    with pytest.raises(ChildProcessError, match="ended before it was done"):
        in_child(die)


def test_what_this_process_would_do_at_its_end_is_not_done(tmp_path: Path) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(ChildProcessError):
        in_child(leave)
    assert list(tmp_path.iterdir()) == []
