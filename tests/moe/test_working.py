"""Weights that are held in fp32 and computed with in bf16."""

import pytest
import torch
from torch import Tensor, nn

from moe.working import WorkingWeights

BF16 = torch.bfloat16


def use(weights: WorkingWeights, parameter: nn.Parameter, x: Tensor) -> Tensor:
    """The gradient that autograd makes for a rounded copy, after a forward and backward with the working weight."""
    (x.to(BF16) @ weights.take("w", parameter, BF16).t()).square().sum().backward()
    rounded = parameter.detach().to(BF16).requires_grad_()
    (x.to(BF16) @ rounded.t()).square().sum().backward()
    assert rounded.grad is not None
    return rounded.grad


@pytest.mark.parametrize("are_kept", [False, True])
def test_gradients_are_added_up_in_fp32(are_kept: bool) -> None:
    torch.manual_seed(0)
    weights, parameter = WorkingWeights(), nn.Parameter(torch.randn(8, 16))
    weights.are_kept = are_kept
    expected = torch.zeros(8, 16)
    for _ in range(3):
        expected += use(weights, parameter, torch.randn(4, 16)).float()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert torch.equal(parameter.grad, expected)


def test_what_is_kept_follows_the_weight() -> None:
    torch.manual_seed(0)
    weights, parameter = WorkingWeights(), nn.Parameter(torch.randn(8, 16))
    weights.are_kept = True
    first = weights.take("w", parameter, BF16)
    assert weights.take("w", parameter, BF16).data_ptr() == first.data_ptr()
    before = first.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=1.0, fused=True).step()
    weights.outdate()
    second = weights.take("w", parameter, BF16)
    assert second.data_ptr() == first.data_ptr()
    assert not torch.equal(second, before)
    assert torch.equal(second, parameter.detach().to(BF16))
    with torch.no_grad():
        parameter.copy_(torch.zeros_like(parameter))  # as a checkpoint that is read: nobody tells
    assert not weights.take("w", parameter, BF16).any()


def test_nothing_is_kept_unless_asked_for() -> None:
    weights, parameter = WorkingWeights(), nn.Parameter(torch.randn(8, 16))
    first, second = (weights.take("w", parameter, BF16) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_a_frozen_weight_has_no_graph() -> None:
    parameter = nn.Parameter(torch.randn(8, 16), requires_grad=False)
    working = WorkingWeights().take("w", parameter, BF16)
    assert working.grad_fn is None
    assert torch.equal(working, parameter.to(BF16))
