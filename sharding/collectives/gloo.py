"""FSDP's two collectives over gloo, in the fewest bytes and copies.

torch's own collectives copy: its all-gather over gloo receives into a buffer allocated for the call; its reduce-scatter
is an all-reduce of a clone, twice the traffic. Memory that is mapped anew for each call costs more than the call: the
kernel has to clear every page of it. Here the parts go straight from and to where they belong, in memory that all calls
share.

Shape suffixes: n ranks of the group, P elements of a part, one rank's.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...moe.torch_private import AllGather, ReduceScatter, _resolve_process_group, _storage_Use_Count
from ...moe.util.errors import ExpertMeshError


class SharedMemory:
    """Memory that is handed out in turn. A piece is free again when no tensor refers to it any more.

    Where torch does not count references as assumed here, every call gets memory of its own, and one warning says so:
    memory that is handed out too early would be written over while someone reads it.
    """

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.is_shared = counts_references()
        if not self.is_shared:
            warnings.warn(
                f"torch {torch.__version__} does not count references to memory as expertmesh assumes: FSDP's "
                "collectives over gloo get new memory for each call, which is slower",
                stacklevel=2,
            )

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor (numel,) on the CPU."""
        if not self.is_shared:
            return torch.empty(numel, dtype=dtype, device="cpu")
        num_bytes = numel * dtype.itemsize
        free = sorted((piece for piece in self.pieces if _is_free(piece)), key=Tensor.numel)
        piece = next((piece for piece in free if piece.numel() >= num_bytes), None)
        if piece is None:
            # what is too small makes way: at the end there are as many pieces as were ever in use at once
            if free:
                self.pieces = [other for other in self.pieces if other is not free[-1]]
            del free
            piece = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self.pieces.append(piece)
        assert piece.untyped_storage().nbytes() == piece.numel(), "someone has resized memory that is shared"
        return piece[:num_bytes].view(dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that is handed out in turn."""
        storage = tensor.untyped_storage()._cdata
        return any(piece.untyped_storage()._cdata == storage for piece in self.pieces)


def storage_references(tensor: Tensor) -> int:
    """How many tensors and objects refer to the memory that a tensor lies in."""
    return _storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_free(piece: Tensor) -> bool:
    # the piece itself, and the Python object that asks
    return storage_references(piece) <= 2


def counts_references() -> bool:
    """Whether a piece is seen as taken as long as there is a view of it, and as long as autograd keeps one for
    backward, and as free before and after."""
    with torch.inference_mode(False), torch.enable_grad():
        piece = torch.empty(8, dtype=torch.uint8, device="cpu")
        found = [_is_free(piece)]
        view = piece[:4].view(torch.float32)
        found.append(_is_free(piece))
        del view
        found.append(_is_free(piece))
        # the view goes, and the graph keeps it
        product = torch.ones(1, device="cpu", requires_grad=True) * piece[4:].view(torch.float32)
        found.append(_is_free(piece))
        del product
        found.append(_is_free(piece))
    return found == [True, False, True, False, True]


class GlooAllGather(AllGather):
    """For `FSDPModule.set_custom_all_gather`, on a CPU. Done when the call returns."""

    def __init__(self, memory: SharedMemory):
        self.memory = memory

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.memory.take(torch.Size(size).numel(), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        gloo_all_gather(input_tensor, output_tensor, group.group_name)


class GlooReduceScatter(ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`, on a CPU; sums only. Done when the call returns.

    FSDP asks for memory for a call's input, and, while it holds that, for the output: the gradients, which live until
    the update is made and must not occupy shared memory.
    """

    def __init__(self, memory: SharedMemory):
        self.memory = memory
        # weak: of a backward that ended in an exception there is no input any more
        self.input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = torch.Size(size).numel()
        if self.input is None or self.input() is None:
            tensor = self.memory.take(numel, dtype)
            self.input = weakref.ref(tensor)
            return tensor
        self.input = None
        return torch.empty(numel, dtype=dtype, device="cpu")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """
        Raises:
            ExpertMeshError: FSDP has asked for the memory of these in another way than in the supported releases of
                torch; gradients would lie in shared memory.
        """
        assert op == dist.ReduceOp.SUM, op
        self.input = None
        if self.memory.is_shared and (not self.memory.holds(input_tensor) or self.memory.holds(output_tensor)):
            raise ExpertMeshError(
                f"torch {torch.__version__}: FSDP asks for the memory of a reduce-scatter in another way than "
                "expertmesh assumes (its input, then its output); use a supported version of torch"
            )
        received = self.memory.take(output_tensor.numel(), output_tensor.dtype)
        gloo_reduce_scatter(input_tensor, output_tensor, received, group.group_name)


@torch.library.custom_op("expertmesh::all_gather", mutates_args=("out_nP",))
def gloo_all_gather(part_P: Tensor, out_nP: Tensor, group_name: str) -> None:
    """Gather every rank's part, one after the other, into `out_nP` (flat); `part_P` may be this rank's place in it."""
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
def gloo_reduce_scatter(data_nP: Tensor, out_P: Tensor, received_P: Tensor, group_name: str) -> None:
    """Write the sum over all ranks of this rank's part of `data_nP` (flat) into `out_P`, by way of `received_P`.

    Added up in the order of the ranks, so that the same values always have the same sum.
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
