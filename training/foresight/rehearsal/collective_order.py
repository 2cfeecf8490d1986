"""Whether ranks come to the collectives of their groups in the same order: else a run hangs, or mixes up data."""

from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest

from expertmesh.moe import ExpertMeshError
from expertmesh.training.foresight.rehearsal.recorder import Event

Call = tuple[str, tuple[int, ...], str]
"""A collective, its ranks, and where the step was."""


def calls(events: Sequence[Event]) -> list[Call]:
    """The collectives of a rank's step."""
    return [(event.name, event.ranks, event.told) for event in events if event.collective is not None]


def check_order(by_rank: Mapping[int, Sequence[Call]]) -> int:
    """
    Returns:
        How many collectives of each rank were compared, between all members of a group that are here; and between
        groups by their numbers of ranks, as a GPU runs what it is given in one order.

    Raises:
        ExpertMeshError: two ranks differ; it names the first difference.
    """
    for (first, of_first), (second, of_second) in combinations(by_rank.items(), 2):
        shared = {ranks for _, ranks, _ in of_first} & {ranks for _, ranks, _ in of_second}
        for group in sorted(shared):
            in_first, in_second = ([call for call in of_rank if call[1] == group] for of_rank in (of_first, of_second))
            _compare(first, second, in_first, in_second, f"among {len(group)} ranks")
        _compare(first, second, of_first, of_second, "of all groups")
    return max(map(len, by_rank.values()), default=0)


def _compare(first: int, second: int, of_first: Sequence[Call], of_second: Sequence[Call], where: str) -> None:
    for number, (a, b) in enumerate(zip_longest(of_first, of_second), start=1):
        if a is None or b is None or (a[0], len(a[1])) != (b[0], len(b[1])):
            raise ExpertMeshError(
                f"ranks {first} and {second} differ in their collectives {where}: number {number} is "
                f"{_told(a)} on rank {first}, and {_told(b)} on rank {second}: the run would hang"
            )


def _told(call: Call | None) -> str:
    return "none any more" if call is None else f"{call[0]} among {len(call[1])} ({call[2]})"
