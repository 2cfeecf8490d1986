"""What was seen of a part of a model, in order, and the spans that it makes.

With more sequences a layer does the same in the same order, and each of its figures grows by as much per sequence.
So what it does with a number of sequences follows from what was seen with fewer and with more, exactly: the moment of
each peak is found anew. Where order or kind of what is done differ, or a number cannot lie between, nothing follows.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....sharding.topology import Axis
from ...model_setup.rates import Work
from ..planner.measured import Measured, MeasuredRange, MeasuredSpan
from .recorder import Event

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class SeenSpans:
    """Entries of a `Tape`: their keys, and the numbers of each."""

    form: tuple[tuple[Hashable, ...], ...]
    numbers: tuple[Numbers, ...]

    def measured(self) -> Measured:
        """The spans they make."""
        reader = _Reader()
        for (kind, *others), numbers in zip(self.form, self.numbers, strict=True):
            getattr(reader, str(kind))(*others, *numbers)
        beside = (reader.kept, reader.kept_backward, reader.carried_on, reader.in_common, reader.kept_casts)
        return Measured(reader.forward, tuple(reader.spans), *beside)


class Tape:
    """Notes what is to make spans."""

    def __init__(self) -> None:
        self._form: list[tuple[Hashable, ...]] = []
        self._numbers: list[Numbers] = []

    def note(self, what: tuple[Hashable, ...], *numbers: float) -> None:
        """what: begins with the name of a method of `_Reader`, which is called with the rest of it and the numbers."""
        self._form.append(what)
        self._numbers.append(numbers)

    def note_event(self, event: Event) -> None:
        operator, size = event.work
        form = ("event", event.name, operator, event.collective, event.group, event.travels, event.waits, event.is_read)
        self.note(form, event.flops, event.needed, event.moved, event.sent, size)

    def seen(self) -> SeenSpans:
        return SeenSpans(tuple(self._form), tuple(self._numbers))


class _Reader:
    def __init__(self) -> None:
        self.forward: tuple[MeasuredSpan, ...] = ()
        self.spans: list[MeasuredSpan] = []
        self.kept = self.kept_backward = self.carried_on = self.in_common = self.kept_casts = 0
        self._level = 0
        self.begin("start", "")

    def begin(self, mark: Any, when: str, region: int = 0) -> None:
        """Begin a span; what was noted since the one before is dropped."""
        self._mark: Any = mark
        self._region = region
        self._events: list[tuple[Any, ...]] = []
        self.freed(when)

    def freed(self, when: str) -> None:
        """What went right now was not there while the span lasts."""
        self._peak, self._when = self._level, when

    def change(self, when: str, more: int) -> None:
        self._level += more
        if self._level > self._peak:
            self._peak, self._when = self._level, when

    def event(self, name: str, *figures: Any) -> None:
        self._events.append(figures)

    def cut(self, mark: Any, when: str, region: int, calls: int) -> None:
        """The span ends here, and with `mark` the next one begins."""
        stretches = tuple(_stretches(self._events))
        needed = sum(needed for *_, needed, _, _, _ in self._events)
        found = (self._peak, self._level, self._when, stretches, calls, needed, self._region)
        self.spans.append(MeasuredSpan(self._mark, *found))
        self.begin(mark, when, region)

    def turn(self) -> None:
        """Forward has ended, backward begins."""
        self.forward, self.spans = tuple(self.spans), []
        if not self.kept:
            self.kept = self._level

    def keep(self, without: int) -> None:
        self.kept = self._level - without

    def keep_backward(self, without: int) -> None:
        self.kept_backward = self._level - without

    def carried(self, size: int) -> None:
        self.carried_on = size

    def casts(self, size: int) -> None:
        self.kept_casts = size

    def common(self, size: int) -> None:
        self.in_common = size


def _stretches(events: Sequence[tuple[Any, ...]]) -> Iterator[MeasuredRange]:
    kernels: Counter[tuple[float, int, Work]] = Counter()

    def ended(
        then: Literal["", "send", "arrive", "exchange"],
        sent: float = 0.0,
        group: Axis = "ep",
        is_read: bool = False,
        exchange: Any = "all-to-all",
    ) -> MeasuredRange:
        found = tuple((*kernel, times) for kernel, times in kernels.items())
        kernels.clear()
        return MeasuredRange(found, then, sent, group, is_read, exchange)

    for operator, collective, group, travels, waits, is_read, flops, _, moved, sent, size in events:
        if waits:
            yield ended("arrive", sent, group)
        elif collective is None:
            kernels[flops, moved, Work(operator, size)] += 1
        else:
            yield ended("send" if travels else "exchange", sent, group, is_read, collective)
    yield ended("")


def between(low: SeenSpans, high: SeenSpans, beyond: int, whole: int) -> SeenSpans | None:
    """What lies `beyond` / `whole` of the way from one to the other; None where it does not follow."""
    if low.form != high.form:
        return None
    numbers = [on_line(a, b, beyond, whole) for a, b in zip(low.numbers, high.numbers, strict=True)]
    found = [each for each in numbers if each is not None]
    return SeenSpans(low.form, tuple(found)) if len(found) == len(numbers) else None


def on_line(low: Numbers, high: Numbers, beyond: int, whole: int) -> Numbers | None:
    """Each number so far on the way; None where between whole numbers none is there."""
    found: list[float] = []
    for a, b in zip(low, high, strict=True):
        if a == b:
            found.append(a)
        elif float(a).is_integer() and float(b).is_integer():
            more, rest = divmod(int(b - a) * beyond, whole)
            if rest:
                return None
            found.append(a + more)
        else:
            found.append(a + (b - a) * beyond / whole)
    return tuple(found)
