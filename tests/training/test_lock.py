"""The lock on an output directory: one holder at a time, gone with its process."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from expertmesh.checkpoints.files import lock
from expertmesh.checkpoints.files.lock import HOLDER, DirectoryLock
from expertmesh.moe.util.errors import ExpertMeshError

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.3)


def _hold(directory: Path, is_held: Event, has_children: bool) -> None:
    held = DirectoryLock(directory)
    held.acquire()
    if has_children:
        FORK.Process(target=signal.pause).start()  # what tokenizes
    is_held.set()
    signal.pause()


@pytest.mark.parametrize("has_children", [False, True])
def test_held_until_its_process_ends(tmp_path: Path, has_children: bool) -> None:
    """Killed, it leaves the file, which keeps nobody out, even while its own children live on."""
    is_held = FORK.Event()
    holder = FORK.Process(target=_hold, args=(tmp_path, is_held, has_children))
    holder.start()
    assert is_held.wait(60)
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    with pytest.raises(ExpertMeshError, match=f"another run writes to it: process {holder.pid} on host .*, since 20"):
        DirectoryLock(tmp_path).acquire()
    assert DirectoryLock(tmp_path).is_held()
    holder.kill()
    holder.join()
    assert (tmp_path / HOLDER).exists()
    assert not DirectoryLock(tmp_path).is_held()
    mine = DirectoryLock(tmp_path)
    mine.acquire()
    assert json.loads((tmp_path / HOLDER).read_text())["pid"] == os.getpid()
    mine.release()
    assert not (tmp_path / HOLDER).exists()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def test_released_and_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        held = DirectoryLock(tmp_path)
        held.acquire()
        with pytest.raises(ExpertMeshError, match="another run writes to it"):
            DirectoryLock(tmp_path).acquire()
        held.release()
        held.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_where_nothing_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The file alone counts, as long as its process lives on this host."""

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    is_held = FORK.Event()
    holder = FORK.Process(target=_hold, args=(tmp_path, is_held, False))
    holder.start()
    assert is_held.wait(60)
    with pytest.raises(ExpertMeshError, match=f"process {holder.pid} on host"):
        DirectoryLock(tmp_path).acquire()
    holder.kill()
    holder.join()
    for _ in range(2):
        mine = DirectoryLock(tmp_path)
        mine.acquire()
        mine.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("record", [None, "", "[]", '{"host": 1, "pid": "x"}'])
def test_a_holder_that_is_not_known_is_left_out(tmp_path: Path, record: str | None) -> None:
    held = DirectoryLock(tmp_path)
    held.acquire()
    held.holder.unlink() if record is None else held.holder.write_text(record)
    with pytest.raises(ExpertMeshError, match="another run writes to it; wait for that run"):
        DirectoryLock(tmp_path).acquire()
    held.release()


def test_a_lock_that_is_anothers_by_now_stays(tmp_path: Path) -> None:
    """As after one has deleted the file, because its machine seemed to be gone."""
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    first.path.unlink()
    second.acquire()
    first.release()
    with pytest.raises(ExpertMeshError, match="another run writes to it"):
        DirectoryLock(tmp_path).acquire()
    second.release()
    assert list(tmp_path.iterdir()) == []
