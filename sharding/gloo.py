"""FSDP's two collectives over gloo, in the fewest bytes and copies.

torch's own copy: its all-gather over gloo receives into a buffer made for the occasion; its reduce-scatter is an
all-reduce of a clone, twice the traffic. Memory that is mapped anew for each call costs more than the call: the kernel
has to clear every page of it. Here the parts go straight from and to where they belong, in memory that all calls share.

Shape suffixes: n ranks of the group, P numbers of a part, one rank's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class SharedMemory:
    """Memory that is handed out in turn. A piece is free again when no tensor refers to it any more."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor (numel,) on the CPU."""
        num_bytes = numel * dtype.itemsize
        free = sorted((piece for piece in self.pieces if _is_free(piece)), key=Tensor.numel)
        piece = next((piece for piece in free if piece.numel() >= num_bytes), None)
        if piece is None:
            # what is too small makes way: at the end there are as many pieces as were ever in use at once
            if free:
                self.pieces = [other for other in self.pieces if other is not free[-1]]
            del free
            piece = torch.empty(num_bytes, dtype=torch.uint8)
            self.pieces.append(piece)
        return piece[:num_bytes].view(dtype)


def _is_free(piece: Tensor) -> bool:
    # the piece itself, and the Python object that asks
    return torch._C._storage_Use_Count(piece.untyped_storage()._cdata) <= 2


class GlooAllGather(AllGather):
    """For `FSDPModule.set_custom_all_gather`, on a CPU. Done when the call returns."""

    def __init__(self, memory: SharedMemory):
        self.memory = memory

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.memory.take(torch.Size(size).numel(), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather(input_tensor, output_tensor, group.group_name)


class GlooReduceScatter(ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`, on a CPU; sums only. Done when the call returns."""

    def __init__(self, memory: SharedMemory):
        self.memory = memory
        self.input_is_next = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP asks for a call's input, then for its output: the gradients, which live until the update is made and
        are not to hold on to memory that is shared."""
        is_input, self.input_is_next = self.input_is_next, not self.input_is_next
        numel = torch.Size(size).numel()
        return self.memory.take(numel, dtype) if is_input else torch.empty(numel, dtype=dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        self.input_is_next = True
        received = self.memory.take(output_tensor.numel(), output_tensor.dtype)
        reduce_scatter(input_tensor, output_tensor, received, group.group_name)


@torch.library.custom_op("expertmesh::all_gather", mutates_args=("out_nP",))
def all_gather(part_P: Tensor, out_nP: Tensor, group_name: str) -> None:
    """Every rank's part, one after the other, into `out_nP` (flat); `part_P` may be this rank's place in it."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    rank, parts = dist.get_rank(group), out_nP.chunk(group.size())
    if parts[rank].data_ptr() != part_P.data_ptr():
        parts[rank].copy_(part_P)
    others = [(rank + distance) % len(parts) for distance in range(1, len(parts))]
    works = [group.recv([parts[other]], other, 0) for other in others]
    works += [group.send([parts[rank]], other, 0) for other in reversed(others)]
    for work in works:
        work.wait()


@torch.library.custom_op("expertmesh::reduce_scatter", mutates_args=("out_P", "received_P"))
def reduce_scatter(data_nP: Tensor, out_P: Tensor, received_P: Tensor, group_name: str) -> None:
    """The sum over all ranks of this rank's part of `data_nP` (flat) into `out_P`, by way of `received_P`.

    Added up in the order of the ranks, so that the same numbers always have the same sum.
    """
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    rank, parts = dist.get_rank(group), data_nP.chunk(group.size())
    sends = [group.send([part], other, 0) for other, part in enumerate(parts) if other != rank]
    for other in range(len(parts)):
        if other != rank:
            group.recv([received_P], other, 0).wait()
        term_P = parts[rank] if other == rank else received_P
        out_P.copy_(term_P) if other == 0 else out_P.add_(term_P)
    for send in sends:
        send.wait()
