"""Whether ranks come to the collectives of their groups in the same order, and send what is received: else a run hangs,
or mixes up data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, zip_longest

from ....moe.util.errors import ExpertMeshError
from .recorder import SENDS, Event


@dataclass(frozen=True)
class Call:
    """A collective of a rank, or what it sends to another stage or receives from there.

    name: the operator's; of what is sent "send" or "receive". ranks: of the group; of what is sent, from and to.
    told: where the step was. group: the name of the process group. size: bytes of what is sent. to_each, from_each: of
    an all-to-all, bytes for and from each rank of the group.
    """

    name: str
    ranks: tuple[int, ...]
    told: str
    group: str = ""
    size: float = 0.0
    to_each: tuple[int, ...] = ()
    from_each: tuple[int, ...] = ()

    @property
    def is_sent(self) -> bool:
        return self.name in SENDS

    def __str__(self) -> str:
        if self.is_sent:
            return f"{self.size:,.0f} bytes ({self.told})"
        return f"{self.name} among {len(self.ranks)} ({self.told})"


def collectives_of(events: Sequence[Event]) -> list[Call]:
    """The collectives of a rank's step, and what it sends and receives."""
    return [_call(event) for event in events if event.collective is not None]


def _call(event: Event) -> Call:
    if event.collective == "send":
        return Call("send", event.ranks, event.told, event.group, event.sent)
    if event.collective == "receive":
        return Call("receive", event.ranks[::-1], event.told, event.group, event.written)
    return Call(event.name, event.ranks, event.told, event.group, event.sent, event.to_each, event.from_each)


def check_order(by_rank: Mapping[int, Sequence[Call]], ranks_per_stage: int | None = None) -> int:
    """
    Args:
        ranks_per_stage: ranks of different stages of a pipeline compute different things; None: there is one stage.

    Returns:
        How many calls of each rank were compared: collectives, with their bytes, between all members of a group that
        are here, and between ranks of a stage by the numbers of ranks of their groups, as a GPU runs what it is given
        in one order; and what one rank sends to another with what that one receives.

    Raises:
        ExpertMeshError: two ranks differ; it names the first difference.
    """
    collectives = {rank: [call for call in of_rank if not call.is_sent] for rank, of_rank in by_rank.items()}
    for first, second in combinations(by_rank, 2):
        of_first, of_second = collectives[first], collectives[second]
        for group in sorted({call.ranks for call in of_first} & {call.ranks for call in of_second}):
            a, b = ([call for call in of_rank if call.ranks == group] for of_rank in (of_first, of_second))
            _compare(first, second, a, b, f"among {len(group)} ranks")
            for number, pair in enumerate(zip(a, b, strict=True), start=1):
                _compare_sizes(first, second, *pair, number)
        if ranks_per_stage is None or first // ranks_per_stage == second // ranks_per_stage:
            _compare(first, second, of_first, of_second, "of all groups")
    for sender, receiver in permutations(by_rank, 2):
        _compare_sent(sender, receiver, by_rank)
    return max(map(len, by_rank.values()), default=0)


def _compare(first: int, second: int, of_first: Sequence[Call], of_second: Sequence[Call], where: str) -> None:
    for number, (a, b) in enumerate(zip_longest(of_first, of_second), start=1):
        if a is None or b is None or (a.name, len(a.ranks)) != (b.name, len(b.ranks)):
            raise ExpertMeshError(
                f"ranks {first} and {second} differ in their collectives {where}: number {number} is "
                f"{a or _NONE} on rank {first}, and {b or _NONE} on rank {second}: the run would hang"
            )


def _compare_sizes(first: int, second: int, a: Call, b: Call, number: int) -> None:
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
    elif a.size != b.size:
        differs = f"rank {first} sends {a.size:,.0f} bytes, and rank {second} {b.size:,.0f}"
    if differs:
        raise ExpertMeshError(
            f"ranks {first} and {second} differ in the sizes of collective {number} among {len(a.ranks)} ranks, {a}: "
            f"{differs}: the run would hang, or mix up data"
        )


def _compare_sent(sender: int, receiver: int, by_rank: Mapping[int, Sequence[Call]]) -> None:
    sent = [call for call in by_rank[sender] if call.name == "send" and call.ranks == (sender, receiver)]
    received = [call for call in by_rank[receiver] if call.name == "receive" and call.ranks == (sender, receiver)]
    for group in sorted({call.group for call in (*sent, *received)}):
        of_group = ([call for call in of_rank if call.group == group] for of_rank in (sent, received))
        for number, (a, b) in enumerate(zip_longest(*of_group), start=1):
            if a is None or b is None or a.size != b.size:
                raise ExpertMeshError(
                    f"number {number} of what rank {sender} sends to rank {receiver} is {a or _NONE}, and of what rank "
                    f"{receiver} receives from there {b or _NONE}: the run would hang"
                )


_NONE = "none any more"
