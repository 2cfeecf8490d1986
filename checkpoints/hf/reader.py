"""Reading rows of parameters from safetensors files, wherever the files have them and however oriented or encoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...moe.util.errors import ExpertMeshError
from ..files.checksums import to_granule_end
from ..files.dtype_names import DTYPE_BYTES
from ..files.dtypes import ARRAY_TYPES, Array, as_bytes, cast, same_values, wider
from ..files.encodings import WIDE, Encoding, TensorInfo, dequantize, scale_values, strips, unpack
from ..files.file_layout import DiskTensor, Region, overlap
from ..files.paths import fill_from

if TYPE_CHECKING:
    from torch import Tensor

    from .names import Names
    from .source import Checkpoint


_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter.

    rows: which. data: their content, perhaps a transposed view. dtype: of the content (see
    `checkpoints.files.dtypes`).
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


def tied_copies_that_differ(checkpoint: Checkpoint) -> Iterator[tuple[DiskTensor, str]]:
    """Tensors in files that should repeat others, as an output projection stored beside the tied embedding should, and
    do not: each with the name of the parameter that it should repeat. Encoded in different ways, both may stand for the
    same values."""
    reader = checkpoint.reader()
    for copy in checkpoint.tied_copies:
        if any(_differs(reader, copy, region) for region in copy.regions):
            yield copy, copy.regions[0].parameter
    reader.close()


def _differs(reader: SafetensorsReader, copy: DiskTensor, region: Region) -> bool:
    """Whether what a copy has in a region is not what the parameter's own tensors have there."""
    for start in range(0, len(region.rows), _ROWS_AT_ONCE):
        rows = region.rows[start : start + _ROWS_AT_ONCE]
        original = gather(reader, region.parameter, rows)
        if original is None:
            return False  # a tensor that is missing, which is told elsewhere
        (repeated,) = reader.region_pieces(copy, region, rows)  # one region is one piece
        if not same_values(*original, repeated.data, repeated.dtype):
            return True
    return False


def kept_encodings(checkpoint: Checkpoint, names: Names) -> dict[str, Encoding]:
    """How each encoded parameter can be stored row by row, its codes and scales as they are: of those of experts, where
    no block has a part in two of them; of codes and scales that are interleaved with others', where each row has its
    own scales. What is not here must be dequantized."""
    found: dict[str, set[Encoding | None]] = {}
    for tensor in checkpoint.tensors:
        for region in tensor.regions:
            encoding = checkpoint.infos[tensor.name].encoding
            if encoding is not None and region.transposed != encoding.transposed:
                encoding = encoding.turned()
            if encoding is not None:
                encoding = replace(encoding, transposed=False)
                starts = (region.first, region.rows.start, names.experts.get(region.parameter, 0))
                by_turns = region.step > 1 and encoding.block[0] > 1
                if by_turns or any(start % encoding.block[0] for start in starts):
                    encoding = None
            found.setdefault(region.parameter, set()).add(encoding)
    kept = {name: next(iter(encodings)) for name, encodings in found.items() if len(encodings) == 1}
    return {name: encoding for name, encoding in kept.items() if encoding is not None}


class SafetensorsReader:
    """A `ParameterReader` of a checkpoint in safetensors files. One file is open at a time; not for several threads."""

    def __init__(self, directory: Path, infos: dict[str, TensorInfo], tensors: Iterable[DiskTensor]):
        """
        Args:
            infos: of the tensors in the directory's files, by name.
            tensors: those that hold parameters.
        """
        self.directory = directory
        self.infos = infos
        self.places: dict[str, list[tuple[Region, DiskTensor]]] = {}
        for tensor in tensors:
            for region in tensor.regions:
                self.places.setdefault(region.parameter, []).append((region, tensor))
        for places in self.places.values():
            places.sort(key=lambda place: place[0].rows.start)
        self.path: Path | None = None
        self.file = -1

    def pieces(self, parameter: str, rows: range, to_granules: bool = False) -> Iterator[Piece]:
        """As `ParameterReader.pieces`; with `to_granules`, each extends to the end of its last granule of checksums."""
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
            info = self.infos[tensor.name]
            data = self._read(tensor, region, shared)
            path = self.directory / info.file
            yield Piece(shared, data.T if region.transposed else data, info.dtype, tensor, path)

    def stored(self, info: TensorInfo, index: tuple[int, ...], rows: range) -> tuple[Array, Array]:
        """(codes, one per byte; bytes of the scales of their blocks) of some rows of a matrix of codes.

        Args:
            info: of a tensor of the checkpoint. index: of the matrix in it.
        """
        columns = range(info.code_matrix()[1])
        return self._codes(info, index, rows, columns), self._stored_scales(info, index, rows, columns)

    def is_encoded(self, parameter: str) -> bool:
        """Whether all rows of a parameter are."""
        places = self.places.get(parameter, [])
        return bool(places) and all(self.infos[tensor.name].encoding is not None for _, tensor in places)

    def codes(self, parameter: str, rows: range) -> Array:
        """Codes, one per byte, of some rows of a parameter that `kept_encodings` has; complete blocks of rows."""
        return np.concatenate(list(self._by_region(parameter, rows, self._codes, item=1)))

    def scales(self, parameter: str, rows: range) -> Array:
        """Bytes of their scales, a row of them for each block of rows."""
        tensor = self.places[parameter][0][1]
        item = DTYPE_BYTES[self.infos[tensor.name].encoded[0].scale_dtype]
        return np.concatenate(list(self._by_region(parameter, rows, self._stored_scales, item)))

    def _by_region(
        self, parameter: str, rows: range, read: Callable[[TensorInfo, tuple[int, ...], range, range], Array], item: int
    ) -> Iterator[Array]:
        """What `read` gives of the rectangles in which the rows stand, in the order of our rows; items of so many
        bytes."""
        for region, tensor in self.places[parameter]:
            if not (shared := overlap(rows, region.rows)):
                continue
            info = self.infos[tensor.name]
            height, width = info.code_matrix()
            place = region.on_disk(shared)
            run = range(place.start, place.stop)
            if region.transposed == info.encoded[0].transposed:
                yield read(info, region.index, run, range(width))[:: region.step]
                continue
            columns = read(info, region.index, range(height), run)
            turned = columns.reshape(len(columns), -1, item).transpose(1, 0, 2)
            yield turned.reshape(len(turned), -1)[:: region.step]

    def _read(self, tensor: DiskTensor, region: Region, rows: range) -> Array:
        """As it lies in the tensor: columns, if the region is transposed."""
        info = self.infos[tensor.name]
        matrix, place = tensor.matrix(region), region.on_disk(rows)
        run = range(place.start, place.stop)
        if info.encoding is not None:
            data = self._dequantized(tensor, region, *((range(matrix[0]), run) if region.transposed else (run, None)))
            return data[:, :: region.step] if region.transposed else data[:: region.step]
        item = DTYPE_BYTES[info.dtype]
        row_bytes = prod(matrix[1:]) * item
        offset = info.offset + sum(region.index) * matrix[0] * row_bytes
        if not region.transposed:
            data = self._box(info.file, offset, row_bytes, run, range(row_bytes))
            return data.view(ARRAY_TYPES[info.dtype]).reshape(len(run), *matrix[1:])[:: region.step]
        columns = range(run.start * item, run.stop * item)
        data = self._box(info.file, offset, row_bytes, range(matrix[0]), columns)
        return data.view(ARRAY_TYPES[info.dtype])[:, :: region.step]

    def _dequantized(self, tensor: DiskTensor, region: Region, rows: range, columns: range | None) -> Array:
        """A rectangle of an encoded matrix, in bfloat16's bits; None: all of its columns."""
        info = self.infos[tensor.name]
        encoding, _ = info.encoded
        columns = range(info.shape[-1]) if columns is None else columns
        if encoding.transposed:
            rows, columns = columns, rows
        scales = self._scales(info, region.index, rows, columns)
        wide = np.empty((len(rows), len(columns)), ARRAY_TYPES[WIDE])
        block = encoding.block[0]
        for strip in strips(rows, len(columns)):
            blocks = slice(
                strip.start // block - rows.start // block, (strip.stop - 1) // block + 1 - rows.start // block
            )
            codes = self._codes(info, region.index, strip, columns)
            wide[strip.start - rows.start : strip.stop - rows.start] = dequantize(
                codes, scales[blocks], encoding, (strip.start, columns.start)
            )
        return wide.T if encoding.transposed else wide

    def _codes(self, info: TensorInfo, index: tuple[int, ...], rows: range, columns: range) -> Array:
        """A rectangle of a matrix of codes, one per byte."""
        encoding, _ = info.encoded
        height, width = info.code_matrix()
        a_byte = encoding.codes_a_byte
        row_bytes = width // a_byte
        in_bytes = range(columns.start // a_byte, -(-columns.stop // a_byte))
        packed = self._box(info.file, info.offset + sum(index) * height * row_bytes, row_bytes, rows, in_bytes)
        first = columns.start - in_bytes.start * a_byte
        return unpack(packed, encoding)[:, first : first + len(columns)]

    def _scales(self, info: TensorInfo, index: tuple[int, ...], rows: range, columns: range) -> Tensor:
        """Those of the blocks that a rectangle of codes has a part in, fp32.

        Raises:
            ExpertMeshError: one is not finite.
        """
        encoding, place = info.encoded
        scales = scale_values(self._stored_scales(info, index, rows, columns), encoding.scale_dtype)
        if not scales.isfinite().all():
            path = self.directory / place.file
            raise ExpertMeshError(f"{path}: tensor {place.name} has scales that are not finite")
        return scales

    def _stored_scales(self, info: TensorInfo, index: tuple[int, ...], rows: range, columns: range) -> Array:
        """Their bytes, block row by block row."""
        encoding, place = info.encoded
        height, width = encoding.num_scales(info.code_matrix())
        item = DTYPE_BYTES[encoding.scale_dtype]
        offset = place.offset + sum(index) * height * width * item
        down, across = (
            range(run.start // size, (run.stop - 1) // size + 1)
            for run, size in zip((rows, columns), encoding.block, strict=True)
        )
        return self._box(place.file, offset, width * item, down, range(across.start * item, across.stop * item))

    def _box(self, file: str, offset: int, row_bytes: int, rows: range, columns: range) -> Array:
        """Bytes of a matrix that begins at `offset` in a file: a rectangle of its rows, in bytes."""
        self._open(self.directory / file)
        data = np.empty((len(rows), len(columns)), np.uint8)
        offset += rows.start * row_bytes
        if len(columns) == row_bytes:
            self._fill(as_bytes(data), offset)
            return data
        if hasattr(os, "posix_fadvise"):  # the kernel foresees no strides
            os.posix_fadvise(self.file, offset, len(rows) * row_bytes, os.POSIX_FADV_WILLNEED)
        for row, part in enumerate(data):
            self._fill(as_bytes(part), offset + row * row_bytes + columns.start)
        return data

    def _fill(self, buffer: memoryview, offset: int) -> None:
        assert self.path is not None
        fill_from(self.file, buffer, offset, self.path)

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
