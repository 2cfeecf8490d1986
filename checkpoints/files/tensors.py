"""The tensors of a checkpoint: as files have them, as a model knows them, and which rows of which parameter are where.

A parameter's rows (dim 0) are the unit, since every parameter is sharded along dim 0 only. For experts, row n·F + f of
w1, v1 and w2 is row f of expert n.

Shape suffixes: F expert width.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Generic, TypeVar

from .codes import CODES, EXPONENTS, Codes
from .dtype_names import DTYPE_BYTES


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a safetensors file has it.

    Attributes:
        file: empty where it is yet to be written, or only its form is known. offset: of its first byte in the file.
        checksum: XXH3-64 of its bytes, where the directory has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path = Path()
    offset: int = field(default=0, compare=False)
    checksum: int | None = field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Encoding:
    """How the values of a matrix are stored: a code times the scale of its block.

    Attributes:
        codes: the name of their kind, in CODES.
        block: (rows, columns) of the matrix of codes that share a scale. The last of a dim may have fewer.
        scale_dtype: of the scales. A byte (U8, F8_E8M0) stands for 2^(byte - 127).
        transposed: whether the matrix of codes is the transpose of the one that a model knows.
    """

    codes: str
    block: tuple[int, int]
    scale_dtype: str
    transposed: bool = False

    @property
    def kind(self) -> Codes:
        return CODES[self.codes]

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder of this encoding is published: else it can be read, and not written."""
        return self.kind.has_encoder(self.block, self.scale_dtype)

    def turned(self) -> Encoding:
        """The encoding of the transposed matrix of codes."""
        return replace(self, block=(self.block[1], self.block[0]), transposed=not self.transposed)

    def num_scales(self, matrix: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of scales of a matrix of codes."""
        (rows, columns), (block_rows, block_columns) = matrix, self.block
        return -(-rows // block_rows), -(-columns // block_columns)

    def __str__(self) -> str:
        scales = "exponents" if self.scale_dtype in EXPONENTS else "scales"
        return f"{self.kind.label} with {scales} per block of {self.block[0]} x {self.block[1]}"


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
    """A tensor of a checkpoint, by the name that a model knows.

    Attributes:
        shape, dtype: of an encoded one, those of the values that it stands for.
        regions: the rows of parameters that cover it; those of one index are a block, and blocks follow one another.
            None of a tensor that is not trained.
        parts: what files have of it: itself; of an encoded one, its codes and their scales. Empty where no file is
            meant.
        encoding: of an encoded one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    regions: tuple[Region, ...] = ()
    parts: tuple[StoredTensor, ...] = ()
    encoding: Encoding | None = None

    @property
    def num_bytes(self) -> int:
        """As it is stored."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def file(self) -> Path:
        """The file in which it lies, or its codes do."""
        return self.parts[0].file

    def matrix(self, region: Region) -> tuple[int, ...]:
        """Shape of what lies under a region's index; of a scalar, one row."""
        return self.shape[len(region.index) :] or (1,)

    @property
    def coded(self) -> tuple[Encoding, StoredTensor, StoredTensor]:
        """(encoding, codes, scales) of an encoded tensor."""
        assert self.encoding is not None
        codes, scales = self.parts
        return self.encoding, codes, scales

    def code_matrix(self) -> tuple[int, int]:
        """(rows, columns) of codes, in each matrix of an encoded one."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.coded[0].transposed else (rows, columns)


def overlap(a: range, b: range) -> range:
    """The rows that two runs share; empty when none."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


Holder = TypeVar("Holder")


class ByRows(Generic[Holder]):
    """What holds which rows, in their order: found without a look at what holds others. For several threads."""

    def __init__(self, holders: Iterable[tuple[range, Holder]]):
        self.holders = sorted(holders, key=lambda pair: pair[0].start)
        self._ends = list(accumulate((rows.stop for rows, _ in self.holders), max))

    def sharing(self, rows: range) -> Iterator[tuple[Holder, range]]:
        """What holds some of these rows, each with those that it does."""
        for place in range(bisect_right(self._ends, rows.start), len(self.holders)):
            held, holder = self.holders[place]
            if held.start >= rows.stop:
                return
            if shared := overlap(rows, held):
                yield holder, shared


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
