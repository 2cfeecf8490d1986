"""When Python's garbage collector runs: between steps that are the same on all ranks."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from expertmesh.training.monitoring.collector import EVERY, SteadyCollector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.freeze()  # see conftest.py
    gc.enable()


class Cycle:
    """Holds itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_it_runs_when_told_and_not_by_itself() -> None:
    gc.unfreeze()
    with SteadyCollector() as collector:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        cycle = weakref.ref(Cycle())
        kept: list[list[int]] = [[] for _ in range(100_000)]  # of which the collector would have run many times
        collector.step(EVERY - 1)
        assert cycle() is not None
        collector.step(EVERY)
        assert cycle() is None
        del kept
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_that_grew_old_are_freed_too() -> None:
    with SteadyCollector() as collector:
        old = Cycle()
        collector.step(EVERY)
        collector.step(2 * EVERY)
        gone = weakref.ref(old)
        del old
        collector.step(3 * EVERY)
        assert gone() is None


def test_everything_is_as_before_after_an_error() -> None:
    gc.unfreeze()
    with pytest.raises(ZeroDivisionError), SteadyCollector():
        raise ZeroDivisionError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_others_have_chosen_stays() -> None:
    gc.disable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with SteadyCollector():
        pass
    assert not gc.isenabled()
    # what other threads let go of meanwhile is frozen no longer
    assert 0.9 * frozen < gc.get_freeze_count() <= frozen
