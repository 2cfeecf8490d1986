"""What is written into safetensors files, from parameters' rows to bytes: which tensor goes into which file, the bytes
of each file's header, and what of which parameter has to be read for the bytes that come next."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import lcm, prod
from typing import Any, Literal

import numpy as np

from .checksums import GRANULE, row_sum
from .dtype_names import DTYPE_BYTES
from .dtypes import Array, contiguous
from .encodings import Errors
from .tensors import DiskTensor, Region, StoredTensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_STRIP_BYTES = 16 * 2**20
"""What is held of a tensor whose rows lie on disk as they do in memory. A matrix that is transposed there, or whose
rows alternate with another's, must be put together in full."""


@dataclass(frozen=True)
class Strip:
    """What of a tensor is written at once.

    Attributes:
        index: of the matrix in the tensor. rows: of that matrix, as its bytes lie.
        parts: what is read for it: regions of the tensor, and which rows of each parameter.
        is_run: whether these follow one another as the rows do.
    """

    index: tuple[int, ...]
    rows: range
    parts: tuple[tuple[Region, range], ...] = ()
    is_run: bool = True


def strips_of(tensor: DiskTensor, whole: int = 1, turned: bool = False) -> Iterator[Strip]:
    """A tensor in the order of its bytes, each strip some rows of one parameter where that is possible.

    Args:
        whole: strips have complete runs of so many rows.
        turned: whether the transposes of its matrices are what is written.
    """
    for index, group in groupby(tensor.regions, key=lambda region: region.index):
        regions = tuple(group)
        matrix = tensor.matrix(regions[0])
        if turned or not all(region.is_run and region.first % whole == 0 for region in regions):
            parts = tuple((region, region.rows) for region in regions)
            yield Strip(index, range(matrix[1 if turned else 0]), parts, is_run=False)
            continue
        # whole granules, so that their hashes need not be carried from strip to strip
        least = lcm(GRANULE, whole)
        step = max(1, _STRIP_BYTES // max(1, least * prod(matrix[1:]) * DTYPE_BYTES[tensor.dtype])) * least
        for region in sorted(regions, key=lambda region: region.first):
            for start in range(region.rows.start, region.rows.stop, step):
                rows = range(start, min(start + step, region.rows.stop))
                place = region.on_disk(rows)
                yield Strip(index, range(place.start, place.stop), ((region, rows),))


def at_once(*parts: tuple[Region, range]) -> Callable[[], list[Strip]]:
    """The strips of a tensor whose bytes are not in the order of any parameter's rows, if they are made of any."""
    return lambda: [Strip((), range(0), parts)]


def assembled(tensor: DiskTensor, strip: Strip, parts: Sequence[Array], turned: bool = False) -> Array:
    """The values of a strip as its bytes lie, out of the rows of its parts."""
    if strip.is_run:
        return contiguous(parts[0])
    lying = [
        contiguous(part.T) if region.transposed else part for (region, _), part in zip(strip.parts, parts, strict=True)
    ]
    matrix = lying[0]
    if len(lying) > 1 or matrix.shape != tensor.matrix(strip.parts[0][0]):
        matrix = np.empty(tensor.matrix(strip.parts[0][0]), parts[0].dtype)
        for (region, rows), part in zip(strip.parts, lying, strict=True):
            place = region.on_disk(rows)
            matrix[(slice(None), place) if region.transposed else place] = part
    return contiguous(matrix.T if turned else matrix)


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written.

    Attributes:
        part: as the file is to have it.
        tensor: which it is, or of which it holds the codes or the scales. Its rows are read in the dtype of this one.
        strips: of what it is made, in the order of its bytes.
        content: (the next bytes, their part of the row sum), from the rows of a strip's parts.
        summed: by what a reader can check it later: the sum of its rows, or the bytes' XXH3-64.
        errors: what encoding has changed so far, where it is encoded anew.
    """

    part: StoredTensor
    tensor: DiskTensor
    strips: Callable[[], Iterable[Strip]]
    content: Callable[[Strip, Sequence[Array]], Iterator[tuple[Array, int]]]
    summed: Literal["rows", "bytes"] | None = None
    errors: Errors | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is the rows of parameters as they are."""
        return self.tensor.encoding is None and bool(self.tensor.regions)

    @property
    def is_scales(self) -> bool:
        """Whether it is the scales of codes before it."""
        return self.part in self.tensor.parts[1:]


def plain_output(tensor: DiskTensor, summed: bool = False) -> OutputTensor:
    """The rows of parameters as they are.

    Args:
        summed: whether a sum of its rows is asked for.
    """

    def content(strip: Strip, parts: Sequence[Array]) -> Iterator[tuple[Array, int]]:
        data = assembled(tensor, strip, parts)
        yield data, row_sum(data, strip.rows.start) if summed else 0

    part = StoredTensor(tensor.name, tensor.shape, tensor.dtype)
    return OutputTensor(part, tensor, lambda: strips_of(tensor), content, "rows" if summed else None)


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file to be written: its tensors in the order of their bytes."""

    name: str
    tensors: list[OutputTensor]

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(output.part.num_bytes for output in self.tensors)

    @cached_property
    def header(self) -> bytes:
        """The header of the file: its length as u64, then JSON, padded so that the data is aligned."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for part in (output.part for output in self.tensors):
            end = offset + part.num_bytes
            table[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class FileRecord:
    """What is known of a written file.

    Attributes:
        checksum: XXH3-128 of all of it. header_checksum: of its header, if it is a safetensors file.
        sums: of its tensors, where they have one (see `OutputTensor.summed`).
        errors: what was changed by encoding tensors anew (the fields of `Errors`).
    """

    name: str
    num_bytes: int
    checksum: str
    header_checksum: str | None = None
    sums: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)


def plan_files(outputs: Iterable[OutputTensor], max_shard_size: int, prefix: str) -> list[OutputFile]:
    """Files of at most `max_shard_size` bytes (or a single tensor; scales, which follow their codes, lie with them),
    named PREFIX-00001-of-0000N.safetensors."""
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for output in outputs:
        if groups[-1] and not output.is_scales and size + output.part.num_bytes > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.part.num_bytes
    names = (f"{prefix}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1))
    return [OutputFile(name, group) for name, group in zip(names, groups, strict=True)]


def plan_hf_files(outputs: Iterable[OutputTensor], max_shard_size: int) -> list[OutputFile]:
    """The files of a Hugging Face directory: one model.safetensors, or several beside an index."""
    files = plan_files(outputs, max_shard_size, "model")
    return [OutputFile(SINGLE_NAME, files[0].tensors)] if len(files) == 1 else files


def hf_index(files: Sequence[OutputFile]) -> str:
    """Content of model.safetensors.index.json."""
    weight_map = {output.part.name: file.name for file in files for output in file.tensors}
    total = sum(file.num_bytes for file in files)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
