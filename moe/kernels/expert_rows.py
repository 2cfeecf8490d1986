"""What a call of an expert kernel is told of its rows: how many each expert has, and how they are to be multiplied.

Whoever divides a call, as where a few experts at a time are dequantized, divides this with it: a part has its own
counts, and nothing else says how many rows there are.

Shape suffixes: R rows, e experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from ..util.recompute_cache import kept
from .gathered_rows import GatheredRows
from .weight_gradients import ExpertsCall


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The rows of some consecutive experts, sorted by expert: row r belongs to the expert in whose run it falls when
    the rows are cut by counts_e.

    Attributes:
        counts_e: each expert's number of rows, int64, on the rows' device.
        num_rows: their sum.
        on_host: the same numbers, where host memory has them; None: the host would have to wait for the device.
        most_apart: so many experts or fewer may be multiplied one after the other, if they are `on_host`.
        is_beside: whether all-to-alls are under way beside these GEMMs, in forward and backward.
        keeps_products: whether outputs of the experts' first GEMMs are kept for a recomputation (see `kept_product`).
        call: of a layer's experts, whose weights' gradients may be left for later than backward; None: they are not.
        weights_R: by which a row's hidden values are multiplied, fp32 or wider (see `moe.kernels.weighing`); None: they
            are not.
        gathered: which rows the kernel is to gather of those that it is given; None: it is given these.
    """

    counts_e: Tensor
    num_rows: int
    on_host: list[int] | None = None
    most_apart: int = 1
    is_beside: bool = False
    keeps_products: bool = False
    call: ExpertsCall | None = None
    weights_R: Tensor | None = None
    gathered: GatheredRows | None = None

    @property
    def num_experts(self) -> int:
        return self.counts_e.numel()

    def counts(self) -> list[int]:
        """Each expert's number of rows, for which the host waits unless it has them."""
        return read_counts(self.counts_e, self.num_rows) if self.on_host is None else self.on_host

    def parts(self, size: int) -> list["ExpertRows"]:
        """These experts, `size` at a time. Where that makes several parts, `on_host` must be known."""
        assert self.weights_R is None
        if size >= self.num_experts:
            return [self]
        assert self.on_host is not None, "the host does not know which rows are whose"
        by_part = [self.on_host[first : first + size] for first in range(0, self.num_experts, size)]
        return [
            replace(self, counts_e=counts_e, num_rows=sum(counts), on_host=counts)
            for counts_e, counts in zip(self.counts_e.split(size), by_part, strict=True)
        ]

    def kept_product(self, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, GEMMs on these rows; as `kept`, where outputs are to be kept."""
        return kept("product", compute) if self.keeps_products else compute()


def read_counts(counts_e: Tensor, num_rows: int) -> list[int]:
    """Each expert's number of rows, of so many in all, read from the device."""
    return counts_e.tolist()


def even(total: int, parts: int) -> list[int]:
    """`total` split into parts as even as possible."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


def runs(counts: list[int]) -> list[slice]:
    """Each expert's rows."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return [slice(start, stop) for start, stop in pairwise(ends)]
