"""What a rank holds over a step: the peak by kind of memory, and of every layer and phase."""

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....moe.util.step_parts import STEP_PARTS
from ....sharding.state import local_storage
from ...monitoring.attribution import FSDP, LASTING
from ..memory import MemoryTerm
from ..planner.account import KINDS, Moment
from .live_memory import LiveTensors
from .recorder import Change, Event, Maker, Recorder


def held_at(
    recorder: Recorder, kinds: Mapping[int, MemoryTerm], state: int
) -> tuple[dict[Moment, tuple[int, ...]], tuple[int, ...]]:
    """The most bytes that a rank's tensors hold at each moment of a step, by kind, in the order of `KINDS`; and what
    they hold when the update begins.

    Args:
        kinds: of its storages, from `kinds_of_storages`. state: bytes of the optimizer's, which the first update makes:
            they count from the start.
    """
    held = dict.fromkeys(KINDS, 0) | {"optimizer": state}
    total = most = state
    at_most = before_update = tuple(held.values())
    # of each moment its first event, the most bytes and their kinds; a `Moment` for each event would take too long
    found: dict[Hashable, tuple[Event, int, tuple[int, ...]]] = {}
    key: Hashable = None
    for number, entry in enumerate(recorder.log):
        if number == recorder.update_begins[1]:
            before_update = tuple(held.values())
        if isinstance(entry, Event):
            # what has changed since the event before belongs to this one
            key = entry.of_moment
            known = found.get(key)
            if known is None or most > known[1]:
                found[key] = (entry if known is None else known[0]), most, at_most
            most, at_most = total, tuple(held.values())
        elif (kind := kinds.get(entry.storage)) is not None:
            held[kind] += entry.more
            total += entry.more
            if total > most:
                most, at_most = total, tuple(held.values())
    if found and most > found[key][1]:
        found[key] = found[key][0], most, at_most
    return {event.moment: of_kinds for event, _, of_kinds in found.values()}, before_update


def kept_of(recorder: Recorder, kinds: Mapping[int, MemoryTerm]) -> list[tuple[Maker, int]]:
    """Bytes of each storage that autograd keeps from a forward to its backward, with what made it."""
    sizes: defaultdict[int, int] = defaultdict(int)
    most: defaultdict[int, int] = defaultdict(int)
    for entry in recorder.log:
        if isinstance(entry, Change):
            sizes[entry.storage] += entry.more
            most[entry.storage] = max(most[entry.storage], sizes[entry.storage])
    return [(maker, most[n]) for n, maker in recorder.makers.items() if kinds.get(n) == "activations"]


def kinds_of_storages(
    recorder: Recorder,
    live: LiveTensors,
    casts: Container[int],
    model: Any,
    optimizer: torch.optim.Optimizer,
    shared: Iterable[Tensor] = (),
    gradients: Iterable[int | None] = (),
) -> dict[int, MemoryTerm]:
    """Kinds of storages by number; without those that only a first step makes, such as an optimizer's state. casts:
    from `noting_casts`. shared: memory that collectives have in common. gradients: storages of those that are
    replaced."""
    freed_in = _phases_of_end(recorder)
    kinds: dict[int, MemoryTerm] = {
        number: _kind(maker, freed_in.get(number), number in casts) for number, maker in recorder.makers.items()
    }

    def name(tensors: Iterable[Tensor], kind: MemoryTerm) -> None:
        kinds.update((number, kind) for tensor in tensors if (number := live.number(tensor)) is not None)

    name(shared, "gathered")
    name(model.buffers(), "working")
    name((p for p in model.parameters() if not p.requires_grad), "frozen")
    name((p for p in model.parameters() if p.requires_grad), "parameters")
    name((p.grad for p in model.parameters() if p.grad is not None), "gradients")
    kinds.update((number, "gradients") for number in gradients if number is not None)
    # of a user's own optimizer nothing says which of its functions make its state
    is_known = type(optimizer).__module__ in STEP_PARTS
    state = set() if is_known else {live.number(tensor) for tensor in optimizer_state(optimizer)}
    return {
        number: kind
        for number, kind in kinds.items()
        if number not in recorder.makers or not (number in state or recorder.makers[number].place.part == LASTING)
    }


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
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


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's shards; of those that share a storage, once."""
    storages = [local_storage(tensor) for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
