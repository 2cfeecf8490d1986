"""How long a pipeline's schedule takes, how long ranks wait in it, and that none waits for ever. Pure arithmetic: no
process group, no torch."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .schedule import (
    Action,
    Compute,
    Event,
    Kind,
    Schedule,
    ScheduleName,
    communications,
    count_stages,
    make_schedule,
    needed,
    source,
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


def bubble(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> float:
    """The share of all ranks' seconds in which they compute nothing, in a step in which all stages take equally long, a
    forward a second, backward twice as long, and sending no time; with "zero-bubble" the weights' gradients are half of
    backward."""
    backward, each = 1.0 if name == "zero-bubble" else 2.0, [1.0] * (pp_size * chunks)
    costs = Costs(each, [backward * forward for forward in each], each)
    (seconds,) = Timetable(make_schedule(name, pp_size, chunks, micro_batches)).seconds([costs])
    return 1 - 3.0 * chunks * micro_batches / seconds


_KINDS: dict[Kind, int] = {"forward": 0, "backward": 1, "weights": 2}
_START, _NEVER, _FIRST_ROW = 0, 1, 2
"""Rows of the time at which everything begins, and of what is waited for by nothing; events come after them."""
_MOST_BEGUN = 4
"""An exchange sends an output and receives one, and each has two ends."""


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
        self.num_stages = count_stages(schedule)
        # those that wait for the same number of others, one after another, at a time
        done = sorted(_done_in_turn(schedule, self.num_stages), key=lambda each: each.depth)
        rows = {id(each): row for row, each in enumerate(done, _FIRST_ROW)}
        self.before = np.array([_START if each.before is None else rows[id(each.before)] for each in done])
        begun = [[rows[id(end)] for end in each.begun] for each in done]
        self.begun = np.array([ends + [_NEVER] * (_MOST_BEGUN - len(ends)) for ends in begun])
        actions = [each.event.action if isinstance(each.event, Compute) else None for each in done]
        # exchanges take none: the last row of `takes` below
        self.takes = np.array(
            [-1 if action is None else _KINDS[action.kind] * self.num_stages + action.stage for action in actions]
        )
        depths = np.array([each.depth for each in done])
        self.bounds = [0, *(np.flatnonzero(np.diff(depths)) + 1).tolist(), len(done)]

    def seconds(self, costs: Sequence[Costs]) -> list[float]:
        """With each of these costs, from the first action's start to the last one's end, of all ranks."""
        none = [0.0] * self.num_stages
        by_kind = [[*each.forward, *each.backward, *(each.weights or none), 0.0] for each in costs]
        takes, send = np.array(by_kind).T[self.takes], np.array([each.send for each in costs])
        done = np.empty((_FIRST_ROW + len(takes), len(costs)))
        done[_START], done[_NEVER] = 0.0, -np.inf
        for first, end in pairwise(self.bounds):
            arrived = done[self.begun[first:end]].max(axis=1) + send
            begins = np.maximum(done[self.before[first:end]], arrived)
            np.add(begins, takes[first:end], out=done[_FIRST_ROW + first : _FIRST_ROW + end])
        found: list[float] = done[_FIRST_ROW:][self.takes >= 0].max(axis=0).tolist()
        return found


class _Done:
    """An event that has been done.

    Attributes:
        before: the one before it on its rank. begun: exchanges whose outputs it waits for. depth: of the longest line
            of events that wait for one another up to this one.
    """

    __slots__ = ("before", "begun", "depth", "event")

    def __init__(self, event: Event, before: "_Done | None", begun: "Sequence[_Done]"):
        self.event, self.before, self.begun = event, before, begun
        self.depth: int = 1 + max((each.depth for each in (*begun, *([] if before is None else [before]))), default=0)


def _done_in_turn(schedule: Schedule, num_stages: int) -> list[_Done]:
    """All events of all ranks, each of which is done as soon as it can be.

    Raises:
        AssertionError: the ranks wait for one another.
    """
    waiting = [deque(events) for events in communications(schedule)]
    done: list[_Done] = []
    latest: list[_Done | None] = [None] * len(schedule)
    computed: set[Action] = set()
    ends: dict[Action, list[_Done]] = defaultdict(list)  # of the output of each action that travels: who has begun it
    # outputs that travel in the latest exchange of a rank and direction, and in that which receives an action's input
    under_way: dict[tuple[int, Kind] | Action, list[Action]] = {}
    number = -1
    while number < len(done):
        number = len(done)
        for rank, events in enumerate(waiting):
            while events:
                event = events[0]
                travels = under_way.get(event.action if isinstance(event, Compute) else (rank, event.direction), [])
                if any(len(ends[output]) < 2 for output in travels):
                    break
                if isinstance(event, Compute) and not computed.issuperset(needed(event.action, num_stages)):
                    break
                events.popleft()
                latest[rank] = node = _Done(event, latest[rank], [end for output in travels for end in ends[output]])
                done.append(node)
                if isinstance(event, Compute):
                    computed.add(event.action)
                    continue
                received = None if event.receive is None else source(event.receive, num_stages)
                travels = [output for output in (event.send, received) if output is not None]
                for output in travels:
                    ends[output].append(node)
                under_way[rank, event.direction] = travels
                if event.receive is not None:
                    under_way[event.receive] = travels
    behind = [f"pp rank {rank} before {events[0]}" for rank, events in enumerate(waiting) if events]
    assert not behind, f"deadlock: {'; '.join(behind)}"
    assert all(len(begun) == 2 for begun in ends.values()), "an output is sent that no rank receives"
    return done
