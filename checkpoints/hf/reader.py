"""Reading rows of parameters from safetensors files, wherever the files have them and however oriented or encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...moe.util.errors import ExpertMeshError
from ..files.dtype_names import DTYPE_BYTES
from ..files.dtypes import ARRAY_TYPES, Array, as_bytes, cast, copy_into, same_values, wider
from ..files.encodings import WIDE, dequantize_array, runs_of_rows, scale_values, unpack
from ..files.open_files import OpenFiles
from ..files.tensors import ByRows, DiskTensor, Encoding, Region

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


_ROWS_AT_ONCE = 1024


class ParameterReader(Protocol):
    """Anything that a model's parameters can be read from, by rows."""

    def rows(self, parameter: str, rows: range) -> tuple[Array, str] | None:
        """(content, dtype) of some rows of a parameter; None if any of them is missing."""
        ...

    def close(self) -> None: ...


def tied_copies_that_differ(checkpoint: Checkpoint) -> Iterator[tuple[DiskTensor, str]]:
    """Tensors in files that should repeat others, as an output projection stored beside the tied embedding should, and
    do not: each with the name of the parameter that it should repeat. Encoded in different ways, both may stand for the
    same values."""
    reader = checkpoint.file_reader()
    for copy in checkpoint.tied_copies:
        if any(_differs(reader, copy, region) for region in copy.regions):
            yield copy, copy.regions[0].parameter
    reader.close()


def check_tied_copies(checkpoint: Checkpoint) -> None:
    """
    Raises:
        ExpertMeshError: there are such tensors: what is written has one for both.
    """
    for copy, original in tied_copies_that_differ(checkpoint):
        raise differing_copy(copy, original)


def differing_copy(copy: DiskTensor, original: str) -> ExpertMeshError:
    return ExpertMeshError(
        f"{copy.file}: {copy.name} differs from {original}, though config.json ties them; set tie_word_embeddings to "
        "false in config.json"
    )


def _differs(reader: SafetensorsReader, copy: DiskTensor, region: Region) -> bool:
    """Whether what a copy has in a region is not what the parameter's own tensors have there."""
    for start in range(0, len(region.rows), _ROWS_AT_ONCE):
        rows = region.rows[start : start + _ROWS_AT_ONCE]
        original = reader.rows(region.parameter, rows)
        if original is None:
            return False  # a tensor that is missing, which is told elsewhere
        if not same_values(*original, reader.read(copy, region, rows), copy.dtype):
            return True
    return False


def kept_encodings(checkpoint: Checkpoint) -> dict[str, Encoding]:
    """How each encoded parameter can be stored row by row, its codes and scales as they are: of those of experts, where
    no block has a part in two of them; of codes and scales that are interleaved with others', where each row has its
    own scales. What is not here must be dequantized."""
    found: dict[str, set[Encoding | None]] = {}
    for tensor in checkpoint.tensors:
        for region in tensor.regions:
            encoding = tensor.encoding
            if encoding is not None and region.transposed != encoding.transposed:
                encoding = encoding.turned()
            if encoding is not None:
                encoding = replace(encoding, transposed=False)
                starts = (region.first, region.rows.start, checkpoint.names.experts.get(region.parameter, 0))
                by_turns = region.step > 1 and encoding.block[0] > 1
                if by_turns or any(start % encoding.block[0] for start in starts):
                    encoding = None
            found.setdefault(region.parameter, set()).add(encoding)
    kept = {name: next(iter(encodings)) for name, encodings in found.items() if len(encodings) == 1}
    return {name: encoding for name, encoding in kept.items() if encoding is not None}


Place = tuple[DiskTensor, Region]
Places = dict[str, ByRows[Place]]
"""Which regions of which tensors hold the rows of each parameter."""


def places_of(tensors: Iterable[DiskTensor]) -> Places:
    """Where a checkpoint's tensors have its parameters. For several threads."""
    found: dict[str, list[tuple[range, Place]]] = {}
    for tensor in tensors:
        for region in tensor.regions:
            found.setdefault(region.parameter, []).append((region.rows, (tensor, region)))
    return {parameter: ByRows(places) for parameter, places in found.items()}


class SafetensorsReader:
    """A `ParameterReader` of tensors in safetensors files. Each thread that reads opens files of its own.

    Args:
        places: of all that is to be read by parameters.
        files: that are open already.
    """

    def __init__(self, places: Places | None = None, files: OpenFiles | None = None):
        self.places = places or {}
        self.files = files or OpenFiles()

    def rows(self, parameter: str, rows: range) -> tuple[Array, str] | None:
        """As `ParameterReader.rows`; perhaps a view of columns."""
        found = list(self._sharing(parameter, rows))
        if not found or sum(len(shared) for _, _, shared in found) != len(rows):
            return None
        (tensor, region, _), *others = found
        dtype = tensor.dtype
        if not others:
            return self.read(tensor, region, rows), dtype
        for other, _, _ in others:
            dtype = wider(dtype, other.dtype)
        matrix = tensor.matrix(region)
        data = np.empty((len(rows), *((matrix[0],) if region.transposed else matrix[1:])), ARRAY_TYPES[dtype])
        for tensor, region, shared in found:
            into = data[shared.start - rows.start : shared.stop - rows.start]
            if tensor.encoding is None and region.is_run and tensor.dtype == dtype:
                self._read_plain(tensor, region, shared, into)
            else:
                copy_into(into, cast(self.read(tensor, region, shared), tensor.dtype, dtype))
        return data, dtype

    def _sharing(self, parameter: str, rows: range) -> Iterator[tuple[DiskTensor, Region, range]]:
        if parameter in self.places:
            yield from ((*place, shared) for place, shared in self.places[parameter].sharing(rows))

    def read(self, tensor: DiskTensor, region: Region, rows: range) -> Array:
        """Rows of a parameter that a region of a tensor holds, in the dtype of this; perhaps a view of columns."""
        if tensor.encoding is None:
            return self._read_plain(tensor, region, rows)
        place = region.on_disk(rows)
        run = range(place.start, place.stop)
        if not region.transposed:
            return self._dequantized(tensor, region.index, run, range(tensor.shape[-1]))[:: region.step]
        matrix = tensor.matrix(region)
        return self._dequantized(tensor, region.index, range(matrix[0]), run)[:, :: region.step].T

    def _read_plain(self, tensor: DiskTensor, region: Region, rows: range, into: Array | None = None) -> Array:
        """The same of what is not encoded, read into an array where one is given for a run of rows."""
        height, *row = tensor.matrix(region)
        place, item = region.on_disk(rows), DTYPE_BYTES[tensor.dtype]
        run = range(place.start, place.stop)
        row_bytes = prod(row) * item
        offset = tensor.parts[0].offset + sum(region.index) * height * row_bytes
        array_type = ARRAY_TYPES[tensor.dtype]
        if not region.transposed:
            data = np.empty((len(run), *row), array_type) if into is None else into
            self.files.fill(tensor.file, as_bytes(data), offset + run.start * row_bytes)
            return data[:: region.step]
        columns = range(run.start * item, run.stop * item)
        return self._box(tensor.file, offset, row_bytes, range(height), columns).view(array_type)[:, :: region.step].T

    def _dequantized(self, tensor: DiskTensor, index: tuple[int, ...], rows: range, columns: range) -> Array:
        """A rectangle of an encoded matrix, as a model knows it, in bfloat16's bits."""
        encoding, _, stored = tensor.coded
        if encoding.transposed:
            rows, columns = columns, rows
        scales = scale_values(self._scales(tensor, index, rows, columns), encoding.scale_dtype)
        if not scales.isfinite().all():
            raise ExpertMeshError(f"{stored.file}: tensor {stored.name} has scales that are not finite")
        wide = np.empty((len(rows), len(columns)), ARRAY_TYPES[WIDE])
        block = encoding.block[0]
        for run in runs_of_rows(rows, len(columns)):
            blocks = slice(run.start // block - rows.start // block, (run.stop - 1) // block + 1 - rows.start // block)
            codes = self._codes(tensor, index, run, columns)
            wide[run.start - rows.start : run.stop - rows.start] = dequantize_array(
                codes, scales[blocks], encoding, (run.start, columns.start)
            )
        return wide.T if encoding.transposed else wide

    # ---- codes and scales as they are ----

    def stored(self, tensor: DiskTensor, index: tuple[int, ...], rows: range) -> tuple[Array, Array]:
        """(codes, one per byte; bytes of the scales of their blocks) of some rows of a matrix of codes.

        Args:
            index: of the matrix in the tensor.
        """
        columns = range(tensor.code_matrix()[1])
        return self._codes(tensor, index, rows, columns), self._scales(tensor, index, rows, columns)

    def packed(self, tensor: DiskTensor, region: Region, rows: range) -> tuple[Array, Array]:
        """(bytes of the codes, bytes of their scales) of rows of a parameter that are rows of codes, each with scales
        of its own."""
        place, columns = region.on_disk(rows), range(tensor.code_matrix()[1])
        run = range(place.start, place.stop)
        packed = self._packed(tensor, region.index, run, columns)
        return packed[:: region.step], self._scales(tensor, region.index, run, columns)[:: region.step]

    def stored_rows(self, parameter: str, rows: range) -> tuple[Array, Array]:
        """(codes, one per byte; bytes of their scales, a row of them for each block of rows) of some rows of a
        parameter that `kept_encodings` has; complete blocks of rows."""
        return self._stored_codes(parameter, rows), self.stored_scales(parameter, rows)

    def _stored_codes(self, parameter: str, rows: range) -> Array:
        parts = []
        for tensor, region, run in self._stored(parameter, rows):
            height, width = map(range, tensor.code_matrix())
            if region.transposed == tensor.coded[0].transposed:
                codes = self._codes(tensor, region.index, run, width)
            else:
                codes = self._codes(tensor, region.index, height, run).T
            parts.append(codes[:: region.step])
        return np.concatenate(parts)

    def stored_scales(self, parameter: str, rows: range) -> Array:
        """The scales alone."""
        parts = []
        for tensor, region, run in self._stored(parameter, rows):
            height, width = map(range, tensor.code_matrix())
            if region.transposed == tensor.coded[0].transposed:
                scales = self._scales(tensor, region.index, run, width)
            else:
                across = self._scales(tensor, region.index, height, run)
                # columns become rows, each scale with its bytes
                item = DTYPE_BYTES[tensor.coded[0].scale_dtype]
                turned = across.reshape(len(across), -1, item).transpose(1, 0, 2)
                scales = turned.reshape(len(turned), -1)
            parts.append(scales[:: region.step])
        return np.concatenate(parts)

    def _stored(self, parameter: str, rows: range) -> Iterator[tuple[DiskTensor, Region, range]]:
        """(tensor, region, rows of codes, or columns, from the first to the last) of rows of a parameter."""
        for tensor, region, shared in self._sharing(parameter, rows):
            place = region.on_disk(shared)
            yield tensor, region, range(place.start, place.stop)

    def _codes(self, tensor: DiskTensor, index: tuple[int, ...], rows: range, columns: range) -> Array:
        """A rectangle of a matrix of codes, one per byte."""
        encoding, _, _ = tensor.coded
        first = columns.start % encoding.kind.codes_a_byte
        return unpack(self._packed(tensor, index, rows, columns), encoding)[:, first : first + len(columns)]

    def _packed(self, tensor: DiskTensor, index: tuple[int, ...], rows: range, columns: range) -> Array:
        """The bytes that have a code of a rectangle of them."""
        encoding, stored, _ = tensor.coded
        height, width = tensor.code_matrix()
        a_byte = encoding.kind.codes_a_byte
        row_bytes = width // a_byte
        in_bytes = range(columns.start // a_byte, -(-columns.stop // a_byte))
        offset = stored.offset + sum(index) * height * row_bytes
        return self._box(stored.file, offset, row_bytes, rows, in_bytes)

    def _scales(self, tensor: DiskTensor, index: tuple[int, ...], rows: range, columns: range) -> Array:
        """Bytes of the scales of the blocks that a rectangle of codes has a part in, block row by block row."""
        encoding, _, stored = tensor.coded
        height, width = encoding.num_scales(tensor.code_matrix())
        item = DTYPE_BYTES[encoding.scale_dtype]
        offset = stored.offset + sum(index) * height * width * item
        down, across = (
            range(run.start // size, (run.stop - 1) // size + 1)
            for run, size in zip((rows, columns), encoding.block, strict=True)
        )
        return self._box(stored.file, offset, width * item, down, range(across.start * item, across.stop * item))

    # ---- bytes ----

    def _box(self, file: Path, offset: int, row_bytes: int, rows: range, columns: range) -> Array:
        """Bytes of a matrix that begins at `offset` in a file: a rectangle of its rows, in bytes."""
        data = np.empty((len(rows), len(columns)), np.uint8)
        offset += rows.start * row_bytes
        if len(columns) == row_bytes:
            self.files.fill(file, as_bytes(data), offset)
            return data
        self.files.expect(file, offset, len(rows) * row_bytes)
        for row, part in enumerate(data):
            self.files.fill(file, as_bytes(part), offset + row * row_bytes + columns.start)
        return data

    def close(self) -> None:
        """Close this thread's files."""
        self.files.close()
