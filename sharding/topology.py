"""The parallel layout, and which rows of a parameter each rank holds. Pure arithmetic: no process group, no torch.

`world = pp × dp × ep`; rank = (pp index · dp + dp index) · ep + ep index. The ranks of one pp index hold the same
layers of the model: a pipeline's stage, or several of them. A tensor's layout says which of these hold it, and over
which axes of their ranks it is sharded.

For data the ranks of a pp index form another grid, `data × cp × tp`: neighbours share sequences, each with a range of
their positions. Those of a tensor-parallel group, the innermost ones, also divide heads, dense MLPs and the vocabulary:
these parameters are sharded over tp first, then over the ranks of the same tp index. A context-parallel group does not
change how parameters are sharded. All pp indices read the same sequences.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from ..moe.util.errors import ExpertMeshError
from .torchrun import nodes_of

DenseShard = Literal["full", "hybrid"]

Axis = Literal[
    "world",
    "pp",
    "stage",
    "dp",
    "ep",
    "ep across nodes",
    "ep inside node",
    "dense",
    "dense of tp",
    "sequences",
    "cp",
    "tp",
    "node",
    "across nodes",
]
"""The kinds of groups that ranks form; those of an axis have every rank once. Process groups are named after them.

world: all ranks.
pp: one rank of each pp index, in the order of these. They pass micro-batches on to one another.
stage: the ranks of a pp index.
dp: those of a stage that hold the same experts.
ep: those over which the experts are distributed. Across nodes: of these, one of each node; inside node: those of one.
dense: those over which non-expert parameters are sharded: a stage or, with replicas, an ep group. Of tp: of these, the
    ones with one tp index.
sequences: those that share sequences. cp: of these, the ones with one tp index; tp: with one range of positions.
node: those of a node; the last may have fewer. Across nodes: one of each.
"""


@dataclass(frozen=True)
class Cut:
    """A tensor is sharded along its dim 0 over the ranks of an axis."""

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

    def groups(self, axis: Axis, ranks_per_node: int | None = None) -> list[range]:
        """All groups of an axis, in which every rank stands once.

        Args:
            ranks_per_node: for the axes of nodes: ranks with fast links between them; of an ep group that spans nodes,
                as many on each.
        """
        block, step = self._grid(axis, ranks_per_node)
        starts = range(0, self.world_size, block)
        groups = [range(at + i, min(at + block, self.world_size), step) for at in starts for i in range(step)]
        return [group for group in groups if group]

    def group(self, axis: Axis, rank: int, ranks_per_node: int | None = None) -> range:
        """That of `groups` which a rank is in."""
        block, step = self._grid(axis, ranks_per_node)
        start = rank - rank % block
        return range(start + rank % block % step, min(start + block, self.world_size), step)

    def _grid(self, axis: Axis, ranks_per_node: int | None = None) -> tuple[int, int]:
        """(block, step) of an axis: its groups are blocks of so many neighbours, of which every `step`-th."""
        assert ranks_per_node is not None or "node" not in axis, axis
        stage, ep, tp, node = self.ranks_per_stage, self.ep_size, self.tp_size, ranks_per_node or 1
        dense = ep if self.dense_shard == "hybrid" else stage
        match axis:
            case "world":
                return self.world_size, 1
            case "pp":
                return self.world_size, stage
            case "stage":
                return stage, 1
            case "dp":
                return stage, ep
            case "ep":
                return ep, 1
            case "ep across nodes":
                return ep, min(node, ep)
            case "ep inside node":
                return min(node, ep), 1
            case "dense":
                return dense, 1
            case "dense of tp":
                return dense, tp
            case "sequences":
                return self.ranks_per_sequence, 1
            case "cp":
                return self.ranks_per_sequence, tp
            case "tp":
                return tp, 1
            case "node":
                return node, 1
            case "across nodes":
                return self.world_size, node

    def rows(self, num_rows: int, layout: Layout, rank: int) -> range:
        """Rows of a tensor with `num_rows` rows that `rank` holds; may be empty."""
        if layout.pp_ranks is not None and self.pp_rank(rank) not in layout.pp_ranks:
            return range(0)
        rows = range(num_rows)
        for cut in layout.cuts:
            group = self.group(cut.axis, rank)
            assert cut.axis not in ("ep", "tp") or len(rows) % len(group) == 0, (num_rows, self)
            part = _chunk(len(rows), len(group), group.index(rank))
            rows = rows[part.start : part.stop]
        return rows

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
            f"{topology.ranks_per_sequence} ranks, which do not divide the {ranks} ranks; with this "
            f"--tp-size use --cp-size {either(fits)}"
        )
    if topology.dense_shard == "hybrid" and topology.ep_size % topology.tp_size:
        raise ExpertMeshError(
            f"--tp-size {topology.tp_size} does not divide --ep-size {topology.ep_size}, which "
            "--dense-shard hybrid needs; use --dense-shard full, or a --tp-size of "
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
            f"--overlap-chunks {chunks}: at --ep-size {ep_size} a rank has {here} of {num_experts} "
            f"experts, and a chunk needs one expert or more; use at most {here}"
        )


def check_tp_nodes(topology: Topology, nodes: Sequence[str]) -> None:
    """
    Args:
        nodes: the name of every rank's node.

    Raises:
        ExpertMeshError: a tensor-parallel group has ranks on several nodes.
    """
    size = topology.tp_size
    for group in topology.groups("tp"):
        if _is_across(group, nodes):
            fits = tp_sizes_on_nodes(size, nodes)
            raise ExpertMeshError(
                f"--tp-size {size}: a group has {nodes_of(group, nodes)}; its ranks exchange activations "
                f"in every layer, and must be on one node: use --tp-size {either(fits)}. If fast links "
                "connect several nodes, give their number of ranks as --ranks-per-node"
            )


def tp_sizes_on_nodes(size: int, nodes: Sequence[str]) -> list[int]:
    """The divisors of a size of which tensor-parallel groups can be that have their ranks on one node each."""
    tried = ((n, Topology(len(nodes), 1, tp_size=n).groups("tp")) for n in divisors(size))
    return [n for n, groups in tried if not any(_is_across(group, nodes) for group in groups)]


def nodes_of_equal_size(world_size: int, ranks_per_node: int) -> list[str]:
    """Names of all ranks' nodes, as `check_tp_nodes` takes them."""
    return [f"node {rank // ranks_per_node}" for rank in range(world_size)]


def ranks_per_equal_node(world_size: int, most: int) -> int:
    """Ranks of each node where all nodes have equally many, as many as may be."""
    return max(n for n in divisors(world_size) if n <= most)


def _is_across(ranks: Iterable[int], nodes: Sequence[str]) -> bool:
    return len({nodes[rank] for rank in ranks}) > 1


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
            + ("" if of_model == fits else f" (with {ranks} rank{'s' * (ranks > 1)}: {either(fits)})")
        )
    if ep_size < 1 or ranks % ep_size:
        raise ExpertMeshError(f"--ep-size {ep_size} does not divide {_use(fits, ranks)}")


def _use(fits: list[int], ranks: int) -> str:
    if ranks == 1:
        return "1 rank; use 1, or more ranks (torchrun --nproc-per-node N)"
    return f"the {ranks} ranks; use {either(fits)}"


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [n for n in range(1, isqrt(max(number, 0)) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def either(numbers: list[int]) -> str:
    """Write choices as in: 1, 2 or 4."""
    *head, last = (str(n) for n in numbers)
    return f"{', '.join(head)} or {last}" if head else last
