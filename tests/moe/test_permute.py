"""The permutations' Triton kernels against plain torch, forward and backward."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from expertmesh.moe.dispatch import permute
from expertmesh.moe.dispatch.dedup_routes import sparse_rows
from expertmesh.moe.dispatch.permute import ExpertOrder, RowsToTokens, TokensToRows, expert_order, first_rows
from tests.interpreter import interpreted
from tests.rounding import OTHER_ORDER, assert_near

E = 5
SHAPES = {
    "one expert a token": (6, 1, 32),
    "two": (7, 2, 48),
    "a width of no power of two": (3, 3, 1100),
    "an odd width": (4, 8, 77),
    "more experts than a power of two": (2, 9, 16),
    "a row over three blocks": (2, 2, 2049),
    "one token": (1, 6, 1),
    "no token": (0, 2, 16),
}
PADDING = {"no padding": 0.0, "some": 0.5, "nothing but padding": 1.0}


def order_of(num_tokens: int, top_k: int, padding: float, device: str) -> ExpertOrder:
    """The last tokens are padding, and the rows of the others are left."""
    torch.manual_seed(num_tokens)
    experts_TK = torch.randint(E, (num_tokens, top_k))
    if padding == 0:
        return expert_order(experts_TK.to(device), E, has_padding=False)
    experts_TK[round((1 - padding) * num_tokens) :] = E
    num_kept = int((experts_TK < E).sum())
    return first_rows(expert_order(experts_TK.to(device), E, has_padding=True), num_kept)


def results(order: ExpertOrder, width: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """What tokens become as rows, what rows become as tokens, and the gradients of tokens, rows and weights."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    (num_tokens, top_k), num_rows = order.position_TK.shape, order.source_n.numel()
    x_TD, rows_nD = random(num_tokens, width).requires_grad_(), random(num_rows, width).requires_grad_()
    weights_TK = random(num_tokens, top_k).float().requires_grad_()
    spread_nD, out_TD = TokensToRows.apply(x_TD, order), RowsToTokens.apply(rows_nD, weights_TK, order)
    assert spread_nD.dtype == out_TD.dtype == dtype
    (grad_x_TD,) = torch.autograd.grad(spread_nD, x_TD, random(num_rows, width))
    grads = torch.autograd.grad(out_TD, (rows_nD, weights_TK), random(num_tokens, width))
    return [spread_nD.detach(), out_TD.detach(), grad_x_TD, *grads]


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert torch.equal(found[0], expected[0])
    for mine, plain in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (plain.dtype, plain.shape)
        assert_near(mine, plain, tolerance)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Until undone, tensors on a CPU go to the kernels too."""
    monkeypatch.setattr(permute, "takes_triton", lambda tensor: True)
    return monkeypatch


CASES = [
    *((shape, 0.5, torch.float32) for shape in SHAPES.values()),
    (SHAPES["two"], 0.0, torch.float32),
    (SHAPES["a width of no power of two"], 1.0, torch.float32),
    (SHAPES["an odd width"], 0.0, torch.bfloat16),
    (SHAPES["one token"], 1.0, torch.bfloat16),
]


@interpreted
@pytest.mark.parametrize(("shape", "padding", "dtype"), CASES, ids=str)
def test_equals_plain(
    shape: tuple[int, int, int], padding: float, dtype: torch.dtype, fused: pytest.MonkeyPatch
) -> None:
    """The interpreter cuts bf16 off where a GPU rounds: one unit in the last place."""
    num_tokens, top_k, width = shape
    order = order_of(num_tokens, top_k, padding, "cpu")
    found = results(order, width, dtype, "cpu")
    fused.undo()
    check(found, results(order, width, dtype, "cpu"), OTHER_ORDER if dtype == torch.float32 else 2**-6)


def sparse_order_of(num_tokens: int, top_k: int) -> ExpertOrder:
    """Of each token's choices two thirds have no row, at random."""
    generator = torch.Generator().manual_seed(num_tokens)
    experts_TK = torch.randint(3 * E, (num_tokens, top_k), generator=generator).clamp(max=E)
    return sparse_rows(expert_order(experts_TK, E, has_padding=True), int((experts_TK < E).sum()))


@interpreted
@pytest.mark.parametrize("shape", [(4, 8, 77), (2, 9, 16), (1, 6, 1), (0, 2, 16)], ids=str)
def test_choices_without_a_row(shape: tuple[int, int, int], fused: pytest.MonkeyPatch) -> None:
    """By row, by choice and by the kernels."""
    num_tokens, top_k, width = shape
    order = sparse_order_of(num_tokens, top_k)
    by_kernels = results(order, width, torch.float32, "cpu")
    fused.undo()
    by_row = results(order, width, torch.float32, "cpu")
    check(by_row, results(replace(order, is_sparse=False), width, torch.float32, "cpu"), OTHER_ORDER)
    check(by_kernels, by_row, OTHER_ORDER)


@interpreted
def test_sums_in_another_dtype(fused: pytest.MonkeyPatch) -> None:
    order = sparse_order_of(9, 4)
    rows_nD = torch.randn(order.source_n.numel(), 40).to(torch.bfloat16)
    by_kernels = permute.gather_sum(rows_nD, order, None, torch.float32)
    fused.undo()
    in_fp32 = permute.gather_sum(rows_nD, order, None, torch.float32)
    assert by_kernels.dtype == in_fp32.dtype == torch.float32
    assert_near(by_kernels, in_fp32)
    assert torch.equal(permute.gather_sum(rows_nD, order, None), in_fp32.to(torch.bfloat16))
    assert not torch.equal(in_fp32, in_fp32.to(torch.bfloat16).float())


@interpreted
@pytest.mark.parametrize("is_fused", [False, True])
def test_weights_of_padding_may_be_no_number(fused: pytest.MonkeyPatch, is_fused: bool) -> None:
    if not is_fused:
        fused.undo()
    order = order_of(6, 2, 0.5, "cpu")
    rows_nD, weights_TK = torch.randn(order.source_n.numel(), 8), torch.rand(6, 2)
    expected_TD = permute.gather_sum(rows_nD, order, weights_TK)
    weights_TK[3:] = torch.tensor([torch.nan, torch.inf])
    assert torch.equal(permute.gather_sum(rows_nD, order, weights_TK), expected_TD)
    assert not expected_TD[3:].any()
    grad_TD = torch.full((6, 8), torch.nan).index_fill(0, torch.arange(3), 1.0)
    grad_nD, grad_TK = permute.combine_backward(grad_TD, rows_nD, weights_TK, order)
    assert grad_nD.isfinite().all()
    assert grad_TK[:3].isfinite().all()
    assert not grad_TK[3:].any()


@interpreted
@pytest.mark.usefixtures("fused")
def test_rows_of_padding_are_left_alone() -> None:
    """Before an all-to-all they come last, and are cut off."""
    experts_TK = torch.tensor([[1, 0], [E, E], [0, 2]])
    order = expert_order(experts_TK, E, has_padding=True)
    x_TD = torch.arange(3.0).unsqueeze(1).expand(3, 4)
    assert permute.spread_tokens(x_TD, order)[:4, 0].tolist() == [0, 2, 0, 2]
    grad_nD = torch.full((6, 4), torch.nan).index_fill(0, torch.arange(4), 1.0)
    assert permute.gather_sum(grad_nD, order, None)[:, 0].tolist() == [2, 0, 2]


@interpreted
@pytest.mark.usefixtures("fused")
def test_expanded_gradient() -> None:
    order = order_of(4, 2, 0.0, "cpu")
    rows_nD, weights_TK = torch.randn(8, 16, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    RowsToTokens.apply(rows_nD, weights_TK, order).sum().backward()
    assert weights_TK.grad is not None
    assert_near(weights_TK.grad, rows_nD.detach().sum(dim=1)[order.position_TK])
