"""Counting the memory of tensors."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.live_memory import LiveTensors
from expertmesh.training.planning.rehearsal.recorder import Recorder
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import tiny_config
from tests.training.dry_runs import CLUSTER, flags_of

KB = 1024


def test_peak_of_live_tensors() -> None:
    held = torch.zeros(KB // 4)
    with LiveTensors([held, held[:10]]) as live:
        assert live.total == KB  # a view holds no memory of its own
        one = held + 1
        two = one * 2
        assert live.total == 3 * KB
        two.add_(1)
        del one
        assert live.total == 2 * KB
        two = two.view(2, -1)
        three = torch.empty(4 * KB, dtype=torch.uint8)
        assert live.total == 6 * KB
        del two, three
    assert live.total == KB
    assert live.peak == 6 * KB


def test_storages_that_are_emptied() -> None:
    """As FSDP empties what it has gathered, and fills it again."""
    held = torch.zeros(KB // 4)
    with LiveTensors([held]) as live:
        held.untyped_storage().resize_(0)
        assert live.total == 0
        held.untyped_storage().resize_(2 * KB)
        assert live.total == live.peak == 2 * KB


def test_what_autograd_keeps_is_live() -> None:
    x = torch.zeros(KB // 4, requires_grad=True)
    with LiveTensors([x]) as live:
        loss = x.exp().exp().sum()
        kept = live.total
        loss.backward()
    assert kept == 3 * KB + 4  # both results of exp, which their gradients need, and the sum
    del loss
    assert live.total == 2 * KB  # x and its gradient


class Cycle:
    """Holds itself: only the garbage collector frees it."""

    def __init__(self, held: Any = None) -> None:
        self.itself, self.held = self, held


@contextmanager
def collecting_every(objects: int) -> Iterator[None]:
    """Within it, the garbage collector would run whenever so many objects more are there."""
    before = gc.get_threshold()
    gc.set_threshold(objects)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_held_while_tensors_are_counted_and_then_as_before(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    try:
        with collecting_every(10), LiveTensors([]) as live:
            for _ in range(100):
                Cycle(torch.zeros(KB // 4))
            assert live.total == 100 * KB
            gc.collect()
            assert live.total == 0
        assert gc.isenabled() == is_on
        with pytest.raises(ZeroDivisionError), LiveTensors([]):
            raise ZeroDivisionError
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


SETTINGS = {
    "tp, cp, 8-bit state": {"ep_size": 2, "tp_size": 2, "cp_size": 2, "optim": "adamw_torch_8bit"},
    "packed, selective": {"ep_size": 4, "packing": True, "gradient_checkpointing": "selective"},
}


@pytest.mark.slow
def test_a_dry_runs_memory_does_not_depend_on_when_the_collector_runs() -> None:
    """Even if every operator of the step leaves cyclic garbage that holds what it has made."""
    called = Recorder.__torch_dispatch__

    def littering(recorder: Recorder, *args: Any) -> Any:
        result = called(recorder, *args)
        Cycle(result)
        return result

    def peak() -> tuple[int, int]:
        held = rehearse(Asked(flags_of(**SETTINGS["tp, cp, 8-bit state"]), 8, CLUSTER), tiny_config("mixtral")).held
        return max(map(sum, held.values())), sum(map(sum, held.values()))

    alone = peak()
    found = []
    with mock.patch.object(Recorder, "__torch_dispatch__", littering):
        for objects in (10, 1000, 10**6):
            with collecting_every(objects):
                found.append(peak())
    assert found[0] == found[1] == found[2]
    assert found[0][0] > alone[0], "what the garbage holds counts"


@pytest.mark.parametrize("name", SETTINGS)
def test_no_tensor_of_a_step_waits_for_the_collector(name: str) -> None:
    """A run calls it every 50 steps: what waits for it would be held 50 times."""
    leave = LiveTensors.__exit__
    held: list[Any] = []

    def leaving(live: LiveTensors, *error: Any) -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        # a model that was probed before the step has no memory
        held.extend(tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor) and not each.is_meta)
        gc.garbage.clear()
        leave(live, *error)

    gc.collect()
    with mock.patch.object(LiveTensors, "__exit__", leaving):
        rehearse(Asked(flags_of(**SETTINGS[name]), 8, CLUSTER), tiny_config("mixtral"))
    assert held == []
