"""The peak of a recorded step's memory, against one counted by hand."""

from types import SimpleNamespace
from typing import Any

from expertmesh.training.monitoring.attribution import StepPlace
from expertmesh.training.planning.planner.account import KINDS, Figures, at_layers
from expertmesh.training.planning.planner.clock import StepTime
from expertmesh.training.planning.rehearsal.peaks import held_at
from expertmesh.training.planning.rehearsal.recorder import Change, Event


def event(phase: str, part: str, layer: int | None, micro: int | None = 0) -> Event:
    return Event("aten::mm", StepPlace(part, layer), phase, micro)


def figures_of(held: Any) -> Figures:
    return Figures(2, 80, 64, 64, 0, held, {}, {}, StepTime(), {}, 0.0, 0, 0)


def test_by_hand() -> None:
    """What was allocated before an event belongs to it; what is freed again before another one counts all the same."""
    kinds: Any = {1: "parameters", 2: "activations", 3: "working"}
    log = [
        Change(1, 80),
        event("forward", "attention", 0),  # 80, and 64 of the optimizer's state
        Change(2, 100),
        Change(7, 5000),  # of no kind: what only a first step makes
        event("forward", "experts", 1),  # 244
        Change(3, 300),
        Change(3, -300),
        event("backward", "experts", 1),  # 544, for a moment
        Change(2, -100),
        Change(3, 250),
        event("backward", "attention", 0),  # 394
    ]
    recorder: Any = SimpleNamespace(log=log, update_begins=(0, 6))
    held, before_update = held_at(recorder, kinds, state=64)
    assert before_update == (80, 0, 0, 64, 100, 0, 300)
    found = figures_of(held).peak
    assert (found.peak, found.when) == (544, "backward of layer 1, experts")
    assert {name: size for name, size in found.kinds.terms().items() if size} == {
        "parameters": 80, "activations": 100, "working": 300, "optimizer": 64,
    }  # fmt: skip
    assert (found.parameters, found.trained, found.state) == (80, 64, 64)
    assert at_layers(held) == [
        ("forward", 0, 0, 144),
        ("forward", 0, 1, 244),
        ("backward", 0, 1, 544),
        ("backward", 0, 0, 394),
    ]


def test_a_peak_behind_the_last_operator() -> None:
    """It is of the last moment that there is."""
    log = [event("forward", "attention", 0), Change(1, 7)]
    recorder: Any = SimpleNamespace(log=log, update_begins=(0, 6))
    ((moment, kinds),) = held_at(recorder, {1: "working"}, state=0)[0].items()
    assert (moment.phase, moment.layer, sum(kinds)) == ("forward", 0, 7)
    assert dict(zip(KINDS, kinds, strict=True))["working"] == 7
