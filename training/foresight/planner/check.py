"""Whether every group of the mesh works, and how fast: the first thing to run on a new cluster, under torchrun."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.moe import ExpertMeshError
from expertmesh.sharding.comms.context_parallel import CPGroup
from expertmesh.sharding.mesh import Mesh
from expertmesh.training.foresight.planner.hardware import Device, Hardware, Link
from expertmesh.training.foresight.planner.mesh_picture import spans_nodes

ROUNDS = 9
"""Of which the median counts, after two that warm up."""

NCCL_BYTES, GLOO_BYTES = 64 * 2**20, 4 * 2**20
"""What a rank sends to measure a group's bandwidth."""

SLOW = 0.5
"""A group below this share of its siblings' median bandwidth is called slow."""


@dataclass(frozen=True)
class GroupSpeed:
    """name: of its kind, as dp. ranks: its members. latency: seconds for one token. bandwidth: bytes that a rank sends
    per second."""

    name: str
    ranks: tuple[int, ...]
    latency: float
    bandwidth: float
    is_slow: bool = False


def check_groups(mesh: Mesh, row_bytes: int, device: torch.device) -> list[GroupSpeed]:
    """Exchange one token and a large message in every group of more than one rank, in that of a pipeline between
    neighbours; all ranks call it together.

    Args:
        row_bytes: bytes of one token's hidden state.

    Returns:
        All groups' figures, on every rank; a group goes by its slowest rank.

    Raises:
        ExpertMeshError: a collective failed or did not finish in the process group's time limit; names the group.
    """
    large = NCCL_BYTES if device.type == "cuda" else GLOO_BYTES
    exchanges: dict[str, _Exchange] = {
        "ep": (mesh.exchange, _all_to_all),
        "dp": (mesh.dp.get_group(), _all_reduce),
        "all": (mesh.all_ranks.get_group(), _all_reduce),
    }
    if mesh.cp_group is not None:
        exchanges |= _of_sequences(mesh.cp_group)
    if mesh.pipeline is not None:
        exchanges["pp"] = (mesh.pipeline.forward, _pass_on)
    own: list[GroupSpeed] = []
    for name, (group, exchange) in exchanges.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            own.append(_measure(name, ranks, group, exchange, row_bytes, large, device))
    gathered: list[list[GroupSpeed]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return mark_slow(_slowest_of_each([speed for speeds in gathered for speed in speeds]))


_Exchange = tuple[dist.ProcessGroup, Callable[[Tensor, dist.ProcessGroup], None]]
"""A group, and what its ranks do."""


def _of_sequences(group: CPGroup) -> dict[str, _Exchange]:
    """Of the groups of ranks that share sequences."""
    by_heads, tp = group if group.tp is None else group.within_tp, group.tp
    found: dict[str, _Exchange] = {}
    if by_heads is not None and by_heads.ranks is not None:
        found["cp"] = (by_heads.ranks, _all_to_all)
    if tp is not None and tp.ranks is not None:
        # an all-gather and a reduce-scatter, as regions begin and end with them
        found["tp"] = (tp.ranks, _all_reduce)
    return found


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


def _measure(
    name: str,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup,
    exchange: Callable[[Tensor, dist.ProcessGroup], None],
    row_bytes: int,
    large: int,
    device: torch.device,
) -> GroupSpeed:
    size = len(ranks)
    # an all-to-all splits evenly
    small_x, large_x = (
        torch.zeros(max(num_bytes // 4 // size, 1) * size, device=device) for num_bytes in (row_bytes, large)
    )
    # of an all-to-all a rank sends all but its own part, of an all-reduce twice as much (see `traffic`)
    sent = float(large_x.nbytes)
    if exchange is not _pass_on:
        sent *= (size - 1) / size * (1 if exchange is _all_to_all else 2)
    try:
        latency = median_seconds(lambda: exchange(small_x, group), device)
        seconds = median_seconds(lambda: exchange(large_x, group), device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ExpertMeshError(
            f"mesh --check: the {name} group of ranks {', '.join(map(str, ranks))} failed: {reason}; "
            "look at these ranks' network, and at NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
        ) from error
    return GroupSpeed(name, ranks, latency, sent / seconds)


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
        GroupSpeed(name, ranks, max(s.latency for s in each), min(s.bandwidth for s in each))
        for (name, ranks), each in groups.items()
    ]


def mark_slow(speeds: Sequence[GroupSpeed]) -> list[GroupSpeed]:
    """The same, with those marked that have less than SLOW times the median bandwidth of their kind."""
    marked = []
    for speed in speeds:
        siblings = [s.bandwidth for s in speeds if s.name == speed.name]
        is_slow = speed.bandwidth < SLOW * statistics.median(siblings)
        marked.append(GroupSpeed(speed.name, speed.ranks, speed.latency, speed.bandwidth, is_slow))
    return marked


def measured_hardware(speeds: Sequence[GroupSpeed], gpus_per_node: int, device: torch.device) -> Hardware:
    """This machine for the cost model, every rate as attained: of the groups inside a node and across nodes the slowest
    (of one kind of link, where there is no other), matrix products in bf16 (on a CPU fp32) and fp32, and a copy."""
    inside = [s for s in speeds if not _crosses(s, gpus_per_node)]
    between = [s for s in speeds if _crosses(s, gpus_per_node)]
    links = [_link(some or speeds) for some in (inside, between)]
    return Hardware("measured", measure_device(device), links[0], links[1])


def _crosses(speed: GroupSpeed, gpus_per_node: int) -> bool:
    return spans_nodes(range(speed.ranks[0], speed.ranks[-1] + 1), gpus_per_node)


def _link(speeds: Sequence[GroupSpeed]) -> Link:
    if not speeds:
        return Link(1e12, 0.0)
    # a ring's latency is that of its hops; to pass on is one
    hops = [s.latency / (1 if s.name == "pp" else len(s.ranks) - 1) for s in speeds]
    return Link(min(s.bandwidth for s in speeds), min(hops))


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
