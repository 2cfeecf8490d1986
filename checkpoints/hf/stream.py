"""The tensors of an export one at a time, without files: for a server that takes them from the ranks' memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...sharding.state import ShardedParameter
from ..files.dtypes import Array, as_bytes, torch_dtype
from ..files.file_layout import OutputTensor
from ..files.tensors import DiskTensor, StoredTensor
from .export import WRITER, brought, message_for, messages_of


class TensorMeta(NamedTuple):
    """What a tensor is called in an export, and what it is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


Begun = tuple[Sequence[StoredTensor], Iterator[Tensor]]
"""All tensors as files would have them; and each when it is asked for."""


class TensorStream:
    """The tensors that an export would write: pairs of name and tensor, in its order and dtypes. All ranks iterate
    together, as often as weights have changed, and each time get those that are then.

    A tensor is complete, on this rank's device and in memory of its own or, on a rank that is to get none, on the meta
    device. vLLM's trainer engines take a stream as their `source`.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Begun]]):
        self._begin = begin

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with self._begin() as (parts, tensors):
            for part in parts:
                yield part.name, next(tensors)

    def metadata(self) -> list[TensorMeta]:
        """What an iteration gives, known without one. All ranks call it together."""
        return self._metadata

    @cached_property
    def _metadata(self) -> list[TensorMeta]:
        with self._begin() as (parts, _):
            return [TensorMeta(part.name, torch_dtype(part.dtype), tuple(part.shape)) for part in parts]


def sharded_tensors(
    outputs: Sequence[OutputTensor], shards: Mapping[str, ShardedParameter], device: torch.device, to_all: bool
) -> Iterator[Tensor]:
    """Tensors of sharded parameters: rows come from who owns them, in pieces, over the backend of `device`, straight
    to where they belong.

    Args:
        device: of the tensors. to_all: whether all ranks get them, or rank 0 alone.
    """

    def rows_of(parameter: str, rows: range, dtype: str) -> Array:
        return brought(shards[parameter], rows, torch_dtype(dtype), message_for(shards), nullcontext)

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # who iterates may do so on a stream that has not waited for the last update
    for output in outputs:
        room = _room(output.part, device, to_all)
        if output.is_plain:
            _gather(output.tensor, shards, room, device, to_all)
        else:
            _fill(room, output, rows_of)
            _share(room, to_all)
        yield room
        del room


def read_tensors(
    outputs: Sequence[OutputTensor], rows_of: Callable[[str, range, str], Array], device: torch.device, to_all: bool
) -> Begun:
    """Tensors of what rank 0 alone reads. All ranks call it together.

    Args:
        outputs: none on the others. rows_of: (parameter, rows, dtype's code) -> these. device, to_all: as above.
    """
    told = [[output.part for output in outputs]]
    dist.broadcast_object_list(told, WRITER)

    def tensors() -> Iterator[Tensor]:
        for number, part in enumerate(told[0]):
            room = _room(part, device, to_all)
            if outputs:
                _fill(room, outputs[number], rows_of)
            _share(room, to_all)
            yield room
            del room

    return told[0], tensors()


def _room(part: StoredTensor, device: torch.device, to_all: bool) -> Tensor:
    """Memory for a tensor where it is wanted."""
    is_wanted = to_all or dist.get_rank() == WRITER
    return torch.empty(part.shape, dtype=torch_dtype(part.dtype), device=device if is_wanted else "meta")


def _as_bytes(room: Tensor) -> Tensor:
    return room.view(-1).view(torch.uint8)


def _share(room: Tensor, to_all: bool) -> None:
    if to_all:
        dist.broadcast(_as_bytes(room), WRITER)  # as no backend sends all dtypes


def _fill(room: Tensor, output: OutputTensor, rows_of: Callable[[str, range, str], Array]) -> None:
    """On rank 0, with the bytes that a file would have."""
    is_writer, done = dist.get_rank() == WRITER, 0
    content = torch.empty_like(room, device="cpu") if is_writer and room.device.type != "cpu" else room
    for strip in output.strips():
        parts = [rows_of(region.parameter, rows, output.tensor.dtype) for region, rows in strip.parts]
        for data, _ in output.content(strip, parts) if is_writer else ():
            piece = torch.frombuffer(as_bytes(data), dtype=torch.uint8)
            _as_bytes(content)[done : done + len(piece)] = piece
            done += len(piece)
    if content is not room:
        room.copy_(content)


def _gather(
    tensor: DiskTensor, shards: Mapping[str, ShardedParameter], room: Tensor, device: torch.device, to_all: bool
) -> None:
    """With all rows of a tensor's parameters."""
    rank = dist.get_rank()
    for region in tensor.regions:
        shard = shards[region.parameter]
        for owner, rows in messages_of(shard, region.rows, room.dtype):
            if room.is_meta and rank != owner:
                continue
            if rank == owner:
                piece = shard.view(rows).to(device, room.dtype).contiguous()
            else:
                piece = torch.empty(len(rows), *shard.row_shape, dtype=room.dtype, device=device)
            if to_all:
                dist.broadcast(piece, owner)
            elif rank != WRITER:
                dist.send(piece, WRITER)
            elif owner != WRITER:
                dist.recv(piece, owner)
            if not room.is_meta:
                place, matrix = region.on_disk(rows), room[region.index].view(tensor.matrix(region))
                into = matrix[:, place].t() if region.transposed else matrix[place]
                into.copy_(piece.view(into.shape))
