"""How ranks are arranged and which rows of a parameter each of them holds. Pure arithmetic: no process group, no torch.

`world = dp × ep`; rank = dp index · ep + ep index. A tensor's layout says along which axes of the ranks it is cut.

Data see another grid of the same ranks, `world = data × cp`: neighbours share rows. No parameter knows of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe import ExpertMeshError

DenseShard = Literal["full", "hybrid"]


@dataclass(frozen=True)
class Cut:
    """A tensor is cut along its dim 0 over the ranks of an axis. "dense" stands for the ranks that share out what is no
    expert: all of them, or those of one dp group."""

    axis: Literal["ep", "dp", "dense"]


Layout = tuple[Cut, ...]
"""Cut after cut, each of what the one before has left."""

EXPERT: Layout = (Cut("ep"), Cut("dp"))
DENSE: Layout = (Cut("dense"),)
REPLICATED: Layout = ()


@dataclass(frozen=True)
class Topology:
    """An arrangement of ranks.

    Attributes:
        world_size: all ranks.
        ep_size: ranks that share out the experts; the dp groups each hold all of them.
        dense_shard: "full" cuts everything that is no expert over all ranks; "hybrid" over the ep ranks, with a
            replica in each dp group.
        cp_size: neighbouring ranks that share rows, each with a run of their positions (context parallelism).
    """

    world_size: int
    ep_size: int
    dense_shard: DenseShard = "full"
    cp_size: int = 1

    @property
    def dp_size(self) -> int:
        return self.world_size // self.ep_size

    @property
    def data_size(self) -> int:
        """Groups of ranks that each read rows of their own."""
        return self.world_size // self.cp_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(dp index, ep index) of a rank."""
        return divmod(rank, self.ep_size)

    def data_index(self, rank: int) -> int:
        """Which of the groups that read rows a rank is in."""
        return rank // self.cp_size

    def rows(self, num_rows: int, layout: Layout, rank: int) -> range:
        """Rows of a tensor with `num_rows` rows that `rank` holds; may be empty."""
        rows = range(num_rows)
        for cut in layout:
            size, index = self._place(cut, rank)
            assert cut.axis != "ep" or len(rows) % size == 0, (num_rows, self.ep_size)
            part = _chunk(len(rows), size, index)
            rows = rows[part.start : part.stop]
        return rows

    def _place(self, cut: Cut, rank: int) -> tuple[int, int]:
        """(ranks on the axis of a cut, this one's place among them)."""
        dp_index, ep_index = self.coordinates(rank)
        if cut.axis == "ep" or (cut.axis == "dense" and self.dense_shard == "hybrid"):
            return self.ep_size, ep_index
        return (self.dp_size, dp_index) if cut.axis == "dp" else (self.world_size, rank)

    def owners(self, num_rows: int, layout: Layout) -> Iterator[tuple[int, range]]:
        """(rank, its rows) in row order, one owner for each row: of replicas, the lowest rank."""
        owners: dict[range, int] = {}
        for rank in range(self.world_size):
            owners.setdefault(self.rows(num_rows, layout, rank), rank)
        yield from sorted(((rank, rows) for rows, rank in owners.items() if rows), key=lambda part: part[1].start)


def rows_of(shape: tuple[int, ...]) -> int:
    """Of a tensor of this shape; a scalar is one row."""
    return shape[0] if shape else 1


def _chunk(num_rows: int, parts: int, index: int) -> range:
    """Part `index` as `torch.chunk`, and so FSDP2 and DTensor's Shard(0), cut it."""
    size = -(-num_rows // parts)
    return range(min(index * size, num_rows), min((index + 1) * size, num_rows))


def check_ep_size(ep_size: int, world_size: int, num_experts: int) -> None:
    """
    Raises:
        ExpertMeshError: `ep_size` does not divide the experts or the ranks; the message lists what would do.
    """
    fits = [n for n in range(1, world_size + 1) if num_experts % n == 0 and world_size % n == 0]
    if ep_size < 1 or num_experts % ep_size:
        of_model = divisors(num_experts)
        raise ExpertMeshError(
            f"--ep-size {ep_size} does not divide the {num_experts} experts of this model; use {either(of_model)}"
            + ("" if of_model == fits else f" (with {world_size} ranks: {either(fits)})")
        )
    if world_size % ep_size:
        raise ExpertMeshError(f"--ep-size {ep_size} does not divide the {world_size} ranks; use {either(fits)}")


def check_cp_size(cp_size: int, world_size: int) -> None:
    """
    Raises:
        ExpertMeshError: `cp_size` does not divide the ranks; the message lists what would do.
    """
    if cp_size < 1 or world_size % cp_size:
        raise ExpertMeshError(
            f"--cp-size {cp_size} does not divide the {world_size} ranks; use {either(divisors(world_size))}"
        )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def either(numbers: list[int]) -> str:
    """Write choices as in: 1, 2 or 4."""
    *head, last = (str(n) for n in numbers)
    return f"{', '.join(head)} or {last}" if head else last
