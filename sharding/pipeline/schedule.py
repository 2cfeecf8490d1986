"""In which order each pp rank computes its stages' micro-batches, and when it sends and receives. Pure arithmetic: no
process group, no torch.

Of P pp ranks with V chunks each, rank p holds the stages p, p + P, ..., p + (V-1)·P. What a stage's forward gives goes
to the next stage's, and gradients go back: stage s + 1 is on pp rank (s + 1) % P, so with several chunks the last rank
sends to the first one.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from typing import Literal

Kind = Literal["forward", "backward", "weights"]
ScheduleName = Literal["1f1b", "interleaved", "zero-bubble"]


@dataclass(frozen=True, slots=True)
class Action:
    """What a pp rank computes without a pause.

    Attributes:
        kind: "backward" computes all gradients; where the schedule has "weights" for it, all but those of the weights
            that are queued, which "weights" computes.
        stage: 0 to P·V - 1, on pp rank stage % P.
        micro_batch: which of a step's micro-batches.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch}, stage {self.stage}"


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each pp rank, in the order in which it computes them."""


@dataclass(frozen=True)
class Compute:
    """Compute an action; first wait for the exchange that receives its input, if one does."""

    action: Action


@dataclass(frozen=True)
class SendReceive:
    """Begin to send and to receive, in one batch: neither waits for the other to be done.

    Attributes:
        send: the action whose output goes to another pp rank.
        receive: the action, of the same kind, whose input comes from another pp rank.
    """

    send: Action | None
    receive: Action | None

    @property
    def direction(self) -> Kind:
        """Of layers' results ("forward") or of their gradients ("backward"): each has a communicator of its own."""
        action = self.send or self.receive
        assert action is not None
        return action.kind


Event = Compute | SendReceive


def schedule_without_queue(chunks: int) -> ScheduleName:
    """The schedule that leaves no weights for later, of a rank with so many stages."""
    return "1f1b" if chunks == 1 else "interleaved"


@cache
def make_schedule(name: ScheduleName, pp_size: int, chunks: int, micro_batches: int) -> Schedule:
    """The actions of a training step. Each stage's backwards, and its weights, are in the micro-batches' order: sums of
    gradients have the bits that they have without a pipeline.

    Args:
        name: "1f1b": one stage per rank; rank p holds at most P - p micro-batches (PipeDream-flush, arXiv 2006.09503).
            "interleaved": rounds of P micro-batches pass through a rank's first chunk, then its second one, and so on
            (Megatron-LM, arXiv 2104.04473): a bubble of 1/V, for rank p at most 2(P-p-1) + (V-1)P + 1 micro-batches
            of a stage in memory. "zero-bubble": the order of either, by the number of chunks, with the weights'
            gradients computed where a rank would wait (ZB-H1, arXiv 2401.10241): on no rank more in memory than the
            first one has without.
        micro_batches: any number; the last round may be of fewer than P.
    """
    assert name in ("1f1b", "interleaved", "zero-bubble"), name
    assert min(pp_size, chunks, micro_batches) >= 1, (pp_size, chunks, micro_batches)
    assert name != "1f1b" or chunks == 1, chunks
    schedule = tuple(_alternate(rank, pp_size, chunks, micro_batches) for rank in range(pp_size))
    return _queue_weights(schedule) if name == "zero-bubble" else schedule


def forward_schedule(pp_size: int, chunks: int, micro_batches: int) -> Schedule:
    """The forwards alone, in the order of `make_schedule`'s, for evaluation."""
    return tuple(
        tuple(
            action
            for action in _in_rounds("forward", rank, pp_size, chunks, micro_batches)
            if action.micro_batch < micro_batches
        )
        for rank in range(pp_size)
    )


def _alternate(rank: int, pp_size: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Forwards until the first gradient can come, then a forward and a backward in turn, then the other backwards.

    Where the last round is not full the schedule is that of full rounds without what the missing micro-batches would
    do. No action depends on one of another micro-batch, so what can be computed in order remains so.
    """
    forwards = _in_rounds("forward", rank, pp_size, chunks, micro_batches)
    backwards = _in_rounds("backward", rank, pp_size, chunks, micro_batches)
    after = pp_size - rank - 1
    # until a gradient can have come back from the last rank; with one chunk half as many do, as nothing follows them
    warm_up = after if chunks == 1 else 2 * after + (chunks - 1) * pp_size
    in_turn = chain.from_iterable(zip_longest(forwards[warm_up:], backwards))
    return tuple(
        action
        for action in chain(forwards[:warm_up], in_turn)
        if action is not None and action.micro_batch < micro_batches
    )


def _in_rounds(kind: Kind, rank: int, pp_size: int, chunks: int, micro_batches: int) -> list[Action]:
    """All of a rank's actions of a kind, in full rounds of P micro-batches; backwards begin with the last chunk."""
    order = range(chunks) if kind == "forward" else reversed(range(chunks))
    stages = [chunk * pp_size + rank for chunk in order]
    return [
        Action(kind, stage, micro_batch)
        for first in range(0, micro_batches, pp_size)
        for stage in stages
        for micro_batch in range(first, first + pp_size)
    ]


def _queue_weights(schedule: Schedule) -> Schedule:
    """Add weights to a schedule, where each rank would wait if all actions took equally long.

    What a rank holds, micro-batches of a stage between their forward and their weights, is at most what the first one
    holds without a queue: before a forward that would be one more it empties its queue by one.
    """
    limit = max(peak_in_flight(schedule))
    remaining = [deque(actions) for actions in schedule]
    queues: list[deque[Action]] = [deque() for _ in schedule]
    held = [0] * len(schedule)
    ordered: list[list[Action]] = [[] for _ in schedule]
    num_stages = count_stages(schedule)
    done: set[Action] = set()
    while any(remaining) or any(queues):
        now = []
        for rank, (actions, queue) in enumerate(zip(remaining, queues, strict=True)):
            can_act = bool(actions) and done.issuperset(needed(actions[0], num_stages))
            if can_act and not (actions[0].kind == "forward" and held[rank] == limit):
                action = actions.popleft()
            elif queue:
                action = queue.popleft()
            else:
                continue
            now.append(action)
            ordered[rank].append(action)
            held[rank] += {"forward": 1, "backward": 0, "weights": -1}[action.kind]
            if action.kind == "backward":
                queue.append(Action("weights", action.stage, action.micro_batch))
        assert now, "a schedule without weights can be computed"
        done.update(now)
    return tuple(tuple(actions) for actions in ordered)


def count_stages(schedule: Schedule) -> int:
    """The number of stages, P·V."""
    return 1 + max(action.stage for action in chain.from_iterable(schedule))


def needed(action: Action, num_stages: int) -> list[Action]:
    """What must have been computed before an action, by any rank."""
    before = source(action, num_stages)
    needed = [] if before is None else [before]
    if action.kind != "forward":
        own: Kind = "forward" if action.kind == "backward" else "backward"
        needed.append(Action(own, action.stage, action.micro_batch))
    return needed


def source(action: Action, num_stages: int) -> Action | None:
    """The action of the neighbouring stage whose output is this one's input."""
    if action.kind == "forward" and action.stage > 0:
        return Action("forward", action.stage - 1, action.micro_batch)
    if action.kind == "backward" and action.stage < num_stages - 1:
        return Action("backward", action.stage + 1, action.micro_batch)
    return None


def communications(schedule: Schedule) -> tuple[tuple[Event, ...], ...]:
    """What each pp rank does, in order: its actions and, between them, the exchanges that it begins.

    After an action a rank sends its output and, in the same batch, begins to receive the input of its next action of
    the same kind: at most one input per direction is received ahead, while the rank computes what lies between. What
    has not been begun then, such as the first input, is begun right before its action. A rank waits for an exchange
    before it computes what that receives, and before it begins another one in the same direction: per direction at most
    one output and one input are under way.

    The input must be that of the next action, and in one batch with the output. A receive begun before the action that
    precedes it keeps that action's output from being sent, in a communicator that runs them in order, until the rank
    before has computed once more: a deadlock with four ranks, or with two chunks. With several chunks, where the last
    rank sends to the first one, a send that is not in a batch with the receive after it makes a circle of ranks that
    all send first.

    Neighbouring stages exchange nothing where they are on the same rank (P = 1).
    """
    num_stages = count_stages(schedule)
    return tuple(tuple(_events(actions, len(schedule), num_stages)) for actions in schedule)


def _events(actions: Sequence[Action], pp_size: int, num_stages: int) -> Iterator[Event]:
    following: dict[Action, Action] = {}
    latest: dict[Kind, Action] = {}
    for action in actions:
        if action.kind in latest:
            following[latest[action.kind]] = action
        latest[action.kind] = action
    begun = set()
    for action in actions:
        if receives(action, pp_size, num_stages) and action not in begun:
            yield SendReceive(None, action)
        yield Compute(action)
        then = following.get(action)
        send = action if sends(action, pp_size, num_stages) else None
        receive = then if then is not None and receives(then, pp_size, num_stages) else None
        if send is not None or receive is not None:
            yield SendReceive(send, receive)
        begun.add(receive)


def receives(action: Action, pp_size: int, num_stages: int) -> bool:
    """Whether an action's input comes from another pp rank."""
    return pp_size > 1 and source(action, num_stages) is not None


def sends(action: Action, pp_size: int, num_stages: int) -> bool:
    """Whether an action's output goes to another pp rank."""
    last = {"forward": num_stages - 1, "backward": 0}
    return pp_size > 1 and action.kind in last and action.stage != last[action.kind]


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Per pp rank the most micro-batches, of a stage each, whose forward is done and whose backward is not."""
    return [most_at_once(actions, {"forward": 1, "backward": -1}) for actions in schedule]


def most_at_once(actions: Sequence[Action], change: dict[Kind, int]) -> int:
    """The most that a rank holds, which each kind of action changes by so much."""
    held = peak = 0
    for action in actions:
        held += change.get(action.kind, 0)
        peak = max(peak, held)
    return peak
