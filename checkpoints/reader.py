"""Reading rows of parameters from safetensors files, wherever the files have them and however oriented."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from checkpoints.checksums import to_granule_end
from checkpoints.dtypes import ARRAY_TYPES, DTYPE_BYTES, Array, as_bytes, cast, wider
from checkpoints.mapping import DiskTensor, Region, overlap
from checkpoints.source import Checkpoint
from moe import ExpertMeshError


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter.

    rows: which. data: their content, perhaps a transposed view. dtype: of the content (see `checkpoints.dtypes`).
    tensor: where they stood on disk, and in which file.
    """

    rows: range
    data: Array
    dtype: str
    tensor: DiskTensor
    file: Path


class ParameterReader(Protocol):
    """Anything that a model's parameters can be read from, by rows."""

    def pieces(self, parameter: str, rows: range) -> Iterator[Piece]:
        """The rows of a parameter, in order, in as many pieces as they lie in."""
        ...

    def close(self) -> None: ...


def gather(reader: ParameterReader, parameter: str, rows: range) -> tuple[Array, str] | None:
    """(content, dtype) of some rows of a parameter; None if any of them is missing."""
    pieces = list(reader.pieces(parameter, rows))
    if sum(len(piece.rows) for piece in pieces) != len(rows):
        return None
    dtype = pieces[0].dtype
    for piece in pieces[1:]:
        dtype = wider(dtype, piece.dtype)
    parts = [cast(piece.data, piece.dtype, dtype) for piece in pieces]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)), dtype


class SafetensorsReader:
    """A `ParameterReader` of a checkpoint in safetensors files. One file is open at a time; not for several threads."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.places: dict[str, list[tuple[Region, DiskTensor]]] = {}
        for tensor in checkpoint.tensors:
            for region in tensor.regions:
                self.places.setdefault(region.parameter, []).append((region, tensor))
        for places in self.places.values():
            places.sort(key=lambda place: place[0].rows.start)
        self.path: Path | None = None
        self.file = -1

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
            info = self.checkpoint.infos[tensor.name]
            path = self.checkpoint.source.path / info.file
            self._open(path)
            data = self._read(tensor, region, shared)
            yield Piece(shared, data.T if region.transposed else data, info.dtype, tensor, path)

    def _read(self, tensor: DiskTensor, region: Region, rows: range) -> Array:
        """As it lies on disk: columns, if the region is transposed."""
        info = self.checkpoint.infos[tensor.name]
        matrix, place = tensor.matrix(region), region.on_disk(rows)
        row_bytes = prod(matrix[1:]) * DTYPE_BYTES[info.dtype]
        offset = info.offset + sum(region.index) * matrix[0] * row_bytes
        length = place.stop - place.start
        if not region.transposed:
            data = np.empty((length, *matrix[1:]), ARRAY_TYPES[info.dtype])
            self._fill(as_bytes(data), offset + place.start * row_bytes)
            return data[:: region.step]
        data = np.empty((matrix[0], length), ARRAY_TYPES[info.dtype])
        if length == matrix[1]:
            self._fill(as_bytes(data), offset)
            return data[:, :: region.step]
        if hasattr(os, "posix_fadvise"):  # the kernel foresees no strides
            os.posix_fadvise(self.file, offset, matrix[0] * row_bytes, os.POSIX_FADV_WILLNEED)
        offset += place.start * DTYPE_BYTES[info.dtype]
        for row, columns in enumerate(data):
            self._fill(as_bytes(columns), offset + row * row_bytes)
        return data[:, :: region.step]

    def _fill(self, buffer: memoryview, offset: int) -> None:
        while len(buffer):
            count = os.preadv(self.file, [buffer], offset)
            if count == 0:
                raise ExpertMeshError(f"{self.path}: has become shorter since it was opened")
            buffer, offset = buffer[count:], offset + count

    def _open(self, path: Path) -> None:
        if path != self.path:
            self.close()
            try:
                self.file, self.path = os.open(path, os.O_RDONLY | os.O_CLOEXEC), path
            except OSError as error:
                raise ExpertMeshError(f"{path}: cannot be read: {error.strerror}") from error

    def close(self) -> None:
        if self.path is not None:
            os.close(self.file)
            self.path = None
