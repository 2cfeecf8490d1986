"""When each action of a pipeline's schedule begins and ends, how long ranks wait, and that none waits for ever. Pure
arithmetic: no process group, no torch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from .schedule import (
    Action,
    Compute,
    Event,
    Exchange,
    Kind,
    Schedule,
    ScheduleName,
    communications,
    make_schedule,
    needed,
    receives,
    sends,
    source,
    stages_of,
)


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Attributes:
        forward, backward, weights: of each stage, for one micro-batch. Where a schedule has no weights, `backward` is
            of all gradients, and `weights` may be empty.
        send: from both ends' having begun an exchange until the output has arrived.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float] = ()
    send: float = 0.0


@dataclass(frozen=True)
class Span:
    """When an action is computed, in seconds since the first one began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each pp rank, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end, of all ranks."""
        return max(span.end for span in chain.from_iterable(self.ranks))

    @property
    def idle(self) -> list[float]:
        """Of these seconds the share in which each rank computes nothing."""
        return [1 - sum(span.end - span.start for span in spans) / self.seconds for spans in self.ranks]

    @property
    def bubble(self) -> float:
        """Of all ranks' seconds together the share in which they compute nothing."""
        return sum(self.idle) / len(self.idle)


def bubble(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> float:
    """The share of idle time in `timeline_of_equal_stages`."""
    return timeline_of_equal_stages(name, pp_size, chunks, micro_batches).bubble


def timeline_of_equal_stages(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> Timeline:
    """A step in which all stages take equally long, a forward a second, backward twice as long, and sending no time;
    with "zero-bubble" the weights' gradients are half of backward."""
    schedule = make_schedule(name, pp_size, chunks, micro_batches)
    num_stages = pp_size * chunks
    backward = 1.0 if name == "zero-bubble" else 2.0
    return simulate(schedule, Costs([1.0] * num_stages, [backward] * num_stages, [1.0] * num_stages))


def check(schedule: Schedule, pp_size: int, chunks: int, micro_batches: int) -> None:
    """Assert of a schedule that it

    - has each action once, on the rank that holds its stage: all forwards; all backwards or none; all weights or none;
    - computes each stage's backwards, and its weights, in the micro-batches' order;
    - receives, of every pair of ranks and direction, in the order in which the other one sends;
    - does not deadlock by the rules of `Timetable`. Waiting there for less, such as with unlimited buffers, it does not
      either.
    """
    kinds = {action.kind for action in chain.from_iterable(schedule)}
    assert len(schedule) == pp_size, (len(schedule), pp_size)
    assert kinds in ({"forward"}, {"forward", "backward"}, {"forward", "backward", "weights"}), kinds
    for rank, actions in enumerate(schedule):
        expected = {
            Action(kind, stage, micro_batch)
            for kind in kinds
            for stage in range(rank, pp_size * chunks, pp_size)
            for micro_batch in range(micro_batches)
        }
        assert len(actions) == len(expected), (rank, len(actions), len(expected))
        assert set(actions) == expected, (rank, set(actions) ^ expected)
        _check_order(actions)
    _check_queues(schedule)
    each = [1.0] * (pp_size * chunks)
    simulate(schedule, Costs(each, each, each))


def _check_order(actions: Sequence[Action]) -> None:
    latest: dict[tuple[Kind, int], Action] = {}
    for action in actions:
        before = latest.get((action.kind, action.stage))
        assert before is None or before.micro_batch < action.micro_batch, f"{action} after {before}"
        latest[action.kind, action.stage] = action


def _check_queues(schedule: Schedule) -> None:
    pp_size, num_stages = len(schedule), stages_of(schedule)
    sent: dict[tuple[int, int, Kind], list[Action | None]] = defaultdict(list)
    received: dict[tuple[int, int, Kind], list[Action | None]] = defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            step = 1 if action.kind == "forward" else -1
            if sends(action, pp_size, num_stages):
                sent[rank, (rank + step) % pp_size, action.kind].append(action)
            if receives(action, pp_size, num_stages):
                received[(rank - step) % pp_size, rank, action.kind].append(source(action, num_stages))
    assert sent == received, "a rank receives in another order than it is sent to"


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a schedule's `communications` with given costs (see `Timetable`).

    Raises:
        AssertionError: the ranks wait for one another; the message has what each waits for.
    """
    return Timetable(schedule).timeline(costs)


class Timetable:
    """What each event of a schedule's `communications` waits for; whatever the costs, it is the same.

    The rules are the strictest under which an executor may run them. A rank does one event after another. In each
    direction its exchanges run one at a time, as in a communicator's stream: it begins one when the one before is done,
    and does nothing else until then. An output travels when both ends have begun their exchange; an exchange is done
    when its output and its input have arrived. An action begins when the exchange that receives its input is done.

    Raises:
        AssertionError: the ranks wait for one another; the message has what each waits for.
    """

    def __init__(self, schedule: Schedule):
        self.num_stages = stages_of(schedule)
        ranks = _follow(schedule, self.num_stages)
        done = [(node, event) for rank in ranks for node, event in zip(rank.done, rank.events, strict=True)]
        # those that wait for the same number of others, one after another, at a time
        done.sort(key=lambda each: each[0].depth)
        rows = {id(node): row for row, (node, _) in enumerate(done, _FIRST_ROW)}
        self.before = np.array([_START if node.before is None else rows[id(node.before)] for node, _ in done])
        self.begun = np.array(
            [[rows[id(begun)] for begun in node.begun] + [_NEVER] * (_MOST_BEGUN - len(node.begun)) for node, _ in done]
        )
        # those of an exchange take none: the last row of `_by_kind`
        self.takes = np.array(
            [
                _KINDS[event.action.kind] * self.num_stages + event.action.stage if isinstance(event, Compute) else -1
                for _, event in done
            ]
        )
        depths = np.array([node.depth for node, _ in done])
        self.bounds = [0, *(np.flatnonzero(np.diff(depths)) + 1).tolist(), len(done)]
        self.ranks = [
            [(rows[id(node)] - _FIRST_ROW, event.action) for node, event in zip(rank.done, rank.events, strict=True)
             if isinstance(event, Compute)]
            for rank in ranks
        ]  # fmt: skip

    def seconds(self, costs: Sequence[Costs]) -> list[float]:
        """With each of these costs, from the first action's start to the last one's end, of all ranks."""
        _, ends = self._run(costs)
        found: list[float] = ends[self.takes >= 0].max(axis=0).tolist()
        return found

    def timeline(self, costs: Costs) -> Timeline:
        """When each action begins and ends."""
        starts, ends = (times[:, 0].tolist() for times in self._run([costs]))
        return Timeline(
            tuple(tuple(Span(action, starts[row], ends[row]) for row, action in actions) for actions in self.ranks)
        )

    def _run(self, costs: Sequence[Costs]) -> tuple[Any, Any]:
        """When each event begins, and when it is done, with each of the costs."""
        takes = np.array([_by_kind(each, self.num_stages) for each in costs]).T[self.takes]
        send = np.array([each.send for each in costs])
        starts = np.empty_like(takes)
        done = np.empty((_FIRST_ROW + len(takes), len(costs)))
        done[_START], done[_NEVER] = 0.0, -np.inf
        for first, end in pairwise(self.bounds):
            arrived = done[self.begun[first:end]].max(axis=1) + send
            begins = np.maximum(done[self.before[first:end]], arrived, out=starts[first:end])
            np.add(begins, takes[first:end], out=done[_FIRST_ROW + first : _FIRST_ROW + end])
        return starts, done[_FIRST_ROW:]


_KINDS: dict[Kind, int] = {"forward": 0, "backward": 1, "weights": 2}
_START, _NEVER, _FIRST_ROW = 0, 1, 2
"""Rows of the time at which everything begins, and of what is waited for by nothing; events come after them."""
_MOST_BEGUN = 4
"""An exchange sends an output and receives one, and each has two ends."""


def _by_kind(costs: Costs, num_stages: int) -> list[float]:
    """Seconds of all stages' forwards, backwards and weights, and of what takes none."""
    weights = costs.weights or [0.0] * num_stages
    return [*costs.forward, *costs.backward, *weights, 0.0]


class _Node:
    """An event that has been done.

    Attributes:
        before: the one before it on its rank. begun: exchanges whose outputs it waits for. depth: of the longest line
            of events that wait for one another up to this one.
    """

    __slots__ = ("before", "begun", "depth")

    def __init__(self, before: "_Node | None", begun: "Sequence[_Node]"):
        self.before, self.begun = before, begun
        self.depth: int = 1 + max((each.depth for each in (*begun, *([] if before is None else [before]))), default=0)


Travels = list[list[_Node]]
"""Of an exchange: for each output that it sends or receives, those ends of it that have begun."""


class _Rank:
    """How far a rank has come."""

    def __init__(self, events: Sequence[Event]):
        self.events = events
        self.done: list[_Node] = []
        self.latest: dict[Kind, Travels] = {}
        """The latest exchange that it has begun, per direction."""
        self.receiving: dict[Action, Travels] = {}


def _follow(schedule: Schedule, num_stages: int) -> list[_Rank]:
    """All ranks with all their events done.

    Raises:
        AssertionError: they wait for one another.
    """
    ranks = [_Rank(events) for events in communications(schedule)]
    run = _Run(num_stages)
    while sum(run.advance(rank) for rank in ranks):
        pass
    behind = [(index, rank) for index, rank in enumerate(ranks) if len(rank.done) < len(rank.events)]
    waiting = [f"pp rank {index} before {rank.events[len(rank.done)]}" for index, rank in behind]
    assert not waiting, f"deadlock: {'; '.join(waiting)}"
    assert all(len(begun) == 2 for begun in run.begun.values()), "an output is sent that no rank receives"
    return ranks


class _Run:
    """What ranks know of one another.

    Attributes:
        begun: for each action whose output travels, those of its ends that have begun their exchange.
        computed: actions.
    """

    def __init__(self, num_stages: int):
        self.num_stages = num_stages
        self.begun: dict[Action, list[_Node]] = defaultdict(list)
        self.computed: set[Action] = set()

    def advance(self, rank: _Rank) -> bool:
        """Do a rank's events until it has to wait.

        Returns:
            Whether it has done any.
        """
        first = len(rank.done)
        while len(rank.done) < len(rank.events):
            event = rank.events[len(rank.done)]
            can_go_on = self._compute(rank, event.action) if isinstance(event, Compute) else self._begin(rank, event)
            if not can_go_on:
                break
        return len(rank.done) > first

    def _compute(self, rank: _Rank, action: Action) -> bool:
        begun = _both_ends(rank.receiving.get(action, []))
        if begun is None or any(before not in self.computed for before in needed(action, self.num_stages)):
            return False
        self._do(rank, begun)
        self.computed.add(action)
        return True

    def _begin(self, rank: _Rank, exchange: Exchange) -> bool:
        before = _both_ends(rank.latest.get(exchange.direction, []))
        if before is None:
            return False
        node = self._do(rank, before)
        received = None if exchange.receive is None else source(exchange.receive, self.num_stages)
        travels = [self.begun[output] for output in (exchange.send, received) if output is not None]
        for ends in travels:
            ends.append(node)
        rank.latest[exchange.direction] = travels
        if exchange.receive is not None:
            rank.receiving[exchange.receive] = travels
        return True

    def _do(self, rank: _Rank, begun: Sequence[_Node]) -> _Node:
        node = _Node(rank.done[-1] if rank.done else None, begun)
        rank.done.append(node)
        return node


def _both_ends(travels: Travels) -> list[_Node] | None:
    """Who has begun the outputs that travel; None while an end of one has not."""
    if any(len(ends) < 2 for ends in travels):
        return None
    return list(chain.from_iterable(travels))
