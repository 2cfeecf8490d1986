"""Which rows of which parameter stand where in which tensor on disk: one table for reading and for writing.

A parameter's rows (dim 0) are the unit, since every parameter is sharded along dim 0 only. For experts, row
n·F + f of w1, v1 and w2 is row f of expert n.

Shape suffixes: F expert width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby


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
