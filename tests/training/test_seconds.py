"""The time of a step on a rank's streams, of few events, against sums by hand; and that FSDP's waits are recorded."""

from dataclasses import asdict
from typing import Any

import pytest

from expertmesh.sharding.pipeline.schedule import Action
from expertmesh.training.model_setup.rates import RateConstant, Rates
from expertmesh.training.monitoring.attribution import FSDP, StepPlace
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.hardware import Device, Hardware, Link
from expertmesh.training.planning.rehearsal.recorder import Event
from expertmesh.training.planning.rehearsal.seconds import step_seconds
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import tiny_config
from tests.training.dry_runs import CLUSTER, flags_of

PAIR = (0, 1)


def cluster(**constants: float) -> Cluster:
    """A byte takes a second, on any way."""
    told = {"launch": 0.0, "call": 0.0} | constants
    rates = Rates(constants=tuple(RateConstant(name.replace("_", " "), value, "") for name, value in told.items()))
    device = Device(1.0, 1.0, 1.0, 0.0, host_bandwidth=1.0)
    return Cluster(Hardware("a card", device, Link(1.0, 0.0), Link(1.0, 0.0), rates), 8, 0.0)


def event(part: str = "norms", phase: str = "forward", micro: int | None = 0, **changes: Any) -> Event:
    return Event("an operator", StepPlace(part, 0), phase, micro, **changes)


def kernel(seconds: int, **changes: Any) -> Event:
    return event(read=seconds, **changes)


def gather(seconds: float, unit: int) -> Event:
    return event(FSDP, collective="all-gather", sent=seconds, ranks=PAIR, unit=unit)


def wait_for(unit: int) -> Event:
    return event(FSDP, waits=True, unit=unit)


def all_to_all(seconds: float) -> Event:
    return event("dispatch", collective="all-to-all", sent=seconds, ranks=PAIR, travels=True)


ARRIVED = event("dispatch", waits=True, ranks=PAIR)
BESIDE = {"compute_beside": 0.5, "collective_beside": 0.5}
UPDATE: dict[str, Any] = {"phase": "optimizer step", "micro": None}
STEPS: dict[str, tuple[list[Event], dict[str, float], dict[str, float]]] = {
    "kernels one after the other": ([kernel(2), kernel(3)], {}, {"elementwise": 5, "total": 5}),
    "a matmul": ([event(flops=3.0, read=1)], {}, {"matrices": 3, "total": 3}),
    "waited for at once": ([gather(5, 1), wait_for(1), kernel(2)], {}, {"sharding": 5, "exposed": 5, "total": 7}),
    "hidden": ([gather(3, 1), kernel(4), wait_for(1)], {}, {"sharding": 3, "exposed": 0, "total": 4}),
    "the rest is waited for": ([gather(5, 1), kernel(2), wait_for(1)], {}, {"exposed": 3, "total": 5}),
    # in 6 s the collective is done, and 3 s of the kernel
    "both are slower": ([gather(3, 1), kernel(4), wait_for(1)], BESIDE, {"elementwise": 4, "exposed": 3, "total": 7}),
    "one after the other on a stream": ([gather(2, 1), gather(3, 2), wait_for(2)], {}, {"exposed": 5, "total": 5}),
    "the first of two": ([gather(2, 1), gather(3, 2), wait_for(1), kernel(9)], {}, {"exposed": 2, "total": 11}),
    "nobody waits for it": ([kernel(1), gather(2, 1)], {}, {"exposed": 2, "total": 3}),
    "waited for twice": ([gather(2, 1), wait_for(1), wait_for(1)], {}, {"exposed": 2, "total": 2}),
    "rows on their way": ([all_to_all(6), kernel(4), ARRIVED], {}, {"all_to_alls": 2, "total": 6}),
    "rows beside kernels": ([all_to_all(3), kernel(4), ARRIVED], BESIDE, {"all_to_alls": 3, "total": 7}),
    "two streams": (
        [all_to_all(3), gather(4, 1), ARRIVED, wait_for(1)],
        {},
        {"all_to_alls": 3, "exposed": 1, "total": 4},
    ),
    "a sum over all": ([event(**UPDATE, collective="all-reduce", sent=3.0, ranks=PAIR)], {}, {"all_to_alls": 3}),
    "alone": ([event(FSDP, collective="all-gather", sent=0.0, ranks=(0,), unit=1), wait_for(1)], {}, {"total": 0}),
    "activations": (
        [event("attention", collective="all-gather", sent=3.0, ranks=PAIR)],
        {},
        {"gathers": 3, "total": 3},
    ),
    "from host memory": ([event(from_host=4), gather(1, 1), wait_for(1)], {}, {"sharding": 5, "exposed": 5}),
    # the host has called them after 3 and 6 s
    "the host is late": (
        [kernel(1, calls=1), kernel(1, calls=1)],
        {"call": 3.0},
        {"host": 6, "launching": 5, "elementwise": 2, "total": 7},
    ),
    "the host is ahead": ([kernel(9, calls=1), kernel(9, calls=1)], {"call": 3.0}, {"launching": 3, "total": 21}),
    # which has nothing called in advance after it
    "a read": (
        [kernel(4, calls=1), event(is_read=True), kernel(2, calls=1)],
        {"call": 1.0, "wait": 0.5},
        {"launching": 2.5, "elementwise": 6, "total": 8.5},
    ),
    "an update": ([kernel(2, **UPDATE, calls=1)], {"call": 3.0}, {"update": 5, "launching": 0, "host": 3, "total": 5}),
}


@pytest.mark.parametrize("name", STEPS)
def test_by_hand(name: str) -> None:
    events, constants, told = STEPS[name]
    found, _ = step_seconds(events, {None: 1, 0: 1}, cluster(**constants))
    terms = asdict(found) | {"total": found.total}
    assert {term: terms[term] for term in told} == pytest.approx(told)


def test_a_micro_batch_stands_for_several() -> None:
    events = [kernel(1), kernel(2, micro=1), kernel(4, **UPDATE)]
    found, _ = step_seconds(events, {None: 1, 0: 1, 1: 3}, cluster())
    assert (found.elementwise, found.update, found.total) == (7, 4, 11)


def test_seconds_of_a_pipelines_actions() -> None:
    """Of the mean micro-batch, with all that an action has begun, and without what it waits for other stages."""
    forward, backward = (Action(kind, 3, 0) for kind in ("forward", "backward"))
    events = [
        event(action=forward, collective="receive", sent=9.0, ranks=PAIR),
        kernel(2, action=forward),
        event(action=forward, collective="send", sent=9.0, ranks=PAIR),
        kernel(4, action=backward),
        event(FSDP, collective="reduce-scatter", sent=6.0, ranks=PAIR, action=backward),
        kernel(3, action=Action("forward", 3, 1), micro=1),
        kernel(5, **UPDATE),
    ]
    step, actions = step_seconds(events, {None: 1, 0: 1, 1: 3}, cluster())
    assert actions == {"forward of stage 3": (2 + 3 * 3) / 4, "backward of stage 3": 10 / 4}
    assert step.total == 2 + 10 + 3 * 3 + 5


def test_kernels_of_a_layer_come_after_the_wait_for_its_parameters() -> None:
    """As FSDP has it, whose next layer's gathering begins before."""
    asked = Asked(flags_of(ep_size=4, gradient_checkpointing="full"), 8, CLUSTER)
    events = rehearse(asked, tiny_config("mixtral")).recorder.events
    of_micro = [each for each in events if each.micro == 0]
    under_way: list[int] = []
    ahead = 0
    for each in of_micro:
        if each.collective == "all-gather" and each.unit is not None and each.unit not in under_way:
            under_way.append(each.unit)
        elif each.waits and each.unit is not None:
            # in the order in which they were begun, as all are on one stream
            assert under_way.pop(0) == each.unit
            ahead += bool(under_way)
    assert not under_way
    assert ahead > 0
    for phase in ("forward", "recomputation"):
        for layer in range(3):
            own = [n for n, each in enumerate(of_micro) if each.phase == phase and each.place.layer == layer]
            first = next(n for n in own if of_micro[n].is_kernel and of_micro[n].place.part == "attention")
            waits = [n for n, each in enumerate(of_micro) if each.waits and each.unit is not None and n < first]
            before = [n for n, each in enumerate(of_micro) if each.place.part == "expert GEMMs" and n < first]
            assert waits
            # it is waited for after the last layer's kernels
            assert not before or waits[-1] > before[-1], (phase, layer)
