"""Extends what a few layers have done in a step to all layers: in order, with all changes of memory.

Layers of one kind between neighbours of the same kinds do the same. So where one stood aside, there what its stand-in
has done is put in; and what layers have made and what is in no layer frees, goes once for each of them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .layer_kinds import Stack
from .recorder import Change, Event, Maker, Mark, Recorder

Entry = Event | Change


@dataclass(frozen=True)
class WholeStep:
    """A step of all layers.

    log: events, and changes of memory before each. calls: operators by micro-batch; None: in the update.
    """

    log: list[Entry]
    calls: dict[int | None, int]

    @property
    def events(self) -> list[Event]:
        return [entry for entry in self.log if isinstance(entry, Event)]


@dataclass
class _Stretch:
    """The log from one mark to the next."""

    mark: Mark
    entries: list[Entry]
    num_calls: int = 0


def whole_step(recorder: Recorder, stack: Stack) -> WholeStep:
    """The step of all layers, from what `recorder` has seen in a model shortened to `stack`."""
    stretches = _stretches(recorder)
    of_layer: dict[tuple[str, int | None, int], _Stretch] = {}
    for stretch in stretches:
        if (layer := stretch.mark.layer) is not None and stack.is_rehearsed(layer):
            key = (stretch.mark.phase, stretch.mark.micro, layer)
            assert key not in of_layer, key
            of_layer[key] = stretch
    log: list[Entry] = []
    calls: Counter[int | None] = Counter()
    for stretch in stretches:
        phase, micro, layer = stretch.mark.phase, stretch.mark.micro, stretch.mark.layer
        if layer is None:
            log.extend(_outside(stretch, stack, recorder.makers))
            calls[micro] += stretch.num_calls
            continue
        # layers that stand aside have no backward that would say where it begins
        following = _standing_aside_before(layer, stack) if phase == "backward" else ()
        for number in (layer, *following):
            found = of_layer.get((phase, micro, stack.stand_ins[number]))
            if found is not None:
                log.extend(_of_layer(found, number))
                calls[micro] += found.num_calls
    return WholeStep(log, calls)


def _stretches(recorder: Recorder) -> list[_Stretch]:
    stretches = [_Stretch(Mark("forward", None, None, 0), [])]
    for entry in recorder.log:
        if isinstance(entry, Mark):
            stretches[-1].num_calls = entry.num_calls - stretches[-1].mark.num_calls
            stretches.append(_Stretch(entry, []))
        else:
            stretches[-1].entries.append(entry)
    stretches[-1].num_calls = recorder.num_calls - stretches[-1].mark.num_calls
    return stretches


def _standing_aside_before(layer: int, stack: Stack) -> Iterator[int]:
    """Layers between a layer and the one before it that is run, backwards."""
    number = layer - 1
    while number >= 0 and not stack.is_rehearsed(number):
        yield number
        number -= 1


def _outside(stretch: _Stretch, stack: Stack, makers: dict[int, Maker]) -> Iterator[Entry]:
    for entry in stretch.entries:
        if isinstance(entry, Change) and entry.is_gone and (maker := makers.get(entry.storage)) is not None:
            yield replace(entry, more=entry.more * stack.times(maker.marked))
        else:
            yield entry


def _of_layer(stretch: _Stretch, number: int) -> Iterator[Entry]:
    assert stretch.mark.layer is not None
    further = number - stretch.mark.layer
    for entry in stretch.entries:
        if isinstance(entry, Change) or entry.place.layer is None or further == 0:
            yield entry
        else:
            yield replace(entry, place=replace(entry.place, layer=entry.place.layer + further))
