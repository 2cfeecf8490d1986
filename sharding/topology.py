"""The parallel layout, and which rows of a parameter each rank holds. Pure arithmetic: no process group, no torch.

`world = pp × dp × ep`; rank = (pp index · dp + dp index) · ep + ep index. The ranks of one pp index hold the same
layers of the model: a pipeline's stage, or several of them. A tensor's layout says which of these hold it, and over
which axes of their ranks it is sharded.

For data the ranks of a pp index form another grid, `data × cp × tp`: neighbours share sequences, each with a range of
their positions. Those of a tensor-parallel group, the innermost ones, also divide heads, dense MLPs and the vocabulary:
these parameters are sharded over tp first, then over the ranks of the same tp index. A context-parallel group does not
change how parameters are sharded. All pp indices read the same sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..moe.util.errors import ExpertMeshError
from .torchrun import nodes_of

DenseShard = Literal["full", "hybrid"]


@dataclass(frozen=True)
class Cut:
    """A tensor is sharded along its dim 0 over the ranks of an axis. "dense" stands for the ranks over which non-expert
    parameters are sharded: all of a pp index, or those of one dp group of it; "dense of tp" for those of them that have
    one tp index."""

    axis: Literal["ep", "dp", "tp", "dense", "dense of tp"]


@dataclass(frozen=True)
class Layout:
    """Where a tensor's rows are.

    Attributes:
        cuts: successive ones, each of the part that the one before has left.
        pp_ranks: the pp indices that hold the tensor, each all of it; None: every one.
    """

    cuts: tuple[Cut, ...]
    pp_ranks: tuple[int, ...] | None = None

    def on(self, pp_ranks: tuple[int, ...]) -> "Layout":
        """The same cuts, on these pp indices alone."""
        return replace(self, pp_ranks=pp_ranks)


EXPERT = Layout((Cut("ep"), Cut("dp")))
DENSE = Layout((Cut("dense"),))
DIVIDED = Layout((Cut("tp"), Cut("dense of tp")))
"""That of parameters that tensor parallelism divides."""
REPLICATED = Layout(())


@dataclass(frozen=True)
class Topology:
    """A parallel layout.

    Attributes:
        world_size: all ranks.
        ep_size: ranks over which the experts are distributed; each dp group holds all of them.
        dense_shard: "full" shards non-expert parameters over all ranks of a pp index; "hybrid" over the ep ranks, with
            a replica in each dp group.
        cp_size: neighbouring ranks that form a context-parallel group: they share sequences, each with a range of
            positions.
        pp_size: parts in which the layers are distributed, each to its own ranks.
        tp_size: neighbouring ranks that form a tensor-parallel group: they share sequences, and divide heads, dense
            MLPs and the vocabulary.
    """

    world_size: int
    ep_size: int
    dense_shard: DenseShard = "full"
    cp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1

    @property
    def ranks_per_stage(self) -> int:
        """The ranks of one pp index."""
        return self.world_size // self.pp_size

    @property
    def dp_size(self) -> int:
        return self.ranks_per_stage // self.ep_size

    @property
    def ranks_per_sequence(self) -> int:
        """The ranks, of one pp index, that share sequences."""
        return self.cp_size * self.tp_size

    @property
    def data_size(self) -> int:
        """The number of groups of ranks, of one pp index, that each read sequences of their own."""
        return self.ranks_per_stage // self.ranks_per_sequence

    def pp_rank(self, rank: int) -> int:
        """The pp index of a rank."""
        return rank // self.ranks_per_stage

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(dp index, ep index) of a rank."""
        return divmod(rank % self.ranks_per_stage, self.ep_size)

    def data_index(self, rank: int) -> int:
        """Which of the groups that read sequences a rank is in."""
        return rank % self.ranks_per_stage // self.ranks_per_sequence

    def tp_rank(self, rank: int) -> int:
        """The tp index of a rank."""
        return rank % self.tp_size

    def pipeline(self, rank: int) -> list[int]:
        """The ranks, in the order of pp indices, that pass a rank's micro-batches on to one another."""
        return list(range(rank % self.ranks_per_stage, self.world_size, self.ranks_per_stage))

    def rows(self, num_rows: int, layout: Layout, rank: int) -> range:
        """Rows of a tensor with `num_rows` rows that `rank` holds; may be empty."""
        if layout.pp_ranks is not None and self.pp_rank(rank) not in layout.pp_ranks:
            return range(0)
        rows = range(num_rows)
        for cut in layout.cuts:
            size, index = self._place(cut, rank)
            assert cut.axis not in ("ep", "tp") or len(rows) % size == 0, (num_rows, self)
            part = _chunk(len(rows), size, index)
            rows = rows[part.start : part.stop]
        return rows

    def _place(self, cut: Cut, rank: int) -> tuple[int, int]:
        """(ranks on the axis of a cut, this rank's index among them)."""
        dp_index, ep_index = self.coordinates(rank)
        dense = (self.ep_size, ep_index)
        if self.dense_shard == "full":
            dense = self.ranks_per_stage, rank % self.ranks_per_stage
        match cut.axis:
            case "ep":
                return self.ep_size, ep_index
            case "dp":
                return self.dp_size, dp_index
            case "tp":
                return self.tp_size, self.tp_rank(rank)
            case "dense":
                return dense
            case "dense of tp":
                return dense[0] // self.tp_size, dense[1] // self.tp_size

    def owners(self, num_rows: int, layout: Layout) -> Iterator[tuple[int, range]]:
        """(rank, its rows) in row order, one owner for each row: of replicas, the lowest rank."""
        owners: dict[range, int] = {}
        for rank in range(self.world_size):
            owners.setdefault(self.rows(num_rows, layout, rank), rank)
        yield from sorted(((rank, rows) for rows, rank in owners.items() if rows), key=lambda part: part[1].start)


def rows_of(shape: tuple[int, ...]) -> int:
    """Rows of a tensor of this shape; a scalar is one row."""
    return shape[0] if shape else 1


def _chunk(num_rows: int, parts: int, index: int) -> range:
    """Part `index` as `torch.chunk`, and so FSDP2 and DTensor's Shard(0), cut it."""
    size = -(-num_rows // parts)
    return range(min(index * size, num_rows), min((index + 1) * size, num_rows))


def check_sizes(topology: Topology, num_experts: int | None) -> None:
    """
    Args:
        num_experts: of the model; None where it is not known yet.

    Raises:
        ExpertMeshError: a size does not divide what it has to; the message names the flag and lists what would work.
    """
    ranks = topology.ranks_per_stage if 0 < topology.pp_size <= topology.world_size else 0
    check_divides("--pp-size", topology.pp_size, topology.world_size)
    _check_ep_size(topology.ep_size, ranks, num_experts)
    check_divides("--tp-size", topology.tp_size, ranks)
    check_divides("--cp-size", topology.cp_size, ranks)
    if ranks % topology.ranks_per_sequence:
        fits = divisors(ranks // topology.tp_size)
        raise ExpertMeshError(
            f"--cp-size {topology.cp_size} and --tp-size {topology.tp_size} make groups of "
            f"{topology.ranks_per_sequence} ranks, which do not divide the {ranks} ranks; with that --tp-size use "
            f"--cp-size {either(fits)}"
        )
    if topology.dense_shard == "hybrid" and topology.ep_size % topology.tp_size:
        raise ExpertMeshError(
            f"--tp-size {topology.tp_size} does not divide --ep-size {topology.ep_size}, over whose ranks "
            "--dense-shard hybrid shards what tp divides; use --dense-shard full, or a --tp-size of "
            f"{either(divisors(topology.ep_size))}"
        )


def check_chunks(chunks: int, ep_size: int, num_experts: int) -> None:
    """
    Raises:
        ExpertMeshError: all-to-alls are to be cut into more chunks than a rank has experts.
    """
    here = num_experts // ep_size
    if chunks > here:
        raise ExpertMeshError(
            f"--overlap-chunks {chunks}: at --ep-size {ep_size} a rank has {here} of {num_experts} experts, and a "
            f"chunk has the tokens of one expert at least; use at most {here}"
        )


def check_tp_nodes(topology: Topology, nodes: Sequence[str]) -> None:
    """
    Args:
        nodes: the name of every rank's node.

    Raises:
        ExpertMeshError: a tensor-parallel group has ranks on several nodes.
    """
    size = topology.tp_size
    for first in range(0, topology.world_size, size):
        if _spans(nodes, first, size):
            fits = tp_sizes_on_nodes(size, nodes)
            raise ExpertMeshError(
                f"--tp-size {size}: a group has {nodes_of(range(first, first + size), nodes)}; its ranks exchange "
                f"activations in every layer, and must be on one node: use --tp-size {either(fits)}. Where nodes have "
                "fast links between them, --ranks-per-node says of how many ranks"
            )


def tp_sizes_on_nodes(size: int, nodes: Sequence[str]) -> list[int]:
    """The divisors of a size of which tensor-parallel groups can be that have their ranks on one node each."""
    return [n for n in divisors(size) if not any(_spans(nodes, at, n) for at in range(0, len(nodes), n))]


def nodes_of_equal_size(world_size: int, ranks_per_node: int) -> list[str]:
    """Names of all ranks' nodes, as `check_tp_nodes` takes them."""
    return [f"node {rank // ranks_per_node}" for rank in range(world_size)]


def _spans(nodes: Sequence[str], first: int, size: int) -> bool:
    return len({*nodes[first : first + size]}) > 1


def check_divides(flag: str, size: int, ranks: int) -> None:
    """
    Raises:
        ExpertMeshError: the size of an axis, given by a flag, does not divide the ranks.
    """
    if size < 1 or ranks % size:
        raise ExpertMeshError(f"{flag} {size} does not divide {_use(divisors(ranks), ranks)}")


def _check_ep_size(ep_size: int, ranks: int, num_experts: int | None) -> None:
    fits = [n for n in divisors(ranks) if num_experts is None or num_experts % n == 0]
    if num_experts is not None and (ep_size < 1 or num_experts % ep_size):
        of_model = divisors(num_experts)
        raise ExpertMeshError(
            f"--ep-size {ep_size} does not divide the {num_experts} experts of this model; use {either(of_model)}"
            + ("" if of_model == fits else f" (with {ranks} ranks: {either(fits)})")
        )
    if ep_size < 1 or ranks % ep_size:
        raise ExpertMeshError(f"--ep-size {ep_size} does not divide {_use(fits, ranks)}")


def _use(fits: list[int], ranks: int) -> str:
    if ranks == 1:
        return "1 rank; use 1, or more ranks (torchrun --nproc-per-node N)"
    return f"the {ranks} ranks; use {either(fits)}"


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def either(numbers: list[int]) -> str:
    """Write choices as in: 1, 2 or 4."""
    *head, last = (str(n) for n in numbers)
    return f"{', '.join(head)} or {last}" if head else last
