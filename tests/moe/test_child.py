"""Work in a fork of this process, and in a new one."""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util import child
from expertmesh.moe.util.child import forks_compute, in_child, in_fork, in_new_process
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.planning.planner.forecasts import side_by_side


def test_it_gives_what_the_work_gives_and_changes_nothing_here() -> None:
    held = [1]

    def work() -> tuple[list[int], bool]:
        held.append(2)
        return held, os.getpid() == parent

    parent = os.getpid()
    assert in_fork(work) == ([1, 2], False)
    assert held == [1]


@pytest.fixture
def garbage() -> Iterator[None]:
    """A process group of gloo that only the collector frees, and has not yet."""
    was_on = gc.isenabled()
    gc.disable()
    held: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))]
    held.append(held)
    del held
    yield
    gc.collect()
    if was_on:
        gc.enable()


@pytest.mark.usefixtures("garbage")
def test_a_fork_leaves_garbage_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the group's threads, which it lacks."""
    monkeypatch.setattr(child, "MOST_SECONDS", 60.0)
    assert in_fork(gc.collect) >= 0


@pytest.mark.usefixtures("garbage")
def test_forks_side_by_side_leave_it() -> None:
    others = multiprocessing.active_children()  # such as the ranks of tests before
    with side_by_side() as pool:
        try:
            assert pool.submit(gc.collect).result(60) >= 0
        except TimeoutError:
            # or the pool would wait for them
            for process in set(multiprocessing.active_children()) - set(others):
                process.kill()
            raise


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
    monkeypatch.setattr(child, "in_new_process", lambda work: ("a new process", work()))
    assert in_child(os.getpid) == ("a new process", os.getpid())

    def lacks_threads(work: Any) -> Any:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(child, "in_fork", lacks_threads)
    assert not forks_compute()
    assert in_child(os.getpid) == ("a new process", os.getpid())
