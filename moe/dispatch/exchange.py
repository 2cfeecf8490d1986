"""Exchange of rows with their experts: all-to-alls that overlap computation.

A layer's rows are sent in parts (chunks), each with an all-to-all there and one back. Each of the two begins in one
node of autograd's graph and is waited for in another, in forward and in backward:

                 rows_nD ─ Send ─┬─ Arrive ─ experts of part 0 ─ Return ─┬─ Home ─ rows_nD
                                 └─ Arrive ─ experts of part 1 ─ Return ─┘
    forward      begins   waits                                 begins   waits
    backward     waits    begins                                waits    begins

What has begun and is not yet waited for is in the `Exchange`, which the nodes share; the tensors on the edges between
them only form the graph, and are not read. Autograd runs nodes in the reverse order of their creation: in backward too
a part's gradients are sent while another part's are computed, and in the same order on all ranks.

Shape suffixes: n rows sent from this rank, after which padding's may lie, D model width, R rows of a part received by
this rank.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.recompute_cache import is_replaying, kept, placeholder


class UnderWay:
    """An all-to-all that has begun: until `wait` returns, `out` may not be read, nor the sent tensor be written to. A
    rank without rows takes part all the same: skipping would leave the others waiting."""

    def __init__(
        self, out: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
    ):
        self.out = out
        self.group = group
        self.rows = rows.contiguous()
        self.work = dist.all_to_all_single(out, self.rows, list(received), list(sent), group=group, async_op=True)

    def wait(self) -> Tensor:
        """The received rows. On a GPU the stream waits, not the host."""
        assert self.work is not None
        self.work.wait()
        return self.out


class Exchange:
    """The exchange of one layer's rows in one forward and its backward.

    Attributes:
        sent, received: rows of each part to and from each rank of the group.
        num_given: rows that `Send` was given: those that are sent, and after them padding's.
    """

    def __init__(self, group: dist.ProcessGroup, sent: list[list[int]], received: list[list[int]]):
        self.group = group
        self.sent = sent
        self.received = received
        ends = list(accumulate(sum(rows) for rows in sent))
        self._places = [slice(end - sum(rows), end) for end, rows in zip(ends, sent, strict=True)]
        self._coming: dict[int, UnderWay] = {}
        self._going_home: dict[int, UnderWay] = {}
        self._home_nD: Tensor | None = None
        self.num_given = 0

    def begin_sending(self, part: int, rows_nD: Tensor) -> Tensor:
        sent, received = self.sent[part], self.received[part]
        out_RD = rows_nD.new_empty(sum(received), rows_nD.shape[1])
        self._coming[part] = UnderWay(out_RD, rows_nD[self._places[part]], received, sent, self.group)
        return out_RD

    def wait_for_sent(self, part: int) -> Tensor:
        return self._coming.pop(part).wait()

    def begin_returning(self, part: int, rows_RD: Tensor, num_rows: int | None = None) -> None:
        """num_rows: of the tensor in which they come home; by default as many as come. Any more are undefined."""
        if self._home_nD is None:
            num_rows = self._places[-1].stop if num_rows is None else num_rows
            self._home_nD = rows_RD.new_empty(num_rows, rows_RD.shape[1])
        place = self._home_nD[self._places[part]]
        self._going_home[part] = UnderWay(place, rows_RD, self.sent[part], self.received[part], self.group)

    def wait_for_returned(self) -> Tensor:
        for part in sorted(self._going_home):
            self._going_home.pop(part).wait()
        rows_nD, self._home_nD = self._home_nD, None
        assert rows_nD is not None
        return rows_nD


class Send(torch.autograd.Function):
    """Begin to send each part's rows, which lie one part after the other, sorted by rank; returns, for each part, the
    tensor of received rows, which may be read after `Arrive`.

    Rows after the last part's are padding's. They are not sent, and their gradients are undefined: a slice before it
    would write zeros to them, and copy all others."""

    @staticmethod
    def forward(ctx: Any, rows_nD: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        exchange.num_given = rows_nD.shape[0]
        parts = range(len(exchange.sent))
        sent: tuple[Tensor, ...] = kept("rows sent", lambda: tuple(exchange.begin_sending(i, rows_nD) for i in parts))
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait_for_returned(), None


class Arrive(torch.autograd.Function):
    """The received rows of a part, which may now be read."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, exchange: Exchange, part: int) -> Tensor:
        ctx.exchange, ctx.part = exchange, part
        if not is_replaying():
            exchange.wait_for_sent(part)
        return rows_RD.view_as(rows_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        ctx.exchange.begin_returning(ctx.part, grad_RD, ctx.exchange.num_given)
        return placeholder(grad_RD, *grad_RD.shape), None, None


class Return(torch.autograd.Function):
    """Begin to send a part's results to where its rows came from; the return value is for `Home`."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, exchange: Exchange, part: int) -> Tensor:
        ctx.exchange, ctx.part = exchange, part
        if not is_replaying():
            exchange.begin_returning(part, rows_RD)
        return rows_RD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange.wait_for_sent(ctx.part), None, None


class Home(torch.autograd.Function):
    """All parts' results, in the order of the rows that `Send` was given."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tokens: Tensor) -> Tensor:
        ctx.exchange, ctx.num_tokens = exchange, len(tokens)
        rows_nD: Tensor = kept("rows that came home", exchange.wait_for_returned)
        return rows_nD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        # the last part's experts come first in backward
        for part in reversed(range(len(exchange.sent))):
            exchange.begin_sending(part, grad_nD)
        return None, *(grad_nD.new_empty(0) for _ in range(ctx.num_tokens))
