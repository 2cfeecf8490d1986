"""Weights that are held in fp32 and computed with in bf16: one, or gate and up joined for one GEMM."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from expertmesh.moe.experts.bf16_copies import WorkingWeights

BF16, EXPERTS, ROWS = torch.bfloat16, 3, 6


def parameters(number: int) -> tuple[nn.Parameter, ...]:
    torch.manual_seed(0)
    return tuple(nn.Parameter(torch.randn(EXPERTS * ROWS, 16)) for _ in range(number))


def take(weights: WorkingWeights, held: tuple[nn.Parameter, ...], sizes: list[int]) -> list[Tensor]:
    """The working weight of one or two parameters, in pieces of so many experts, (e, rows, 16)."""
    return list(weights.take("w", held, BF16, sizes))


def by_expert(held: tuple[nn.Parameter, ...]) -> Tensor:
    return torch.cat([parameter.detach().to(BF16).view(EXPERTS, ROWS, 16) for parameter in held], dim=1)


@pytest.mark.parametrize(
    ("trained", "sizes", "are_kept"),
    [
        ((True,), [3], False),
        ((True,), [1, 2], True),
        ((True,), [0, 3], False),
        ((False,), [3], True),
        ((True, True), [3], True),
        ((True, True), [1, 2], False),
        ((True, True), [0, 3], True),
        ((True, False), [1, 2], True),
        ((False, True), [3], False),
    ],
    ids=str,
)
def test_each_gradient_is_added_up_in_fp32(trained: tuple[bool, ...], sizes: list[int], are_kept: bool) -> None:
    weights, held = WorkingWeights(), parameters(len(trained))
    weights.are_kept = are_kept
    for parameter, is_trained in zip(held, trained, strict=True):
        parameter.requires_grad_(is_trained)
    expected = torch.zeros(EXPERTS, len(trained) * ROWS, 16)
    for _ in range(3):
        pieces = take(weights, held, sizes)
        assert [len(piece) for piece in pieces] == sizes
        assert torch.equal(torch.cat(pieces), by_expert(held))
        grads = torch.randn(expected.shape).to(BF16)
        expected += grads.float()
        if not any(trained):
            assert pieces[0].grad_fn is None
            continue
        torch.autograd.backward(pieces, list(grads.split(sizes)))
    for parameter, total, is_trained in zip(held, expected.chunk(len(held), dim=1), trained, strict=True):
        assert (parameter.grad is not None) == is_trained
        if parameter.grad is not None:
            assert parameter.grad.dtype == torch.float32
            assert torch.equal(parameter.grad, total.reshape(-1, 16))


def stepped(parameter: nn.Parameter, weights: WorkingWeights) -> None:
    """As training changes weights."""
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=1.0, fused=True).step()
    weights.outdate()


def read(parameter: nn.Parameter, weights: WorkingWeights) -> None:
    """As of a checkpoint: nobody tells."""
    with torch.no_grad():
        parameter.copy_(torch.zeros_like(parameter))


@pytest.mark.parametrize("change", [stepped, read])
@pytest.mark.parametrize(("number", "changed"), [(1, 0), (2, 0), (2, 1)])
def test_what_is_kept_follows_the_weights(
    number: int, changed: int, change: Callable[[nn.Parameter, WorkingWeights], None]
) -> None:
    weights, held = WorkingWeights(), parameters(number)
    (first,), (second,) = (take(weights, held, [EXPERTS]) for _ in range(2))
    assert first.data_ptr() != second.data_ptr(), "nothing is kept unless asked for"
    weights.are_kept = True
    (kept,) = take(weights, held, [EXPERTS])
    before = kept.detach().clone()
    change(held[changed], weights)
    (again,) = take(weights, held, [EXPERTS])
    assert again.data_ptr() == kept.data_ptr()
    assert torch.equal(again, by_expert(held))
    halves = zip(again.chunk(number, dim=1), before.chunk(number, dim=1), strict=True)
    assert [not torch.equal(now, was) for now, was in halves] == [place == changed for place in range(number)]
