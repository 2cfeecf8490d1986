"""Which ranks a token is sent to, and what each of them needs to know of its choices: index arithmetic.

A destination is a rank, or a node, and one chunk of its experts. A token with several experts there is sent once. Its
row is that of the first of these choices; what the destination does with it is told by all K of them: weights, and for
each the number of its expert among the destination's, or -1 where the expert is elsewhere.

Shape suffixes: T tokens, K experts per token, n rows that are sent, C destinations.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.recompute_cache import is_replaying, kept, placeholder
from ..util.step_parts import register_step_part
from .exchange import Exchange
from .permute import ExpertOrder, first_rows

register_step_part(__name__, "dispatch")


@dataclass(frozen=True)
class Choices:
    """Where each choice of each token goes.

    destination_TK: int64; C where there is none, as for padding.
    expert_TK: int64, the expert's number at that destination.
    """

    destination_TK: Tensor
    expert_TK: Tensor


@dataclass(frozen=True)
class Firsts:
    """For each choice the first of its token's with the same destination.

    destination_TK: the destination of those that are the first; C for others.
    choice_TK: which one that is, 0 to K - 1.
    """

    destination_TK: Tensor
    choice_TK: Tensor


def first_choices(destination_TK: Tensor, num_destinations: int) -> Firsts:
    """Find the rows that are sent once for all choices with one destination."""
    is_same_TKK = destination_TK.unsqueeze(2) == destination_TK.unsqueeze(1)
    choice_TK = is_same_TKK.to(torch.uint8).argmax(dim=2)
    is_first_TK = choice_TK == torch.arange(destination_TK.shape[1], device=destination_TK.device)
    return Firsts(destination_TK.masked_fill(~is_first_TK, num_destinations), choice_TK)


@dataclass(frozen=True)
class OnceEach:
    """The rows of one hop, sorted by destination, then by token.

    choices: that travel beside them.
    order: of the rows; a token's other choices have none.
    row_TK: for each choice the row of its destination; any valid index where it has none.
    has_row_TK: whether it has one.
    """

    choices: Choices
    order: ExpertOrder
    row_TK: Tensor
    has_row_TK: Tensor


def rows_sent_once(
    choices: Choices, firsts: Firsts, order: ExpertOrder, num_destinations: int, num_rows: int
) -> OnceEach:
    """The rows to send, of which the host knows how many there are.

    Args:
        order: by the first choices' destination.
    """
    order = sparse_rows(order, num_rows)
    row_TK = order.position_TK.gather(1, firsts.choice_TK)
    return OnceEach(choices, order, row_TK, choices.destination_TK != num_destinations)


def sparse_rows(order: ExpertOrder, num_rows: int) -> ExpertOrder:
    """The first rows of an order, in which most choices have none."""
    return replace(first_rows(order, num_rows), is_sparse=True)


class SendChoices(torch.autograd.Function):
    """Begin to send each row's choices, (n, 2·K) in the weights' dtype, which holds expert numbers exactly; returns
    what is received of each part, for `ArriveChoices`. Backward: the weights' gradients, which come back alone."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, once: OnceEach, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        ctx.save_for_backward(once.row_TK, once.has_row_TK)
        parts = range(len(exchange.sent))

        def begin() -> tuple[Tensor, ...]:
            choices_n2K = _choices_of_rows(weights_TK, once.choices, once.order)
            return tuple(exchange.begin_sending(part, choices_n2K) for part in parts)

        sent: tuple[Tensor, ...] = kept("choices sent", begin)
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad_nK = ctx.exchange.wait_for_returned()
        row_TK, has_row_TK = ctx.saved_tensors
        num_choices = row_TK.shape[1]
        if grad_nK.shape[0] == 0:
            return grad_nK.new_zeros(row_TK.shape), None, None
        place_TK = row_TK * num_choices + torch.arange(num_choices, device=grad_nK.device)
        grad_TK = grad_nK.reshape(-1).index_select(0, place_TK.view(-1)).view_as(place_TK)
        return grad_TK.masked_fill_(~has_row_TK, 0.0), None, None


def _choices_of_rows(weights_TK: Tensor, choices: Choices, order: ExpertOrder) -> Tensor:
    token_n = order.token_n
    destination_n1 = choices.destination_TK.reshape(-1).index_select(0, order.source_n).unsqueeze(1)
    is_elsewhere_nK = choices.destination_TK.index_select(0, token_n) != destination_n1
    expert_nK = choices.expert_TK.index_select(0, token_n).masked_fill(is_elsewhere_nK, -1)
    return torch.cat([weights_TK.index_select(0, token_n), expert_nK.to(weights_TK.dtype)], dim=1)


class ArriveChoices(torch.autograd.Function):
    """Wait for a part's choices: weights (n, K), and int64 expert numbers (n, K), -1 where they are elsewhere."""

    @staticmethod
    def forward(ctx: Any, choices_n2K: Tensor, exchange: Exchange, part: int) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.part, ctx.shape = exchange, part, choices_n2K.shape
        if not is_replaying():
            exchange.wait_for_sent(part)
        weights_nK, expert_nK = choices_n2K.chunk(2, dim=1)
        expert_nK = expert_nK.to(torch.int64)
        ctx.mark_non_differentiable(expert_nK)
        return weights_nK.contiguous(), expert_nK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nK: Tensor, _: Any) -> tuple[Tensor, None, None]:
        ctx.exchange.begin_returning(ctx.part, grad_nK)
        return placeholder(grad_nK, *ctx.shape), None, None
