"""Exchanges of a tensor-parallel group, the ranks that divide heads, MLPs and the vocabulary.

Between these regions each rank has a range of every sequence's positions (sequence parallelism; Korthikanti et al.,
arXiv 2205.05198). A region begins with all positions of the group, and its results, of which every rank has a summand,
go back to the ranks of their positions. The backward of either exchange is the other.

Shape suffixes: n ranks of the group, S positions, L = S/n of them on this rank, R other dims, c columns on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.util.gpu import computes_on_cpu
from .differentiable import exchanged
from .groups import all_gather, reduce_scatter


@dataclass(frozen=True)
class TPGroup:
    """The ranks of a tensor-parallel group.

    size: how many. index: of this one, and of its range of positions. ranks: None where nothing is to be sent, as only
    the shapes of results are needed.
    """

    size: int
    index: int
    ranks: dist.ProcessGroup | None

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, which have one shape, one after the other along `dim`. Differentiable: the gradient is
        the sum of all ranks'."""
        return _differentiable(x, partial(self.all_gather, dim=dim), partial(self.sum_scatter, dim=dim))

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' tensors. Differentiable."""
        return _differentiable(x, partial(self.sum_scatter, dim=dim), partial(self.all_gather, dim=dim))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors. Differentiable: so is the gradient."""
        return _differentiable(x, self._summed, self._summed)

    def to_positions(self, x: Tensor, dim: int) -> Tensor:
        """From this rank's columns (of the last dim) of all positions (along `dim`) to all columns of this rank's
        positions. Differentiable."""
        return _differentiable(x, partial(self._send_positions, dim=dim), partial(self._send_columns, dim=dim))

    def to_columns(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `to_positions`. Differentiable."""
        return _differentiable(x, partial(self._send_columns, dim=dim), partial(self._send_positions, dim=dim))

    def mine(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor that all ranks have, a view."""
        assert x.shape[dim] % self.size == 0, (x.shape, dim, self.size)
        length = x.shape[dim] // self.size
        return x.narrow(dim, self.index * length, length)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors. Without a gradient."""
        x = x.contiguous()
        if self.ranks is not None:
            dist.all_reduce(x, group=self.ranks)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest of all ranks' values, one by one. Without a gradient."""
        x = x.contiguous()
        if self.ranks is not None:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.ranks)
        return x

    def _summed(self, x: Tensor) -> Tensor:
        return self.all_reduce(x.clone())

    def _send_positions(self, x: Tensor, dim: int) -> Tensor:
        x_SRc = x.movedim(dim, 0)
        x_nLRc = self._exchange(x_SRc).unflatten(0, (self.size, -1))
        return x_nLRc.movedim(0, -2).flatten(-2).movedim(0, dim)

    def _send_columns(self, x: Tensor, dim: int) -> Tensor:
        x_LRnc = x.movedim(dim, 0).unflatten(-1, (self.size, -1))
        return self._exchange(x_LRnc.movedim(-2, 0).flatten(0, 1)).movedim(0, dim)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send each rank its part of dim 0."""
        x = x.contiguous()
        out = torch.empty_like(x)
        if self.ranks is not None:
            dist.all_to_all_single(out, x, group=self.ranks)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """`gather` without a gradient."""
        if x.is_complex():
            return torch.view_as_complex(self.all_gather(torch.view_as_real(x), dim))
        x, dim = x.contiguous(), dim % x.dim()
        out = x.new_empty(self.size, *x.shape)
        if self.ranks is not None:
            all_gather(out.flatten(0, 1), x, self.ranks)
        return out.movedim(0, dim).flatten(dim, dim + 1).contiguous()

    def sum_scatter(self, x: Tensor, dim: int) -> Tensor:
        """`reduce_scatter` without a gradient; summed up in fp32, in the order of the ranks, wherever the backend does
        not do it itself."""
        dim %= x.dim()
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        out = torch.empty_like(parts[0])
        if self.ranks is not None and computes_on_cpu(x):
            out.copy_(self._exchange(parts).sum(dim=0, dtype=torch.float32))
        elif self.ranks is not None:
            reduce_scatter(out, parts.flatten(0, 1), self.ranks)
        return out


def _differentiable(x: Tensor, exchange: Callable[[Tensor], Tensor], of_gradient: Callable[[Tensor], Tensor]) -> Tensor:
    (out,) = exchanged([x], lambda parts: [*map(exchange, parts)], lambda grads: [*map(of_gradient, grads)])
    return out
