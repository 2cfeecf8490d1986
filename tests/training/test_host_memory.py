"""Copies from host memory for which the host waits, as a dry run counts them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.hf_model.image_costs import put_on_host
from expertmesh.moe.util.gpu import bring_to, computing_values, rehearsing_gpu
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.fake_tensors import FakeTensors
from expertmesh.training.planning.rehearsal.host_memory import HOST, HostMemory
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import tiny_config
from tests.training.dry_runs import CLUSTER, flags_of

CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "numbers": (lambda there, here: torch.tensor([1, 2], device=there.device), 1),
    "numbers in host memory": (lambda there, here: torch.tensor([1, 2]), 0),
    "no numbers": (lambda there, here: torch.tensor([], device=there.device), 0),
    "made there": (lambda there, here: torch.arange(4, device=there.device).to(there.device), 0),
    "made here": (lambda there, here: torch.arange(4).to(there.device), 1),
    "moved": (lambda there, here: here.to(there.device), 1),
    "moved to where another is": (lambda there, here: here.to(there), 1),
    "moved once": (lambda there, here: here.to(there.device).to(there.device), 1),
    "stays here": (lambda there, here: (here.to("cpu"), here.to(torch.float64), here.to(here)), 0),
    "not pinned": (lambda there, here: here.to(there.device, non_blocking=True), 1),
    "pinned": (lambda there, here: here.pin_memory().to(there.device), 1),
    "queued": (lambda there, here: here.pin_memory().to(there.device, non_blocking=True).to(there.device), 0),
    "brought": (lambda there, here: bring_to(here, there.device), 0),
    "what follows from it": (lambda there, here: (here + 1).cumsum(0).to(there.device), 1),
    "parts": (lambda there, here: [part.to(there.device) for part in here.split(2)], 2),
    "copied": (lambda there, here: there.copy_(here), 1),
    "copied from there": (lambda there, here: here.copy_(there.cpu()), 0),
    "put in its place": (lambda there, here: there.__setitem__(slice(0, 4), here), 1),
    "an index": (lambda there, here: there[here], 1),
    "an index of one dim": (lambda there, here: there.view(2, 2)[:, here[:2]], 1),
    "an index of its own": (lambda there, here: here[here], 0),
    "of none": (lambda there, here: there[here[:0]], 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_copies_that_are_waited_for(name: str) -> None:
    call, waits = CALLS[name]
    found: list[int] = []
    with rehearsing_gpu(), FakeTensors(), HostMemory(lambda: found.append(1)):
        there, here = (torch.zeros(4, dtype=torch.int64, device=device) for device in (torch.device("cpu"), None))
        call(there, here)
    assert sum(found) == waits


def test_what_is_made_where_a_known_tensor_lies() -> None:
    found: list[int] = []
    here, there = torch.zeros(2), torch.zeros(2)
    with rehearsing_gpu(), HostMemory(lambda: found.append(1)):
        made = torch.arange(4, device=put_on_host(here).device)
        assert made.device == HOST
        assert made.to(there.device).to(there.device).device == there.device
    assert sum(found) == 1


def test_values_that_the_host_computes_are_copied_nowhere() -> None:
    found: list[int] = []
    here = put_on_host(torch.zeros(2))
    with HostMemory(lambda: found.append(1)):
        here.to(torch.device("cpu"))
        with rehearsing_gpu(), computing_values():
            here.to(torch.device("cpu"))
    assert not found


def test_where_samples_lie_is_not_waited_for() -> None:
    """Of packed rows, which DeltaNet takes sample by sample: one wait a step and one a MoE layer."""
    step = Asked(flags_of(ep_size=2, packing=True), 2, CLUSTER, routing=GivenRouting(samples=2))
    assert rehearse(step, tiny_config("qwen3_next")).recorder.waits == 1 + 2


def test_what_a_step_counts_in_host_memory_is_read_without_waiting() -> None:
    """Shampoo's steps, one number a parameter."""
    step = Asked(flags_of(optim="shampoo"), 1, CLUSTER, routing=GivenRouting(samples=2))
    assert rehearse(step, tiny_config("olmoe")).recorder.waits == 1
