"""Notices between ranks, outside of any collective, and who is the cause of a failure."""

import threading
from bdb import BdbQuit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.sharding.runtime import failures, watchdog
from expertmesh.sharding.runtime.failures import Notice, Notices, is_broken_collective, is_timeout
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool


@pytest.fixture
def three() -> list[Notices]:
    store = dist.HashStore()
    return [Notices(store, rank, 3) for rank in range(3)]


def test_the_first_notice_stands(three: list[Notices]) -> None:
    assert three[0].read() is None
    first = Notice(1, "error", "OSError: gone, in step 3, forward of layer 0")
    assert three[1].post(first) == first
    assert three[2].post(Notice(2, "stuck", "no progress")) == first
    assert three[0].read() == first


def test_signs_of_life(three: list[Notices]) -> None:
    assert three[0].sign_of(1) is None
    for sign in ("1", "2"):
        three[1].give_sign(sign)
        assert three[0].sign_of(1) == sign


def all_stopped(ranks: list[Notices]) -> list[bool]:
    """What each of the ranks that come gets."""
    found: list[bool] = []
    threads = [threading.Thread(target=lambda r=rank: found.append(r.all_stopped())) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_an_error_of_all_and_of_some(three: list[Notices], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "TOGETHER_SECONDS", 0.3)
    assert all_stopped(three[:2]) == [False, False]
    three[0].post(Notice(0, "error", "ValueError"))
    assert all_stopped(three[2:]) == [False]  # the others have given up
    assert all_stopped([Notices(dist.HashStore(), 0, 1)]) == [True]


def test_an_error_that_all_have_met(three: list[Notices]) -> None:
    assert all_stopped(three) == [True, True, True]


def test_whoever_stops_learns_that_another_failed(three: list[Notices], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "TOGETHER_SECONDS", 1000.0)  # it must not wait for that
    three[0].post(Notice(0, "error", "ValueError"))
    assert all_stopped(three[1:]) == [False, False]


class Unreachable:
    """A store at the end of a link that is down: whatever is asked of it does not come back, or fails."""

    def __init__(self, answer: Callable[[], None]):
        self.answer = answer

    def clone(self) -> "Unreachable":
        return self

    def set_timeout(self, timeout: object) -> None: ...

    def compare_set(self, *args: object) -> bytes:
        self.answer()
        return b""

    def check(self, *args: object) -> bool:
        self.answer()
        return False

    def add(self, *args: object) -> int:
        self.answer()
        return 0


def _refuse() -> None:
    raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("answer", [_refuse, threading.Event().wait], ids=["refuses", "failed"])
def test_a_store_that_is_gone_holds_nobody_up(answer: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "STORE_SECONDS", 0.1)
    notices = Notices(Unreachable(answer), 0, 2)  # type: ignore[arg-type]
    mine = Notice(0, "error", "ValueError")
    assert notices.post(mine) == mine
    assert notices.read() is None
    assert notices.sign_of(1) is None
    assert not notices.all_stopped()


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "broken", "late"),
    [
        (RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True, False),
        (RuntimeError(GLOO + "unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"), True, True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (OSError("No space left on device"), False, False),
    ],
)
def test_cause_or_consequence(error: Exception, broken: bool, late: bool) -> None:
    assert (is_broken_collective(error), is_timeout(error)) == (broken, late)


@pytest.mark.slow
def test_quitting_the_debugger_ends_the_run_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does the end of what is typed, as where there is no terminal; the other ranks learn of it."""
    ranks: Any = SimpleNamespace(rank=1, world_size=2, store=dist.HashStore())
    dog = watchdog.Watchdog(ranks, None)
    end = Mock(side_effect=SystemExit)
    monkeypatch.setattr(watchdog, "end_at_once", end)
    with pytest.raises(SystemExit), dog.ending_clearly():
        raise BdbQuit
    end.assert_called_once_with(1)
    assert capsys.readouterr().err == "rank 1: the run was ended from the debugger\n"
    assert dog.notices.read() == Notice(1, "error", "ended from the debugger")


def test_the_recorder_knows_collectives_over_gloo(ranks: RankPool) -> None:
    assert ranks.run(_gather_over_ep, 4) == ["all_gather over ep of Float [2]"] * 4


def _gather_over_ep() -> str:
    from expertmesh.sharding.mesh import build_mesh
    from expertmesh.sharding.runtime.watchdog import recorded_collectives

    mesh = build_mesh("cpu", Topology(4, 2))
    dist.all_gather([torch.empty(2), torch.empty(2)], torch.zeros(2), group=mesh.ep.get_group())
    return str(recorded_collectives()[-1]).partition(", called")[0]
