"""Whether tensors that several ranks hold a copy of are still the same on all of them (--check-replicas).

Shape suffixes: W ranks, N tensors.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby

import torch
from torch import Tensor, nn

from ..moe.util.errors import ExpertMeshError
from .collectives.groups import all_gather
from .state import StateTensor, state_of
from .topology import REPLICATED, Layout, Topology

CHUNK = 2**21
"""Elements that are summed up at a time: 16 MiB as int64."""
NAMED = 5

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(
    model: nn.Module, topology: Topology, device: torch.device, step: int, also: Mapping[str, float]
) -> None:
    """Compare checksums over the ranks. All ranks call it together, between steps.

    Args:
        model: sharded. Its replicated tensors are those of which several ranks hold the same rows: non-expert
            parameters, with hybrid sharding, over dp; those that several stages of a pipeline use; buffers.
        topology: its parallel layout.
        device: for the collective.
        step: for the message.
        also: values by name that should be the same on all ranks.

    Raises:
        ExpertMeshError: on all ranks alike, naming tensors and ranks.
    """
    parts = replicated_state(model, topology)
    sums = [checksum(part.local) if part.is_here else torch.zeros((), dtype=torch.int64) for part in parts.values()]
    sums += [checksum(torch.tensor([value], dtype=torch.float64)) for value in also.values()]
    sums_N = torch.stack([total.to(device) for total in sums])
    everyones = sums_N.new_empty(topology.world_size * len(sums))
    all_gather(everyones, sums_N)
    sums_NW = everyones.view(-1, len(sums)).t().tolist()
    groups = [_replicas(part.num_rows, part.layout, topology) for part in parts.values()]
    groups += [_replicas(1, REPLICATED, topology)] * len(also)
    named = zip([*parts, *also], groups, sums_NW, strict=True)
    differing = {name: how for name, of_tensor, sums_W in named if (how := _disagreement(of_tensor, sums_W))}
    if differing:
        first = "; ".join(f"{name} ({how})" for name, how in list(differing.items())[:NAMED])
        more = f"; and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise ExpertMeshError(
            f"--check-replicas: after step {step}, {len(differing)} of {len(sums)} tensors differ "
            f"between the ranks that replicate them: {first}{more}; a device or its memory may be "
            "faulty: resume from the last checkpoint with --resume auto; if the same rank differs "
            "again, replace its device"
        )


def replicated_state(model: nn.Module, topology: Topology) -> dict[str, StateTensor]:
    """Parameters and buffers that several ranks hold alike, by name; the same on every rank."""
    state = state_of(model)
    return {name: part for name, part in state.items() if _replicas(part.num_rows, part.layout, topology)}


@cache
def _replicas(num_rows: int, layout: Layout, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Groups of several ranks that hold the same rows of a tensor."""
    holders: dict[range, list[int]] = {}
    for rank in range(topology.world_size):
        if rows := topology.rows(num_rows, layout, rank):
            holders.setdefault(rows, []).append(rank)
    return tuple(tuple(ranks) for ranks in holders.values() if len(ranks) > 1)


def _disagreement(groups: Sequence[Sequence[int]], sums_W: Sequence[int]) -> str:
    """Which ranks have which value, for groups of replicas that do not agree; empty where all do."""
    differences = []
    for group in groups:
        by_sum = sorted(group, key=lambda rank: sums_W[rank])
        camps = sorted((sorted(same) for _, same in groupby(by_sum, key=lambda rank: sums_W[rank])), key=len)
        if len(camps) > 1:
            differences.append(" against ".join(_ranks(camp) for camp in camps))
    return ", ".join(differences)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of a tensor's bits: the sum over all elements of their bits as an integer times 2·position + 1, modulo
    2^64.

    An int64 scalar on the tensor's device. The same in whatever order it is summed up. The factors are odd, so a single
    element that differs always shows; several may cancel out, but not by chance.
    """
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK]
        factors = torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=tensor.device)
        total += factors.mul_(chunk).sum()
    return total
