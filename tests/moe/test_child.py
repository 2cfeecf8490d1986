"""Work in a fork of this process, and in a new one."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.moe.util import child
from expertmesh.moe.util.child import forks_compute, in_child, in_fork, in_new_process
from expertmesh.moe.util.errors import ExpertMeshError


def test_it_gives_what_the_work_gives_and_changes_nothing_here() -> None:
    held = [1]

    def work() -> tuple[list[int], bool]:
        held.append(2)
        return held, os.getpid() == parent

    parent = os.getpid()
    assert in_fork(work) == ([1, 2], False)
    assert held == [1]


def test_more_than_a_pipe_holds() -> None:
    assert in_fork(lambda: b"x" * 2**20) == b"x" * 2**20


def test_what_it_raises_is_raised_here() -> None:
    def fail() -> None:
        raise ExpertMeshError("no such thing")

    with pytest.raises(ExpertMeshError, match="no such thing"):
        in_fork(fail)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_its_death_is_told(number: signal.Signals) -> None:
    def die() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    with pytest.raises(ChildProcessError, match="ended before it was done"):
        in_fork(die)


def test_what_this_process_would_do_at_its_end_is_not_done(tmp_path: Path) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(ChildProcessError):
        in_fork(leave)
    assert list(tmp_path.iterdir()) == []


def where() -> tuple[int, str, str]:
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "all"), __name__


def test_a_new_process_knows_our_modules_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    number, gpus, name = in_new_process(where)
    assert number != os.getpid()
    assert (gpus, name) == ("", __name__)
    assert in_new_process(partial(bytes, 2**20)) == bytes(2**20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_new_process_that_dies_is_told(number: signal.Signals) -> None:
    with pytest.raises(ChildProcessError, match="ended before it was done"):
        in_new_process(partial(signal.raise_signal, number))
    with pytest.raises(ValueError, match="invalid literal"):
        in_new_process(partial(int, "x"))


def test_forks_are_not_asked_where_torch_could_not_compute_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU, or with threads of torch's that a fork lacks."""
    assert in_child(os.getpid) != os.getpid()
    monkeypatch.setattr(child, "in_fork", partial(pytest.fail, "a fork"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not forks_compute()
    assert in_child(where)[1] == ""

    def lacks_threads(work: Any) -> Any:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(child, "in_fork", lacks_threads)
    assert not forks_compute()
    assert in_child(where)[1] == ""
