"""Pipeline schedules: written-out orders, generated settings, and what is wrong with faulty ones."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest

from expertmesh.sharding.pipeline.schedule import (
    Action,
    Compute,
    Event,
    Kind,
    Schedule,
    ScheduleName,
    SendReceive,
    communications,
    count_stages,
    forward_schedule,
    make_schedule,
    most_at_once,
    peak_in_flight,
    receives,
    sends,
    source,
)
from expertmesh.sharding.pipeline.timeline import Costs, Timetable, bubble

NAMES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Setting:
    name: ScheduleName
    pp_size: int
    chunks: int
    micro_batches: int

    @property
    def schedule(self) -> Schedule:
        return make_schedule(self.name, self.pp_size, self.chunks, self.micro_batches)

    @property
    def without_queue(self) -> "Setting":
        return Setting("interleaved", self.pp_size, self.chunks, self.micro_batches)

    def most_in_flight(self, rank: int) -> int:
        """The warm-up, and the forward after it."""
        after = self.pp_size - rank - 1
        warm_up = after if self.chunks == 1 else 2 * after + (self.chunks - 1) * self.pp_size
        return min(warm_up + 1, self.chunks * self.micro_batches)


def generate(number: int) -> list[Setting]:
    draw = random.Random(0)
    settings = []
    for _ in range(number):
        name = draw.choice(NAMES)
        chunks = 1 if name == "1f1b" else draw.randint(1, 4)
        settings.append(Setting(name, draw.randint(1, 8), chunks, draw.randint(1, 16)))
    return settings


GENERATED = generate(500)


@pytest.mark.slow
def test_generated_schedules_never_deadlock() -> None:
    """And have each action once, in the micro-batches' order, and are received in the order in which they are sent."""
    for setting in GENERATED:
        check(setting.schedule, setting.pp_size, setting.chunks, setting.micro_batches)


def test_generated_evaluations_never_deadlock() -> None:
    for setting in GENERATED[:100]:
        sizes = setting.pp_size, setting.chunks, setting.micro_batches
        check(forward_schedule(*sizes), *sizes)


def test_generated_schedules_hold_no_more_than_their_bound() -> None:
    for setting in GENERATED:
        schedule = setting.schedule
        bounds = [setting.most_in_flight(rank) for rank in range(setting.pp_size)]
        assert all(peak <= bound for peak, bound in zip(peak_in_flight(schedule), bounds, strict=True)), setting
        if setting.name == "zero-bubble":
            assert max(peak_held(schedule)) <= max(peak_in_flight(setting.without_queue.schedule)), setting
        else:
            assert (peak_held(schedule), set(peak_queued(schedule))) == (peak_in_flight(schedule), {0}), setting


def test_bounds_are_reached() -> None:
    """Without a queue; and one takes the room that later ranks leave."""
    assert peak_in_flight(make_schedule("1f1b", 4, 1, 8)) == [4, 3, 2, 1]
    assert peak_in_flight(make_schedule("1f1b", 4, 1, 2)) == [2, 2, 2, 1]
    assert peak_in_flight(make_schedule("interleaved", 4, 2, 8)) == [11, 9, 7, 5]
    queued = make_schedule("zero-bubble", 4, 1, 8)
    assert (peak_in_flight(queued), peak_held(queued), peak_queued(queued)) == ([4, 3, 2, 1], [4] * 4, [1, 2, 3, 4])


def test_generated_exchanges_carry_every_output_once() -> None:
    for setting in GENERATED[:50]:
        schedule = setting.schedule
        num_stages = setting.pp_size * setting.chunks
        for actions, events in zip(schedule, communications(schedule), strict=True):
            assert [event.action for event in events if isinstance(event, Compute)] == list(actions)
            exchanges = [event for event in events if isinstance(event, SendReceive)]
            assert all(a.kind == e.direction for e in exchanges for a in (e.send, e.receive) if a)
            sent = [e.send for e in exchanges if e.send]
            received = [e.receive for e in exchanges if e.receive]
            assert sent == [action for action in actions if sends(action, setting.pp_size, num_stages)]
            assert sorted(received, key=actions.index) == [
                a for a in actions if receives(a, setting.pp_size, num_stages)
            ]
            place = {event: index for index, event in enumerate(events)}
            for event in exchanges:
                if event.send:
                    assert place[event] == place[Compute(event.send)] + 1
                if event.receive:
                    between = events[place[event] + 1 : place[Compute(event.receive)]]
                    assert not any(b.action.kind == event.direction for b in between if isinstance(b, Compute))


ORDERS: dict[tuple[ScheduleName | None, int, int, int], list[str]] = {
    ("1f1b", 2, 1, 3): ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"],
    ("1f1b", 4, 1, 2): ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1", "F2.0 F2.1 B2.0 B2.1", "F3.0 B3.0 F3.1 B3.1"],
    ("1f1b", 1, 1, 2): ["F0.0 B0.0 F0.1 B0.1"],
    # that of Megatron
    ("interleaved", 2, 2, 4): [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ],
    # whose last round may be of fewer micro-batches
    ("interleaved", 2, 2, 3): [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 B2.1 F2.2 B0.0 B0.1 B2.2 B0.2",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 B1.1 F3.2 B3.2 B1.2",
    ],
    # gradients of weights are in the bubble, as in figure 3 of arXiv 2401.10241, which has no more of it
    ("zero-bubble", 2, 1, 3): [
        "F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2", "F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2",
    ],
    # forwards alone
    (None, 2, 2, 3): ["F0.0 F0.1 F2.0 F2.1 F0.2 F2.2", "F1.0 F1.1 F3.0 F3.1 F1.2 F3.2"],
}  # fmt: skip


def test_orders() -> None:
    for (name, *sizes), expected in ORDERS.items():
        schedule = forward_schedule(*sizes) if name is None else make_schedule(name, *sizes)
        assert written(schedule) == expected, (name, sizes)
    assert make_schedule("interleaved", 4, 1, 7) == make_schedule("1f1b", 4, 1, 7)


def test_exchanges_between_two_ranks() -> None:
    """Begun after an action, with the next one's input, or else right before what needs it."""
    first, last = communications(make_schedule("1f1b", 2, 1, 2))
    assert [written_event(event) for event in first] == [
        *("F0.0", "send F0.0", "F0.1", "send F0.1"),
        *("receive for B0.0", "B0.0", "receive for B0.1", "B0.1"),
    ]
    assert [written_event(event) for event in last] == [
        *("receive for F1.0", "F1.0", "receive for F1.1", "B1.0", "send B1.0"),
        *("F1.1", "B1.1", "send B1.1"),
    ]
    middle = communications(make_schedule("1f1b", 3, 1, 2))[1]
    assert "send F1.0, receive for F1.1" in [written_event(event) for event in middle]


def test_one_rank_exchanges_nothing() -> None:
    for events in communications(make_schedule("interleaved", 1, 3, 2)):
        assert all(isinstance(event, Compute) for event in events)


@pytest.mark.parametrize(("pp_size", "micro_batches"), [(1, 3), (2, 8), (4, 4), (4, 9), (8, 16)])
def test_bubble_is_that_of_the_papers(pp_size: int, micro_batches: int) -> None:
    after, work = pp_size - 1, micro_batches
    assert bubble("1f1b", pp_size, 1, micro_batches) == pytest.approx(after / (work + after))
    assert bubble("zero-bubble", pp_size, 1, micro_batches) == pytest.approx(after / (3 * work + after))
    if micro_batches % pp_size == 0:
        assert bubble("interleaved", pp_size, 3, micro_batches) == pytest.approx(after / (3 * work + after))


@pytest.mark.parametrize("of_weights", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_zero_bubble_takes_no_longer(of_weights: float) -> None:
    """However much of a backward can wait."""
    for setting in GENERATED[:80]:
        if setting.name == "zero-bubble":
            each = [1.0] * (setting.pp_size * setting.chunks)
            parts = Costs(each, [2 - of_weights for _ in each], [of_weights for _ in each])
            queued = seconds(setting.schedule, parts)
            assert queued <= seconds(setting.without_queue.schedule, Costs(each, [2.0 for _ in each])) + 1e-9


def test_missing_micro_batches_of_a_last_round_take_no_time() -> None:
    for pp_size, chunks, micro_batches in [(4, 2, 5), (4, 2, 7), (8, 3, 13), (3, 4, 1)]:
        full = -(-micro_batches // pp_size) * pp_size
        costs = Costs([1.0] * pp_size * chunks, [2.0] * pp_size * chunks)
        fewer, all_of_it = (
            seconds(make_schedule("interleaved", pp_size, chunks, m), costs) for m in (micro_batches, full)
        )
        assert fewer <= all_of_it


def test_sends_take_time() -> None:
    """1.0 s, sent in 0.5 s, 3.0 s and 4.0 s, sent in 0.5 s, 2.0 s."""
    schedule = make_schedule("1f1b", 2, 1, 1)
    assert seconds(schedule, Costs(forward=[1.0, 3.0], backward=[2.0, 4.0], send=0.5)) == 11


def test_sends_run_while_ranks_compute() -> None:
    """Of the busiest rank's, only those take time of their own that no action of the other kind runs beside: before its
    first backward, and before its last."""
    schedule = make_schedule("1f1b", 2, 1, 8)
    free, slow = (seconds(schedule, Costs([1.0, 0.5], [2.0, 1.0], send=send)) for send in (0.0, 0.1))
    assert slow - free == pytest.approx(0.3)


def test_ranks_that_wait_for_one_another() -> None:
    schedule = read("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(AssertionError, match=r"deadlock: pp rank 0 .*micro_batch=0.*; pp rank 1 .*micro_batch=1"):
        Timetable(schedule)


def seconds(schedule: Schedule, costs: Costs) -> float:
    return Timetable(schedule).seconds([costs])[0]


def peak_queued(schedule: Schedule) -> list[int]:
    """Per pp rank the most micro-batches, of a stage each, whose backward is done and whose weights are not."""
    return [most_at_once(actions, {"backward": int(has_weights(schedule)), "weights": -1}) for actions in schedule]


def peak_held(schedule: Schedule) -> list[int]:
    """Per pp rank the most micro-batches, of a stage each, that are in flight or queued."""
    last: Kind = "weights" if has_weights(schedule) else "backward"
    return [most_at_once(actions, {"forward": 1, last: -1}) for actions in schedule]


def has_weights(schedule: Schedule) -> bool:
    return any(action.kind == "weights" for action in chain.from_iterable(schedule))


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
    Timetable(schedule)


def _check_order(actions: Sequence[Action]) -> None:
    latest: dict[tuple[str, int], Action] = {}
    for action in actions:
        before = latest.get((action.kind, action.stage))
        assert before is None or before.micro_batch < action.micro_batch, f"{action} after {before}"
        latest[action.kind, action.stage] = action


def _check_queues(schedule: Schedule) -> None:
    pp_size, num_stages = len(schedule), count_stages(schedule)
    sent, received = defaultdict[object, list[Action | None]](list), defaultdict[object, list[Action | None]](list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            step = 1 if action.kind == "forward" else -1
            if sends(action, pp_size, num_stages):
                sent[rank, (rank + step) % pp_size, action.kind].append(action)
            if receives(action, pp_size, num_stages):
                received[(rank - step) % pp_size, rank, action.kind].append(source(action, num_stages))
    assert sent == received, "a rank receives in another order than it is sent to"


FAULTS = {
    "missing": ("F0.0 F0.1 B0.0", "F1.0 B1.0 F1.1 B1.1"),
    "twice": ("F0.0 F0.1 B0.0 B0.0", "F1.0 B1.0 F1.1 B1.1"),
    "on the wrong rank": ("F0.0 F0.1 B0.0 B1.1", "F1.0 B1.0 F1.1 B0.1"),
    "before its forward": ("F0.0 F0.1 B0.0 B0.1", "B1.0 F1.0 F1.1 B1.1"),
    "backwards out of order": ("F0.0 F0.1 B0.1 B0.0", "F1.0 F1.1 B1.1 B1.0"),
    "weights out of order": ("F0.0 F0.1 B0.0 B0.1 W0.1 W0.0", "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"),
    "weights of one rank": ("F0.0 F0.1 B0.0 B0.1 W0.0 W0.1", "F1.0 B1.0 F1.1 B1.1"),
    "waits for itself": ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds(fault: str) -> None:
    check(make_schedule("1f1b", 2, 1, 2), 2, 1, 2)
    with pytest.raises(AssertionError):
        check(read(*FAULTS[fault]), 2, 1, 2)


def test_check_finds_another_order_of_receiving() -> None:
    """Of chunks: of one chunk's micro-batches it would be another fault."""
    first, second = ("F0.0 F0.1 F2.0 F2.1", "F1.0 F3.0 F1.1 F3.1")
    check(read(first, "F1.0 F1.1 F3.0 F3.1"), 2, 2, 2)
    with pytest.raises(AssertionError, match="another order"):
        check(read(first, second), 2, 2, 2)


def test_full_rounds_are_needed() -> None:
    """Warm-up counted in a last round that is not full, as Megatron-LM refuses it, would deadlock."""
    schedule = make_schedule("interleaved", 4, 3, 5)
    check(schedule, 4, 3, 5)
    counted = tuple(as_counted(actions, 2 * (3 - rank) + 8) for rank, actions in enumerate(schedule))
    with pytest.raises(AssertionError, match="deadlock"):
        check(counted, 4, 3, 5)


def as_counted(actions: tuple[Action, ...], warm_up: int) -> tuple[Action, ...]:
    forwards = [action for action in actions if action.kind == "forward"]
    backwards = [action for action in actions if action.kind == "backward"]
    in_turn = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return (*forwards[:warm_up], *in_turn, *backwards[len(forwards[warm_up:]) :])


def written(schedule: Schedule) -> list[str]:
    """Each rank's actions, as in F2.0: forward of stage 2, micro-batch 0."""
    return [" ".join(map(short, actions)) for actions in schedule]


def read(*ranks: str) -> Schedule:
    """The inverse of `written`."""
    kinds = {"F": "forward", "B": "backward", "W": "weights"}
    return tuple(
        tuple(Action(kinds[word[0]], *map(int, word[1:].split("."))) for word in rank.split())  # type: ignore[arg-type]
        for rank in ranks
    )


def short(action: Action) -> str:
    return f"{action.kind[0].upper()}{action.stage}.{action.micro_batch}"


def written_event(event: Event) -> str:
    if isinstance(event, Compute):
        return short(event.action)
    parts = [f"send {short(event.send)}"] if event.send else []
    return ", ".join(parts + ([f"receive for {short(event.receive)}"] if event.receive else []))
