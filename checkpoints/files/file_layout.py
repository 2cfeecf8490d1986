"""What stands where in safetensors files: which rows of which parameter in which tensor, one table for reading and for
writing; which tensor in which file; and the bytes of each file's header.

A parameter's rows (dim 0) are the unit, since every parameter is sharded along dim 0 only. For experts, row n·F + f of
w1, v1 and w2 is row f of expert n.

Shape suffixes: F expert width.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Literal

from .dtype_names import DTYPE_BYTES
from .dtypes import Array
from .encodings import Encoding

if TYPE_CHECKING:
    from ..hf.requantized import Requantized

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Region:
    """A rectangle of a tensor on disk that holds a run of rows of one parameter.

    Attributes:
        parameter: its name in the model.
        rows: the parameter's rows.
        index: leading index into the tensor on disk, (expert,) in a fused one, else ().
        first: where on disk the run begins, along the matrix's first dim, or its second if transposed.
        step: from one row to the next there; 2 where gate and up are interleaved.
        transposed: whether the parameter's rows are columns on disk.
    """

    parameter: str
    rows: range
    index: tuple[int, ...] = ()
    first: int = 0
    step: int = 1
    transposed: bool = False

    def on_disk(self, rows: range) -> slice:
        """Where `rows`, a part of self.rows, are on disk, counted as `first` is."""
        start = self.first + self.step * (rows.start - self.rows.start)
        return slice(start, start + self.step * (len(rows) - 1) + 1, self.step)

    @property
    def is_run(self) -> bool:
        """Whether its rows follow one another on disk as they do in memory."""
        return self.step == 1 and not self.transposed


@dataclass(frozen=True)
class DiskTensor:
    """A tensor on disk. Its regions cover it; those of one index are a block, and blocks follow one another."""

    name: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]

    def blocks(self) -> Iterator[tuple[Region, ...]]:
        """Runs of regions that fill a contiguous part of the tensor, in the order of its bytes. One that is more than a
        single run of rows must be put together in full."""
        for _, group in groupby(self.regions, key=lambda region: region.index):
            regions = tuple(group)
            if all(region.is_run for region in regions):
                yield from ((region,) for region in regions)
            else:
                yield regions

    def matrix(self, region: Region) -> tuple[int, ...]:
        """Shape of what lies under a region's index; of a scalar, one row."""
        return self.shape[len(region.index) :] or (1,)


def overlap(a: range, b: range) -> range:
    """The rows that two runs share; empty when none."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def uncovered(runs: Iterable[range], num_rows: int) -> tuple[int | None, int | None]:
    """(the first of a parameter's rows that is in none of the runs, the first that is in two); None where there is no
    such row."""
    end, missing, repeated = 0, None, None
    for run in sorted(runs, key=lambda run: run.start):
        if run.start > end and missing is None:
            missing = end
        if run.start < end and repeated is None:
            repeated = run.start
        end = max(end, run.stop)
    if end < num_rows and missing is None:
        missing = end
    return missing, repeated


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written, and its dtype on disk (see `checkpoints.files.dtypes`).

    Attributes:
        encoding, part: of one that holds the codes of a parameter's rows, or their scales.
        content: of one that is no parameter's (see `untrained_tensors`), gives what it holds, piece by piece.
        made_by: of codes that are made in the encoding of the source; the next tensor has their scales.
    """

    tensor: DiskTensor
    dtype: str
    encoding: Encoding | None = None
    part: Literal["codes", "scales"] | None = None
    content: Callable[[], Iterator[Array]] | None = field(default=None, compare=False)
    made_by: "Requantized | None" = field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        return prod(self.tensor.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file to be written: its tensors in the order of their bytes."""

    name: str
    tensors: list[OutputTensor]

    @property
    def header(self) -> bytes:
        """The header of the file: its length as u64, then JSON, padded so that the data is aligned."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for output in self.tensors:
            end = offset + output.num_bytes
            table[output.tensor.name] = {
                "dtype": output.dtype,
                "shape": output.tensor.shape,
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def plan_files(tensors: Sequence[OutputTensor], max_shard_size: int, prefix: str) -> list[OutputFile]:
    """Files of at most `max_shard_size` bytes (or a single tensor; scales, which follow their codes, lie with them),
    named PREFIX-00001-of-0000N.safetensors."""
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for output in tensors:
        if groups[-1] and output.part != "scales" and size + output.num_bytes > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.num_bytes
    names = (f"{prefix}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1))
    return [OutputFile(name, group) for name, group in zip(names, groups, strict=True)]


def plan_hf_files(tensors: Sequence[OutputTensor], max_shard_size: int) -> list[OutputFile]:
    """The files of a Hugging Face directory: one model.safetensors, or several beside an index."""
    files = plan_files(tensors, max_shard_size, "model")
    return [OutputFile(SINGLE_NAME, files[0].tensors)] if len(files) == 1 else files


def hf_index(files: Sequence[OutputFile]) -> str:
    """Content of model.safetensors.index.json."""
    weight_map = {output.tensor.name: file.name for file in files for output in file.tensors}
    total = sum(output.num_bytes for file in files for output in file.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
