"""When each action of a pipeline's schedule begins and ends, how long ranks wait, and that none waits for ever. Pure
arithmetic: no process group, no torch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from expertmesh.sharding.pipeline.schedule import (
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

    def of(self, action: Action) -> float:
        seconds = {"forward": self.forward, "backward": self.backward, "weights": self.weights}
        return seconds[action.kind][action.stage]


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
    - does not deadlock by the rules of `simulate`. Waiting there for less, such as with unlimited buffers, it does not
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
    """Run a schedule's `communications` with given costs.

    The rules are the strictest under which an executor may run them. A rank does one event after another. In each
    direction its exchanges run one at a time, as in a communicator's stream: it begins one when the one before is done,
    and does nothing else until then. An output travels when both ends have begun their exchange; an exchange is done
    when its output and its input have arrived. An action begins when the exchange that receives its input is done.

    Raises:
        AssertionError: the ranks wait for one another; the message has what each waits for.
    """
    ranks = [_Rank(events) for events in communications(schedule)]
    run = _Run(costs, stages_of(schedule))
    while sum(run.advance(rank) for rank in ranks):
        pass
    behind = [(index, rank) for index, rank in enumerate(ranks) if rank.at < len(rank.events)]
    waiting = [f"pp rank {index} before {rank.events[rank.at]}" for index, rank in behind]
    assert not waiting, f"deadlock: {'; '.join(waiting)}"
    assert all(len(begun) == 2 for begun in run.begun.values()), "an output is sent that no rank receives"
    return Timeline(tuple(tuple(rank.spans) for rank in ranks))


Travels = list[list[float]]
"""Of an exchange: for each output that it sends or receives, when those ends of it that have begun have done so."""


class _Rank:
    """How far a rank has come."""

    def __init__(self, events: Sequence[Event]):
        self.events = events
        self.at = 0
        self.now = 0.0
        self.spans: list[Span] = []
        self.latest: dict[Kind, Travels] = {}
        """The latest exchange that it has begun, per direction."""
        self.receiving: dict[Action, Travels] = {}


class _Run:
    """What ranks know of one another.

    Attributes:
        begun: for each action whose output travels, when each of its ends has begun its exchange.
        ends: when actions have been computed.
    """

    def __init__(self, costs: Costs, num_stages: int):
        self.costs = costs
        self.num_stages = num_stages
        self.begun: dict[Action, list[float]] = defaultdict(list)
        self.ends: dict[Action, float] = {}

    def advance(self, rank: _Rank) -> bool:
        """Do a rank's events until it has to wait.

        Returns:
            Whether it has done any.
        """
        first = rank.at
        while rank.at < len(rank.events):
            event = rank.events[rank.at]
            can_go_on = self._compute(rank, event.action) if isinstance(event, Compute) else self._begin(rank, event)
            if not can_go_on:
                break
            rank.at += 1
        return rank.at > first

    def _compute(self, rank: _Rank, action: Action) -> bool:
        arrival = self._done(rank.receiving.get(action, []))
        if arrival is None or any(before not in self.ends for before in needed(action, self.num_stages)):
            return False
        start = max(rank.now, arrival)
        rank.now = self.ends[action] = start + self.costs.of(action)
        rank.spans.append(Span(action, start, rank.now))
        return True

    def _begin(self, rank: _Rank, exchange: Exchange) -> bool:
        before = self._done(rank.latest.get(exchange.direction, []))
        if before is None:
            return False
        rank.now = max(rank.now, before)
        received = None if exchange.receive is None else source(exchange.receive, self.num_stages)
        travels = [self.begun[output] for output in (exchange.send, received) if output is not None]
        for ends in travels:
            ends.append(rank.now)
        rank.latest[exchange.direction] = travels
        if exchange.receive is not None:
            rank.receiving[exchange.receive] = travels
        return True

    def _done(self, travels: Travels) -> float | None:
        """When an exchange is done: at 0 if it is none; None while one of its other ends has not begun."""
        if any(len(ends) < 2 for ends in travels):
            return None
        return max((max(ends) + self.costs.send for ends in travels), default=0.0)
