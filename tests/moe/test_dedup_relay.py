"""The nodes of moe.dispatch.dedup_relay against a plain loop over tokens, with exchanges that send rows back to where
they are."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.dispatch.dedup_relay import (
    ArriveAndSpread,
    Combine,
    Relay,
    RelayBack,
    SendTokens,
    SumAndReturn,
)
from expertmesh.moe.dispatch.permute import ExpertOrder, WeightsToRows, expert_order, first_rows
from expertmesh.moe.kernels.gathered_rows import GatheredRows

T, D, K, E = 7, 5, 3, 4


class Loopback:
    """An Exchange of one rank with itself, which checks that each thing is waited for once, after it has begun."""

    def __init__(self, num_rows: int) -> None:
        self.sent = self.received = [[num_rows]]
        self.coming: Tensor | None = None
        self.returning: Tensor | None = None

    def begin_sending(self, part: int, rows_nD: Tensor) -> Tensor:
        assert part == 0
        assert self.coming is None
        self.coming = rows_nD.clone()
        return self.coming

    def wait_for_sent(self, part: int) -> Tensor:
        found, self.coming = self.coming, None
        assert found is not None
        return found

    def begin_returning(self, part: int, rows_nD: Tensor) -> None:
        assert self.returning is None
        self.returning = rows_nD.clone()

    def wait_for_returned(self) -> Tensor:
        found, self.returning = self.returning, None
        assert found is not None
        return found


def order_of(experts_TK: Tensor) -> ExpertOrder:
    """Rows by expert, those of E left out."""
    return first_rows(expert_order(experts_TK, E, has_padding=True), int((experts_TK < E).sum()))


def once(num_tokens: int, padding: int) -> tuple[ExpertOrder, int]:
    """(each token's one row, but those of the last `padding` tokens, how many)."""
    is_kept_T = torch.arange(num_tokens) < num_tokens - padding
    return order_of(torch.where(is_kept_T, 0, E)[:, None]), num_tokens - padding


def computed(rows_RD: Tensor, expert_R: Tensor) -> Tensor:
    return torch.tanh(rows_RD * (expert_R[:, None] + 1))


class Gathering(torch.autograd.Function):
    """`computed` of rows that are gathered, and weighed."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, weights_R: Tensor, expert_R: Tensor, gathered: GatheredRows) -> Tensor:
        ctx.gathered = gathered
        ctx.save_for_backward(rows_UD, weights_R, expert_R, token_R := gathered.take("token_R"))
        return computed(rows_UD[token_R], expert_R) * weights_R[:, None]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_UD, weights_R, expert_R, token_R = ctx.saved_tensors
        assert grad_RD.untyped_storage().nbytes() == grad_RD.element_size()  # a placeholder
        inputs = rows_UD[token_R].requires_grad_(), weights_R.detach().requires_grad_()
        with torch.enable_grad():
            done_RD = computed(inputs[0], expert_R) * inputs[1][:, None]
        grad_UD = ctx.gathered.take("grad_sums_UD")
        grad_rows_RD, grad_R = torch.autograd.grad(done_RD, inputs, grad_UD[token_R])
        ctx.gathered.put("grad_rows_RD", grad_rows_RD)
        return grad_UD.new_zeros(()).expand(rows_UD.shape), grad_R, None, None


def through_relays(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, padding: int, is_relayed: bool, how: str
) -> Tensor:
    order, num_rows = once(T, padding)
    exchange: Any = Loopback(num_rows)
    (arriving,) = SendTokens.apply(x_TD, order, exchange, not is_relayed)
    first, second, onward = exchange, order, exchange
    if is_relayed:
        second, _ = once(num_rows, 0)
        onward = Loopback(num_rows)
        arriving = Relay.apply(arriving, first, 0, second, onward, x_TD.dtype)
    spread = order_of(experts_TK[:num_rows])
    gathered = GatheredRows() if how == "gathered" else None
    rows_RD = ArriveAndSpread.apply(arriving, onward, 0, spread, x_TD.dtype, gathered)
    expert_R = experts_TK[:num_rows].flatten()[spread.source_n]
    weights_UK: Tensor | None = weights_TK[:num_rows]
    weights_R = WeightsToRows.apply(weights_UK, spread)
    if how == "gathered":
        done_RD, weights_UK = Gathering.apply(rows_RD, weights_R, expert_R, gathered), None
    elif how == "weighed":
        done_RD, weights_UK = computed(rows_RD, expert_R) * weights_R[:, None], None
    else:
        done_RD = computed(rows_RD, expert_R)
    token = SumAndReturn.apply(done_RD, weights_UK, spread, onward, 0, x_TD.dtype, gathered)
    if is_relayed:
        token = RelayBack.apply(token, onward, second, first, 0, x_TD.dtype)
    out_TD: Tensor = Combine.apply(first, order, x_TD.dtype, token)
    return out_TD


def by_loop(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, padding: int) -> Tensor:
    out = []
    for token in range(T):
        row = x_TD.new_zeros(D)
        if token < T - padding:
            for choice in range(K):
                expert = int(experts_TK[token, choice])
                if expert < E:  # else another rank's
                    row = row + weights_TK[token, choice] * torch.tanh(x_TD[token] * (expert + 1))
        out.append(row)
    return torch.stack(out)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("is_relayed", [False, True], ids=["by rank", "by node"])
@pytest.mark.parametrize("how", ["", "weighed", "gathered"])
def test_results_and_gradients(is_relayed: bool, padding: int, how: str) -> None:
    torch.manual_seed(0)
    experts_TK = torch.stack([torch.randperm(E + 1)[:K] for _ in range(T)])
    given = torch.randn(T, D, dtype=torch.double), torch.rand(T, K, dtype=torch.double)
    weights_TD = torch.randn(T, D, dtype=torch.double)
    found = []
    for run in (partial(through_relays, is_relayed=is_relayed, how=how), by_loop):
        x_TD, weights_TK = (value.clone().requires_grad_() for value in given)
        out_TD = run(x_TD, weights_TK, experts_TK, padding)
        found.append([out_TD, *torch.autograd.grad((out_TD * weights_TD).sum(), (x_TD, weights_TK))])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
