"""What a rank holds over a step: the peak by kind of memory, and of every layer and phase."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....moe.util.step_parts import STEP_PARTS
from ....sharding.state import local_tensor
from ...monitoring.attribution import FSDP, LASTING
from ..memory import Memory, MemoryTerm
from .live_memory import LiveTensors
from .recorder import Event, Maker, Recorder

Place = tuple[str, int | None, int | None]
"""Phase, number of the forward, layer."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank's tensors, in any step after the first.

    peak: the most bytes. when: where the step was then. kinds: the peak by kind. parameters: of these, all that the
    model holds; trained: those of them that are trained. state: the optimizer's. at: the most at each place.
    """

    peak: int
    when: str
    kinds: Memory
    parameters: int
    trained: int
    state: int
    at: Mapping[Place, int]


def peak_memory(
    recorder: Recorder, kinds: Mapping[int, MemoryTerm], model: Any, optimizer: torch.optim.Optimizer
) -> PeakMemory:
    """The peak of what was recorded. kinds: of its storages, from `kinds_of_storages`. The optimizer's state, which the
    first update makes, counts from the start."""
    parameters, state = [p for p in model.parameters() if not p.is_meta], _bytes(_state(optimizer))
    held: defaultdict[MemoryTerm, int] = defaultdict(int, {"optimizer": state})
    total = peak = state
    at_peak = dict(held)
    when: Event | None = None
    at: defaultdict[Place, int] = defaultdict(int)
    most = 0
    for entry in recorder.log:
        if isinstance(entry, Event):
            # what has changed since the event before belongs to this one
            most = max(most, total)
            place = (entry.phase, entry.micro, entry.place.layer)
            at[place] = max(at[place], most)
            if most == peak and when is None:
                when = entry
            most = 0
        elif (kind := kinds.get(entry.storage)) is not None:
            held[kind] += entry.more
            total += entry.more
            most = max(most, total)
            if total > peak:
                peak, at_peak, when = total, dict(held), None
    return PeakMemory(
        peak,
        "the end" if when is None else when.told,
        Memory(**at_peak),
        _bytes(parameters),
        _bytes(p for p in parameters if p.requires_grad),
        state,
        dict(at),
    )


def kinds_of_storages(
    recorder: Recorder, live: LiveTensors, casts: Container[int], model: Any, optimizer: torch.optim.Optimizer
) -> dict[int, MemoryTerm]:
    """Kinds of storages by number; without those that only a first step makes, such as an optimizer's state. casts:
    from `noting_casts`."""
    freed_in = _phases_of_end(recorder)
    kinds: dict[int, MemoryTerm] = {
        number: _kind(maker, freed_in.get(number), number in casts) for number, maker in recorder.makers.items()
    }

    def name(tensors: Iterable[Tensor], kind: MemoryTerm) -> None:
        kinds.update((number, kind) for tensor in tensors if (number := live.number(tensor)) is not None)

    name(model.buffers(), "working")
    name((p for p in model.parameters() if not p.requires_grad), "frozen")
    name((p for p in model.parameters() if p.requires_grad), "parameters")
    name((p.grad for p in model.parameters() if p.grad is not None), "gradients")
    # of a user's own optimizer nothing says which of its functions make its state
    is_known = type(optimizer).__module__ in STEP_PARTS
    state = set() if is_known else {live.number(tensor) for tensor in _state(optimizer)}
    return {
        number: kind
        for number, kind in kinds.items()
        if number not in recorder.makers or not (number in state or recorder.makers[number].place.part == LASTING)
    }


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _kind(maker: Maker, freed_in: str | None, is_cast: bool) -> MemoryTerm:
    outlasts_forward = maker.phase == "forward" and freed_in != "forward"
    # experts' weights in the compute dtype are what FSDP would have gathered, were they its
    if maker.place.part == FSDP or (is_cast and outlasts_forward):
        return "gathered"
    return "activations" if outlasts_forward and freed_in == "backward" else "working"


def _phases_of_end(recorder: Recorder) -> dict[int, str]:
    """The phase in which each storage was last freed."""
    sizes: defaultdict[int, int] = defaultdict(int)
    ends: dict[int, str] = {}
    phase = "forward"
    for entry in recorder.log:
        if isinstance(entry, Event):
            phase = "backward" if entry.phase == "recomputation" else entry.phase
        else:
            sizes[entry.storage] += entry.more
            if sizes[entry.storage] == 0:
                ends[entry.storage] = phase
    return ends


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's shards; of those that share a storage, once."""
    storages = [local_tensor(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
