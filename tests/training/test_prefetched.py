"""Batches that a thread makes ahead of the steps, in pinned memory, are those that would have been made."""

import threading
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.training.data.batch import Batch, BatchMaker, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import DataOrder
from expertmesh.training.run import loop
from expertmesh.training.run.loop import made_ahead
from expertmesh.training.tasks.task import TaskInputs
from tests.parity.case import random_samples
from tests.training.test_batches import assert_same

ROWS = [[sample] for sample in random_samples([9, 30, 17, 5, 8, 21, 3])]
CPU = torch.device("cpu")


BATCHES = {
    "padded": collate(ROWS[:3]),
    "alone": collate(ROWS[:1]),
    "nothing": collate([]),
    "packed": collate([[ROWS[0][0], ROWS[1][0]], ROWS[2]]),
    "shared": collate(ROWS[:3], CPGroup(2, 1, None)),
    "no target": collate([[Sample([5], [True])]]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_all_of_a_batch_is_pinned(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    pinned = batch.pinned()
    assert_same(pinned, batch)
    for theirs, ours in zip(batch.tensors(), pinned.tensors(), strict=True):
        assert theirs is not ours


def loops_run(device: str) -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(data_rank=0, mesh=SimpleNamespace(cp_group=None)), batch_maker=BatchMaker(4),
        task_inputs=TaskInputs(),
        inputs=SimpleNamespace(
            training=SimpleNamespace(
                sequences=lambda row: [ROWS[row]], samples=SimpleNamespace(is_weighted=False)
            ),
            stream=None,
        ),
        order=DataOrder(len(ROWS), 1, 2, 2, seed=0), log=SimpleNamespace(num_steps=6),
        ranks=SimpleNamespace(device=torch.device(device)),
    )  # fmt: skip


def test_the_loop_gets_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a thread as without one, into the fourth epoch."""
    threads: set[threading.Thread] = set()
    devices: list[torch.device] = []

    def unpinned(tensor: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread())
        return tensor

    onto = Batch.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", unpinned)
    monkeypatch.setattr(Batch, "to", lambda self, device: onto(self, CPU))
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    before = set(threading.enumerate())
    with loop._batches(loops_run("cpu"), 1) as following:
        expected = list(following)
        assert set(threading.enumerate()) == before
    with loop._batches(loops_run("cuda:1"), 1) as following:
        found = list(following)
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        for batch, other in zip(ours, theirs, strict=True):
            assert_same(batch, other)
    assert devices == [torch.device("cuda:1")]
    assert len(threads) == 1
    assert threads.isdisjoint(before)
    assert not threads.pop().is_alive()


def test_no_more_than_two_are_made_ahead() -> None:
    made: list[int] = []
    two = threading.Event()

    def make(number: int) -> int:
        made.append(number)
        if number == 2:
            two.set()
        return number

    with made_ahead(make, range(100)) as following:
        assert next(following) == 0
        assert two.wait(20)
        assert made == [0, 1, 2]
    assert len(made) <= 4
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_an_error_is_raised_where_its_batch_is_taken() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise KeyError("in the data")
        return number

    taken: list[int] = []

    def take_all() -> None:
        with made_ahead(make, range(5)) as following:
            for number in following:
                taken.append(number)

    with pytest.raises(KeyError, match="in the data") as raised:
        take_all()
    assert taken == [0, 1]
    assert "make" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_an_error_of_the_loop_ends_the_thread() -> None:
    def fail() -> None:
        with made_ahead(str, range(10**9)) as following:
            next(following)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
