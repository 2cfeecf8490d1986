"""Whether tensors that several ranks hold a copy of are still the same on all of them (--check-replicas).

Shape suffixes: W ranks, N tensors.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from moe import ExpertMeshError
from sharding.state import local_tensor, state_of

CHUNK = 2**21
"""Elements that are summed up at a time: 16 MiB as int64."""
NAMED = 5

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(model: nn.Module, device: torch.device, step: int, also: Mapping[str, float]) -> None:
    """Compare checksums over the ranks. All ranks call it together, between steps.

    Args:
        model: sharded. Its replicated tensors are parameters with a `Replicate` placement on an axis of several ranks
            (those that are no expert's, with hybrid sharding, over dp) and whatever is no DTensor, buffers that is.
        device: for the collective.
        step: for the message.
        also: numbers by name that should be the same on all ranks.

    Raises:
        ExpertMeshError: on all ranks alike, naming tensors and ranks.
    """
    tensors = replicated_tensors(model)
    tensors |= {name: torch.tensor([value], dtype=torch.float64) for name, value in also.items()}
    sums_N = torch.stack([checksum(local_tensor(tensor)).to(device) for tensor in tensors.values()])
    sums = sums_N.new_empty(dist.get_world_size() * len(tensors))
    dist.all_gather_into_tensor(sums, sums_N)
    sums_NW = sums.view(-1, len(tensors)).t()
    by_tensor = zip(tensors.items(), sums_NW.tolist(), strict=True)
    differing = {name: told for (name, tensor), sums_W in by_tensor if (told := _disagreement(tensor, sums_W))}
    if differing:
        named = "; ".join(f"{name} ({told})" for name, told in list(differing.items())[:NAMED])
        more = f"; and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise ExpertMeshError(
            f"--check-replicas: after step {step}, {len(differing)} of {len(tensors)} tensors differ between the "
            f"ranks that replicate them: {named}{more}; a device or its memory may be at fault: resume from the last "
            "checkpoint with --resume auto; if the same rank differs again, leave out its device"
        )


def replicated_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that several ranks hold alike, by name."""
    state = state_of(model)
    return {name: part.tensor.detach() for name, part in state.items() if len(_replicas(part.tensor)[0]) > 1}


def _replicas(tensor: Tensor) -> list[list[int]]:
    """Groups of ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return [list(range(dist.get_world_size()))]
    mesh = tensor.device_mesh.mesh
    axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    if not axes:
        return [[rank] for rank in mesh.flatten().tolist()]
    others = [axis for axis in range(mesh.dim()) if axis not in axes]
    replicas = math.prod(mesh.shape[axis] for axis in axes)
    groups: list[list[int]] = mesh.permute(*others, *axes).reshape(-1, replicas).tolist()
    return groups


def _disagreement(tensor: Tensor, sums_W: Sequence[int]) -> str:
    """Which ranks have which value, for groups of replicas that do not agree; empty where all do."""
    told = []
    for group in _replicas(tensor):
        by_sum = sorted(group, key=lambda rank: sums_W[rank])
        camps = sorted((sorted(same) for _, same in groupby(by_sum, key=lambda rank: sums_W[rank])), key=len)
        if len(camps) > 1:
            told.append(" against ".join(_ranks(camp) for camp in camps))
    return ", ".join(told)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def checksum(tensor: Tensor) -> Tensor:
    """Of a tensor's bits: the sum over all elements of their bits as an integer times 2·position + 1, modulo 2^64.

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
