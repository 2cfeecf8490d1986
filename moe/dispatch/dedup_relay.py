"""Rows that are sent once to each destination, there spread over their experts, and summed before they go back: as
nodes of autograd's graph, each of which begins some exchanges and waits for others.

    by rank    Send ──────── ArriveAndSpread ─ experts ─ SumAndReturn ────────────── Combine
    by node    Send ─ Relay ─ ArriveAndSpread ─ experts ─ SumAndReturn ─ RelayBack ─ Combine

Backward goes the same way with gradients: those of results are sent once to each destination and spread there, those of
tokens are summed there and once more where they come back to. As in `moe.dispatch.exchange`, what is under way is in an
`Exchange`, and the tensors on the edges between two ranks only form the graph.

In a replay (see `recompute_cache`) nothing is sent. Kept from the first run: the rows that experts computed with,
before they were spread, the tokens' sums, and the experts' results, of which the weights' gradients are made, unless
they come weighed.

As `Combine` saves tensors, a recomputation runs through to where all that has begun is waited for.

`sum_dtype` is that in which sums travel: a token's sum over the experts of one destination is rounded to it.

Shape suffixes: T tokens, or rows that arrived from the hop before, D model width, K experts per token, n rows sent, U
rows received, R rows of experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.gathered_rows import GatheredRows
from ..util.recompute_cache import is_replaying, kept, placeholder
from ..util.step_parts import register_step_part
from .exchange import Exchange
from .permute import (
    ExpertOrder,
    combine_backward,
    gather_sum,
    given_to_gather,
    grad_of_rows,
    grad_to_rows,
    save_order,
    saved_order,
    spread_tokens,
)

register_step_part(__name__, "permute, combine")


class SendTokens(torch.autograd.Function):
    """Begin to send each token's rows of `order`; returns what is received of each part, for `ArriveAndSpread` or
    `Relay`. `is_last`: for the former, which needs the rows in a replay too."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: ExpertOrder, exchange: Exchange, is_last: bool) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.dtype = exchange, x_TD.dtype
        save_order(ctx, order)
        parts = range(len(exchange.sent))

        def begin() -> tuple[Tensor, ...]:
            rows_nD = spread_tokens(x_TD, order)
            return tuple(exchange.begin_sending(part, rows_nD) for part in parts)

        if is_replaying() and not is_last:
            return tuple(placeholder(x_TD, sum(exchange.received[part]), x_TD.shape[1]) for part in parts)
        sent: tuple[Tensor, ...] = kept("rows sent", begin) if is_last else begin()
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        order, _ = saved_order(ctx)
        return gather_sum(ctx.exchange.wait_for_returned(), order, None, ctx.dtype), None, None, None


class Relay(torch.autograd.Function):
    """Wait for a part's rows and begin to send them on; returns what is then received."""

    @staticmethod
    def forward(
        ctx: Any,
        arriving_TD: Tensor,
        exchange: Exchange,
        part: int,
        order: ExpertOrder,
        onward: Exchange,
        sum_dtype: torch.dtype,
    ) -> Tensor:
        ctx.exchange, ctx.part, ctx.onward, ctx.sum_dtype = exchange, part, onward, sum_dtype
        ctx.shape = arriving_TD.shape
        save_order(ctx, order)
        if not is_replaying():
            exchange.wait_for_sent(part)
        sent_UD: Tensor = kept("rows sent", lambda: onward.begin_sending(0, spread_tokens(arriving_TD, order)))
        return sent_UD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UD: Tensor) -> tuple[Tensor | None, ...]:
        order, _ = saved_order(ctx)
        grad_nD = ctx.onward.wait_for_returned()
        ctx.exchange.begin_returning(ctx.part, gather_sum(grad_nD, order, None, ctx.sum_dtype))
        return placeholder(grad_UD, *ctx.shape), None, None, None, None, None


class ArriveAndSpread(torch.autograd.Function):
    """Wait for a part's rows; returns the rows of its experts, each the row of its token; or the tokens', where those
    are to be gathered."""

    @staticmethod
    def forward(
        ctx: Any,
        arriving_UD: Tensor,
        exchange: Exchange,
        part: int,
        order: ExpertOrder,
        sum_dtype: torch.dtype,
        gathered: GatheredRows | None,
    ) -> Tensor:
        ctx.exchange, ctx.part, ctx.sum_dtype, ctx.gathered = exchange, part, sum_dtype, gathered
        ctx.shape = arriving_UD.shape
        save_order(ctx, order)
        if not is_replaying():
            exchange.wait_for_sent(part)
        if gathered is not None:
            return given_to_gather(gathered, arriving_UD, order)
        return spread_tokens(arriving_UD, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        order, _ = saved_order(ctx)
        grad_RD = grad_of_rows(ctx.gathered, grad_RD)
        ctx.exchange.begin_returning(ctx.part, gather_sum(grad_RD, order, None, ctx.sum_dtype))
        return placeholder(grad_RD, *ctx.shape), None, None, None, None, None


class SumAndReturn(torch.autograd.Function):
    """Begin to send back each row's sum of its experts' results, weighted where these have not been; the return value
    is for `RelayBack` or `Combine`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_UK: Tensor | None,
        order: ExpertOrder,
        exchange: Exchange,
        part: int,
        sum_dtype: torch.dtype,
        gathered: GatheredRows | None,
    ) -> Tensor:
        ctx.exchange, ctx.part, ctx.dtype, ctx.gathered = exchange, part, rows_RD.dtype, gathered
        if weights_UK is None:
            save_order(ctx, order)
        else:
            rows_RD = kept("experts' results", lambda: rows_RD)
            save_order(ctx, order, rows_RD, weights_UK)
        if not is_replaying():
            exchange.begin_returning(part, gather_sum(rows_RD, order, weights_UK, sum_dtype))
        return rows_RD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, rows_and_weights = saved_order(ctx)
        grad_UD = ctx.exchange.wait_for_sent(ctx.part)
        if not rows_and_weights:
            # cast before there are more rows of them
            grad_RD = grad_to_rows(ctx.gathered, grad_UD.to(ctx.dtype), order)
            return grad_RD, None, None, None, None, None, None
        rows_RD, weights_UK = rows_and_weights
        return *combine_backward(grad_UD, rows_RD, weights_UK, order), None, None, None, None, None


class RelayBack(torch.autograd.Function):
    """Wait for what `onward` brings back and begin to return its sums to where the part's rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        returned: Tensor,
        onward: Exchange,
        order: ExpertOrder,
        exchange: Exchange,
        part: int,
        sum_dtype: torch.dtype,
    ) -> Tensor:
        ctx.onward, ctx.exchange, ctx.part = onward, exchange, part
        save_order(ctx, order)
        if not is_replaying():
            exchange.begin_returning(part, gather_sum(onward.wait_for_returned(), order, None, sum_dtype))
        return returned.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, _ = saved_order(ctx)
        ctx.onward.begin_sending(0, spread_tokens(ctx.exchange.wait_for_sent(ctx.part), order))
        return grad.new_empty(0), None, None, None, None, None


class Combine(torch.autograd.Function):
    """Wait for all parts' sums; returns out_TD, for each token the sum of what its destinations sent back, in `dtype`;
    zero for padding."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, order: ExpertOrder, dtype: torch.dtype, *returned: Tensor) -> Tensor:
        ctx.exchange, ctx.num_parts = exchange, len(returned)
        save_order(ctx, order)
        out_TD: Tensor = kept("tokens' sums", lambda: gather_sum(exchange.wait_for_returned(), order, None, dtype))
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        order, _ = saved_order(ctx)
        rows_nD = spread_tokens(grad_TD, order)
        # the last part's experts come first in backward
        for part in reversed(range(ctx.num_parts)):
            ctx.exchange.begin_sending(part, rows_nD)
        return None, None, None, *(grad_TD.new_empty(0) for _ in range(ctx.num_parts))
