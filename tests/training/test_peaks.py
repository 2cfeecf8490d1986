"""The peak of a recorded step's memory, against one counted by hand."""

from types import SimpleNamespace
from typing import Any

import torch

from expertmesh.training.monitoring.attribution import StepPlace
from expertmesh.training.planning.rehearsal.peaks import peak_memory
from expertmesh.training.planning.rehearsal.recorder import Change, Event


def event(phase: str, part: str, layer: int | None, micro: int | None = 0) -> Event:
    return Event("aten::mm", StepPlace(part, layer), phase, micro)


def test_by_hand() -> None:
    """What was allocated before an event belongs to it; what is freed again before another one counts all the same."""
    model: Any = torch.nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    kinds: Any = {1: "parameters", 2: "activations", 3: "working"}
    log = [
        Change(1, 80, False),
        event("forward", "attention", 0),  # 80, and 64 of momentum
        Change(2, 100, False),
        Change(7, 5000, False),  # of no kind: what only a first step makes
        event("forward", "experts", 1),  # 244
        Change(3, 300, False),
        Change(3, -300, True),
        event("backward", "experts", 1),  # 544, for a moment
        Change(2, -100, True),
        Change(3, 250, False),
        event("backward", "attention", 0),  # 394
    ]
    recorder: Any = SimpleNamespace(log=log)
    found = peak_memory(recorder, kinds, model, optimizer)
    assert (found.peak, found.when) == (544, "backward of layer 1, experts")
    assert {name: size for name, size in found.kinds.terms().items() if size} == {
        "parameters": 80, "activations": 100, "working": 300, "optimizer": 64,
    }  # fmt: skip
    assert (found.parameters, found.trained, found.state) == (80, 64, 64)
    assert found.at == {
        ("forward", 0, 0): 144,
        ("forward", 0, 1): 244,
        ("backward", 0, 1): 544,
        ("backward", 0, 0): 394,
    }


def test_a_peak_behind_the_last_operator() -> None:
    recorder: Any = SimpleNamespace(log=[event("forward", "attention", 0), Change(1, 7, False)])
    parameter = torch.nn.Parameter(torch.zeros(1))
    model: Any = torch.nn.ParameterList([parameter])
    found = peak_memory(recorder, {1: "working"}, model, torch.optim.SGD([parameter], lr=0.1))
    assert (found.peak, found.when) == (7, "the end")
