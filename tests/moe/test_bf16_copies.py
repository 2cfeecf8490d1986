"""Weights that are held in fp32 and computed with in bf16."""

import pytest
import torch
from torch import Tensor, nn

from expertmesh.moe.experts.bf16_copies import WorkingWeights

BF16 = torch.bfloat16


def take(weights: WorkingWeights, parameter: nn.Parameter) -> Tensor:
    (whole,) = weights.take("w", parameter, BF16, [len(parameter)])
    return whole


def use(weights: WorkingWeights, parameter: nn.Parameter, x: Tensor, rows: list[int]) -> Tensor:
    """The gradient that autograd makes for a rounded copy, after a forward and backward with the working weight."""
    products = [x.to(BF16) @ piece.t() for piece in weights.take("w", parameter, BF16, rows)]
    torch.cat(products, dim=1).square().sum().backward()
    rounded = parameter.detach().to(BF16).requires_grad_()
    (x.to(BF16) @ rounded.t()).square().sum().backward()
    assert rounded.grad is not None
    return rounded.grad


@pytest.mark.parametrize("rows", [[8], [3, 5], [0, 8]])
@pytest.mark.parametrize("are_kept", [False, True])
def test_gradients_are_added_up_in_fp32(are_kept: bool, rows: list[int]) -> None:
    torch.manual_seed(0)
    weights, parameter = WorkingWeights(), nn.Parameter(torch.randn(8, 16))
    weights.are_kept = are_kept
    expected = torch.zeros(8, 16)
    for _ in range(3):
        expected += use(weights, parameter, torch.randn(4, 16), rows).float()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert torch.equal(parameter.grad, expected)


def test_what_is_kept_follows_the_weight() -> None:
    torch.manual_seed(0)
    weights, parameter = WorkingWeights(), nn.Parameter(torch.randn(8, 16))
    weights.are_kept = True
    first = take(weights, parameter)
    assert take(weights, parameter).data_ptr() == first.data_ptr()
    before = first.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=1.0, fused=True).step()
    weights.outdate()
    second = take(weights, parameter)
    assert second.data_ptr() == first.data_ptr()
    assert not torch.equal(second, before)
    assert torch.equal(second, parameter.detach().to(BF16))
    with torch.no_grad():
        parameter.copy_(torch.zeros_like(parameter))  # as a checkpoint that is read: nobody tells
    assert not take(weights, parameter).any()


def test_nothing_is_kept_unless_asked_for() -> None:
    weights, parameter = WorkingWeights(), nn.Parameter(torch.randn(8, 16))
    first, second = (take(weights, parameter) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()


def test_a_frozen_weight_has_no_graph() -> None:
    parameter = nn.Parameter(torch.randn(8, 16), requires_grad=False)
    working = take(WorkingWeights(), parameter)
    assert working.grad_fn is None
    assert torch.equal(working, parameter.to(BF16))


def joined_parameters(num_experts: int) -> tuple[nn.Parameter, nn.Parameter]:
    first, second = (nn.Parameter(torch.randn(num_experts * 6, 16)) for _ in range(2))
    return first, second


@pytest.mark.parametrize("sizes", [[3], [1, 2], [0, 3]])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("are_kept", [False, True])
def test_of_joined_each_has_its_gradient(are_kept: bool, trained: tuple[bool, bool], sizes: list[int]) -> None:
    torch.manual_seed(0)
    weights, parameters = WorkingWeights(), joined_parameters(3)
    weights.are_kept = are_kept
    for parameter, is_trained in zip(parameters, trained, strict=True):
        parameter.requires_grad_(is_trained)
    expected = [torch.zeros(3, 6, 16) for _ in parameters]
    for _ in range(3):
        pieces = weights.take_joined("both", parameters, BF16, sizes)
        assert [piece.shape for piece in pieces] == [(size, 12, 16) for size in sizes]
        by_expert = [parameter.detach().to(BF16).view(3, 6, 16) for parameter in parameters]
        assert torch.equal(torch.cat(list(pieces)), torch.cat(by_expert, dim=1))
        grads = torch.randn(3, 12, 16).to(BF16)
        torch.autograd.backward(list(pieces), list(grads.split(sizes)))
        for total, grad in zip(expected, grads.chunk(2, dim=1), strict=True):
            total += grad.float()
    for parameter, total, is_trained in zip(parameters, expected, trained, strict=True):
        assert (parameter.grad is not None) == is_trained
        if parameter.grad is not None:
            assert parameter.grad.dtype == torch.float32
            assert torch.equal(parameter.grad, total.view(18, 16))


@pytest.mark.parametrize("changed", [0, 1])
def test_what_is_kept_of_joined_follows_both_weights(changed: int) -> None:
    torch.manual_seed(0)
    weights, parameters = WorkingWeights(), joined_parameters(2)

    def take_both() -> Tensor:
        (whole,) = weights.take_joined("both", parameters, BF16, [2])
        return whole

    weights.are_kept = True
    first, before = take_both(), take_both().detach().clone()
    assert take_both().data_ptr() == first.data_ptr()
    with torch.no_grad():
        parameters[changed].add_(1)
    halves = [(now != was).any() for now, was in zip(take_both().chunk(2, 1), before.chunk(2, 1), strict=True)]
    assert halves == [changed == 0, changed == 1]
    before = take_both().detach().clone()
    parameters[changed].grad = torch.ones_like(parameters[changed])
    torch.optim.AdamW([parameters[changed]], lr=1.0, fused=True).step()
    weights.outdate()
    assert not torch.equal(take_both(), before)
    assert take_both().data_ptr() == first.data_ptr()
