"""Whether ranks come to the collectives of their groups in the same order, and send what is received: else a run hangs,
or mixes up data."""

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations, zip_longest

from ....moe.util.errors import ExpertMeshError
from .recorder import SENDS, Event


def check_order(by_rank: Mapping[int, Sequence[Event]], ranks_per_stage: int | None = None) -> int:
    """
    Args:
        by_rank: events of a step. ranks_per_stage: ranks of different stages compute different things; None: there is
            one stage.

    Returns:
        How many calls of each rank were compared: collectives, with their bytes, between all members of a group that
        are here, and between ranks of a stage by the numbers of ranks of their groups, as a GPU runs what it is given
        in one order; and what one rank sends to another with what that one receives.

    Raises:
        ExpertMeshError: two ranks differ; it names the first difference.
    """
    collectives = {
        rank: [event for event in of_rank if event.collective not in (None, *SENDS)]
        for rank, of_rank in by_rank.items()
    }
    for first, second in combinations(by_rank, 2):
        of_first, of_second = collectives[first], collectives[second]
        for group in sorted({event.ranks for event in of_first} & {event.ranks for event in of_second}):
            a, b = ([event for event in of_rank if event.ranks == group] for of_rank in (of_first, of_second))
            _compare(first, second, a, b, f"among {len(group)} ranks")
            for number, pair in enumerate(zip(a, b, strict=True), start=1):
                _compare_sizes(first, second, *pair, number)
        if ranks_per_stage is None or first // ranks_per_stage == second // ranks_per_stage:
            _compare(first, second, of_first, of_second, "of all groups")
    for sender, receiver in permutations(by_rank, 2):
        _compare_sent(sender, receiver, by_rank)
    return max(sum(event.collective is not None for event in events) for events in by_rank.values())


def _compare(first: int, second: int, of_first: Sequence[Event], of_second: Sequence[Event], where: str) -> None:
    for number, (a, b) in enumerate(zip_longest(of_first, of_second), start=1):
        if a is None or b is None or (a.name, len(a.ranks)) != (b.name, len(b.ranks)):
            raise ExpertMeshError(
                f"ranks {first} and {second} differ in their collectives {where}: number {number} is "
                f"{_told(a)} on rank {first}, and {_told(b)} on rank {second}: the run would hang"
            )


def _compare_sizes(first: int, second: int, a: Event, b: Event, number: int) -> None:
    """Both calls are of one collective of one group."""
    differs = ""
    if a.to_each and b.to_each:
        at_first, at_second = a.ranks.index(first), a.ranks.index(second)
        for sender, sent, receiver, received in (
            (first, a.to_each[at_second], second, b.from_each[at_first]),
            (second, b.to_each[at_first], first, a.from_each[at_second]),
        ):
            if sent != received:
                differs = f"rank {sender} sends {sent:,} bytes to rank {receiver}, which expects {received:,}"
    elif a.sent != b.sent:
        differs = f"rank {first} sends {a.sent:,.0f} bytes, and rank {second} {b.sent:,.0f}"
    if differs:
        raise ExpertMeshError(
            f"ranks {first} and {second} differ in the sizes of collective {number} among {len(a.ranks)} ranks, "
            f"{_told(a)}: "
            f"{differs}: the run would hang, or mix up data"
        )


def _compare_sent(sender: int, receiver: int, by_rank: Mapping[int, Sequence[Event]]) -> None:
    # the other rank is the second one, of what is sent and of what is received
    sent = [event for event in by_rank[sender] if (event.collective, event.ranks[1:]) == ("send", (receiver,))]
    received = [event for event in by_rank[receiver] if (event.collective, event.ranks[1:]) == ("receive", (sender,))]
    for group in sorted({event.group for event in (*sent, *received)}):
        of_group = ([event for event in events if event.group == group] for events in (sent, received))
        for number, (a, b) in enumerate(zip_longest(*of_group), start=1):
            if a is None or b is None or a.sent != b.written:
                raise ExpertMeshError(
                    f"number {number} of what rank {sender} sends to rank {receiver} is {_told(a)}, and of what rank "
                    f"{receiver} receives from there {_told(b)}: the run would hang"
                )


def _told(event: Event | None) -> str:
    if event is None:
        return "none any more"
    if event.collective in SENDS:
        return f"{event.sent or event.written:,.0f} bytes ({event.told})"
    return f"{event.name} among {len(event.ranks)} ({event.told})"
