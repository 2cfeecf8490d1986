"""Whether every group of the mesh works, and how fast: the first thing to run on a new cluster, under torchrun."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from ...sharding.collectives.context_parallel import CPGroup
from ...sharding.collectives.groups import make_group
from ...sharding.mesh import Mesh
from ...sharding.topology import Axis, Topology
from ..planning.planner.costs import Kind, ranks_a_node, share_away
from ..planning.planner.hardware import Device, Hardware, Link

ROUNDS = 9
"""Of which the median counts, after two that warm up."""

NCCL_BYTES, GLOO_BYTES = 64 * 2**20, 4 * 2**20
"""What a rank sends to measure a group's bandwidth."""

SLOW = 0.5
"""A group below this share of its siblings' median bandwidth is called slow."""


@dataclass(frozen=True)
class GroupSpeed:
    """How long a group takes for a small and for a large message.

    Attributes:
        name: its axis; "node" and "across nodes" are measured beside a mesh whose groups all span nodes.
        ranks: its members.
        kind: of the collective that was measured.
        sent: bytes that a rank sends to others, of the small message and of the large one.
        seconds: that they take.
    """

    name: Axis
    ranks: tuple[int, ...]
    kind: Kind
    sent: tuple[float, float]
    seconds: tuple[float, float]
    is_slow: bool = False

    @property
    def latency(self) -> float:
        """Seconds of the small message."""
        return self.seconds[0]

    @property
    def bandwidth(self) -> float:
        """Bytes that a rank sends per second, over whichever links, in the large message."""
        return self.sent[1] / self.seconds[1]


def check_groups(mesh: Mesh, row_bytes: int, device: torch.device, gpus_per_node: int) -> list[GroupSpeed]:
    """Exchange one token and a large message in every group of more than one rank, in that of a pipeline between
    neighbours; all ranks call it together. Where every group spans nodes, the ranks of each node are measured as well,
    and those of equal place on their nodes: else nothing would tell the links inside a node from those between.

    Args:
        row_bytes: bytes of one token's hidden state.

    Returns:
        All groups' figures, on every rank; a group goes by its slowest rank.

    Raises:
        ExpertMeshError: a collective failed or did not finish in the process group's time limit; names the group.
    """
    large = NCCL_BYTES if device.type == "cuda" else GLOO_BYTES
    exchanges: dict[Axis, _Exchange] = {
        "ep": (mesh.exchange, "all-to-all"),
        "dp": (mesh.dp.get_group(), "all-reduce"),
        "stage" if mesh.topology.dense_shard == "hybrid" else "dense": (mesh.all_ranks.get_group(), "all-reduce"),
    }
    if mesh.cp_group is not None:
        exchanges |= _of_sequences(mesh.cp_group)
    if mesh.pipeline is not None:
        exchanges["pp"] = (mesh.pipeline.forward, "send")
    exchanges |= _of_nodes(mesh.topology, exchanges, gpus_per_node)
    own: list[GroupSpeed] = []
    for name, (group, exchange) in exchanges.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            own.append(_measure(name, ranks, group, exchange, row_bytes, large, device))
    gathered: list[list[GroupSpeed]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return mark_slow(_slowest_of_each([speed for speeds in gathered for speed in speeds]))


_Exchange = tuple[dist.ProcessGroup, Kind]
"""A group, and what its ranks do."""


def _of_sequences(group: CPGroup) -> dict[Axis, _Exchange]:
    """Of the groups of ranks that share sequences."""
    by_heads, tp = group if group.tp is None else group.within_tp, group.tp
    found: dict[Axis, _Exchange] = {}
    if by_heads is not None and by_heads.ranks is not None:
        found["cp"] = (by_heads.ranks, "all-to-all")
    if tp is not None and tp.ranks is not None:
        # an all-gather and a reduce-scatter, as regions begin and end with them
        found["tp"] = (tp.ranks, "all-reduce")
    return found


def _of_nodes(topology: Topology, axes: Iterable[Axis], gpus_per_node: int) -> dict[Axis, _Exchange]:
    """This rank's node, and the ranks of its place on all nodes; none where the mesh has a group of several ranks
    inside a node, or the world is one node."""
    groups = [ranks for axis in axes for ranks in topology.groups(axis)]
    has_inside = any(len(ranks) > 1 and not _crosses(ranks, gpus_per_node) for ranks in groups)
    if has_inside or topology.world_size <= gpus_per_node:
        return {}
    node = make_group(topology, "node", ranks_per_node=gpus_per_node)
    across = make_group(topology, "across nodes", ranks_per_node=gpus_per_node)
    return {"node": (node, "all-reduce"), "across nodes": (across, "all-reduce")}


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(x), x, group=group)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next rank, and receive from the one before."""
    ranks, index = dist.get_process_group_ranks(group), dist.get_rank(group)
    following, preceding = ranks[(index + 1) % len(ranks)], ranks[index - 1]
    batch = [dist.P2POp(dist.isend, x, following, group), dist.P2POp(dist.irecv, torch.empty_like(x), preceding, group)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


_DOING: dict[Kind, Callable[[Tensor, dist.ProcessGroup], None]] = {
    "all-to-all": _all_to_all,
    "all-reduce": _all_reduce,
    "send": _pass_on,
}


def _measure(
    name: Axis,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup,
    kind: Kind,
    row_bytes: int,
    large: int,
    device: torch.device,
) -> GroupSpeed:
    size, exchange = len(ranks), _DOING[kind]
    # an all-to-all splits evenly
    small_x, large_x = (
        torch.zeros(max(num_bytes // 4 // size, 1) * size, device=device) for num_bytes in (row_bytes, large)
    )
    # of an all-to-all a rank sends all but its own part, of an all-reduce twice as much (see `traffic`)
    share = {"all-to-all": (size - 1) / size, "all-reduce": 2 * (size - 1) / size, "send": 1.0}[kind]
    try:
        of_small = median_seconds(lambda: exchange(small_x, group), device)
        of_large = median_seconds(lambda: exchange(large_x, group), device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ExpertMeshError(
            f"mesh --check: the {name} group of ranks {', '.join(map(str, ranks))} failed: {reason}; "
            "look at these ranks' network, and at NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
        ) from error
    return GroupSpeed(name, ranks, kind, (share * small_x.nbytes, share * large_x.nbytes), (of_small, of_large))


def median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median wall time of `work`, the device having finished."""
    times = []
    for _ in range(ROUNDS + 2):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def _slowest_of_each(speeds: Sequence[GroupSpeed]) -> list[GroupSpeed]:
    groups: dict[tuple[str, tuple[int, ...]], list[GroupSpeed]] = {}
    for speed in speeds:
        groups.setdefault((speed.name, speed.ranks), []).append(speed)
    return [
        replace(each[0], seconds=(max(s.seconds[0] for s in each), max(s.seconds[1] for s in each)))
        for each in groups.values()
    ]


def mark_slow(speeds: Sequence[GroupSpeed]) -> list[GroupSpeed]:
    """The same, with those marked that have less than SLOW times the median bandwidth of their kind."""
    marked = []
    for speed in speeds:
        siblings = [s.bandwidth for s in speeds if s.name == speed.name]
        is_slow = speed.bandwidth < SLOW * statistics.median(siblings)
        marked.append(replace(speed, is_slow=is_slow))
    return marked


def measured_hardware(speeds: Sequence[GroupSpeed], gpus_per_node: int, device: torch.device) -> Hardware:
    """This machine for the cost model, every rate as attained: its links (see `measured_links`), matrix products in
    bf16 (on a CPU fp32) and fp32, and a copy."""
    return Hardware("measured", measure_device(device), *measured_links(speeds, gpus_per_node))


def measured_links(speeds: Sequence[GroupSpeed], gpus_per_node: int) -> tuple[Link, Link]:
    """(the link inside a node, the link between nodes) with which the cost model gives the times that were measured.

    This is `seconds_among` solved for its links: of what a rank sends a part stays inside its node, the other leaves
    it, and the slower of both ways counts; a ring's latency is that of its hops, once for each of its rounds. Each link
    has the bandwidth of the slowest group that it holds up. Of a link that holds up none, the bandwidth is the least
    with which it would not; of a link over which no group sends, all is taken from the other one.
    """
    fits = [_fit(speed, gpus_per_node) for speed in speeds]
    inside = Link(min((fit.bandwidth for fit in fits if not fit.away), default=0.0), _least_latency(fits, inside=None))
    if not inside.bandwidth:
        inside = replace(inside, bandwidth=max((fit.bandwidth * (1 - fit.away) for fit in fits), default=0.0))
    crossing = [fit for fit in fits if fit.away]
    # the part that stays takes about as long as all that was measured: the part that leaves is no slower
    held_up = [fit for fit in crossing if (1 - fit.away) * fit.bandwidth < 0.95 * inside.bandwidth]
    bandwidth = min((fit.bandwidth * fit.away for fit in held_up), default=0.0)
    bandwidth = bandwidth or max((fit.bandwidth * fit.away for fit in crossing), default=0.0)
    between = Link(bandwidth, _least_latency(crossing, inside))
    links = [link for link in (inside, between) if link.bandwidth]
    if not links:
        return Link(1e12, 0.0), Link(1e12, 0.0)
    return (inside if inside.bandwidth else between), (between if between.bandwidth else inside)


@dataclass(frozen=True)
class _Fit:
    """A line through a group's two times: so many seconds, and so many bytes per second that a rank sends. away: the
    fraction of them that leaves the node. rounds: of a ring; 0: all is sent at once. here, nodes: ranks of a node, and
    how many nodes."""

    seconds: float
    bandwidth: float
    away: float
    rounds: int
    here: int
    nodes: int


def _fit(speed: GroupSpeed, gpus_per_node: int) -> _Fit:
    (small, large), (of_small, of_large) = speed.sent, speed.seconds
    # where a large message seems to take no longer than a small one, it is all latency
    bandwidth = (large - small) / (of_large - of_small) if of_large > of_small else speed.bandwidth
    here = ranks_a_node(speed.ranks, gpus_per_node)
    return _Fit(
        max(of_small - small / bandwidth, 0.0),
        bandwidth,
        share_away(speed.kind, speed.ranks, gpus_per_node),
        2 * (speed.kind == "all-reduce"),
        here,
        -(-len(speed.ranks) // here),
    )


def _least_latency(fits: Sequence[_Fit], inside: Link | None) -> float:
    """That of a link: inside a node, or where it is known of that one, between nodes."""
    found: list[float] = []
    for fit in fits:
        if inside is None and fit.away:
            continue
        hops = fit.here - 1 if inside is None else fit.nodes - 1
        known = 0.0 if inside is None else (fit.here - 1) * inside.latency
        found.append(fit.seconds if not fit.rounds else (fit.seconds / fit.rounds - known) / hops)
    return min((seconds for seconds in found if seconds > 0), default=0.0)


def _crosses(ranks: Sequence[int], gpus_per_node: int) -> bool:
    return ranks_a_node(tuple(ranks), gpus_per_node) < len(ranks)


def measure_device(device: torch.device) -> Device:
    """Rates of this rank's device while every rank measures its own, and its memory."""
    is_gpu = device.type == "cuda"
    side = 8192 if is_gpu else 1024
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    fp32 = 2 * side**3 / median_seconds(lambda: a @ b, device)
    matrix = fp32
    if is_gpu:
        a, b = a.bfloat16(), b.bfloat16()
        matrix = 2 * side**3 / median_seconds(lambda: a @ b, device)
    large = torch.zeros((NCCL_BYTES if is_gpu else 8 * GLOO_BYTES) * 4, dtype=torch.uint8, device=device)
    copy = torch.empty_like(large)
    bandwidth = 2 * large.nbytes / median_seconds(lambda: copy.copy_(large), device)
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else 0.0
    return Device(matrix, fp32, bandwidth, memory)
