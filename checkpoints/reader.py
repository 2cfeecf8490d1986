"""Reading rows of parameters from safetensors files, wherever the files have them and however oriented."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoints.checksums import to_granule_end
from checkpoints.mapping import DiskTensor, Region, overlap
from checkpoints.source import Checkpoint, open_safetensors

# A file is mapped into memory while its slices are copied, and mapped pages count as this process's own. It is
# closed and opened anew after so many bytes, so that they never pile up beside the shard.
_BYTES_BEFORE_REOPEN = 32 * 2**20


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter.

    rows: which. data: their content, perhaps a view of a mapped file or transposed: copy it and let it go.
    tensor: where they stood on disk, and in which file.
    """

    rows: range
    data: Tensor
    tensor: DiskTensor
    file: Path


class ParameterReader(Protocol):
    """Anything that a model's parameters can be read from, by rows."""

    def pieces(self, parameter: str, rows: range) -> Iterator[Piece]:
        """The rows of a parameter, in order, in as many pieces as they lie in."""
        ...

    def close(self) -> None: ...


def join(pieces: Sequence[Piece]) -> Tensor:
    """The content of consecutive pieces; a single one's own memory."""
    return pieces[0].data if len(pieces) == 1 else torch.cat([piece.data for piece in pieces])


class SafetensorsReader:
    """A `ParameterReader` of a checkpoint in safetensors files. One file is open at a time; not for several threads."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.places: dict[str, list[tuple[Region, DiskTensor]]] = {}
        for tensor in checkpoint.tensors:
            for region in tensor.regions:
                self.places.setdefault(region.parameter, []).append((region, tensor))
        self.file: str | None = None
        self.handle: Any = None
        self.bytes_read = 0

    def pieces(self, parameter: str, rows: range, to_granules: bool = False) -> Iterator[Piece]:
        """As `ParameterReader.pieces`; with `to_granules`, each goes on to the end of its last granule of checksums."""
        for region, tensor in self.places.get(parameter, []):
            yield from self.region_pieces(tensor, region, rows, to_granules)

    def region_pieces(
        self, tensor: DiskTensor, region: Region, rows: range, to_granules: bool = False
    ) -> Iterator[Piece]:
        """The part of `rows` that a region holds: one piece, or none."""
        shared = overlap(rows, region.rows)
        if shared and to_granules:
            first = region.rows.start
            inside = to_granule_end(range(shared.start - first, shared.stop - first), len(region.rows))
            shared = range(inside.start + first, inside.stop + first)
        if shared:
            file = self.checkpoint.infos[tensor.name].file
            data = self._slice(file, tensor.name, region.select(shared))
            yield Piece(shared, data.t() if region.transposed else data, tensor, self.checkpoint.source.path / file)

    def _slice(self, file: str, name: str, index: tuple[int | slice, ...]) -> Tensor:
        if file != self.file or self.bytes_read > _BYTES_BEFORE_REOPEN:
            self.close()
            self.file, self.handle, self.bytes_read = file, open_safetensors(self.checkpoint.source.path / file), 0
        data = self.handle.get_slice(name)[index]
        self.bytes_read += data.numel() * data.element_size()
        return data

    def close(self) -> None:
        self.file = self.handle = None
