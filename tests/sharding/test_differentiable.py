"""Exchanges that gradients flow through, against autograd's own of the same permutation."""

import torch
from torch import Tensor

from expertmesh.sharding.collectives.differentiable import exchanged


def reversed_rows(parts: object) -> list[Tensor]:
    return [part.flip(0) for part in parts]  # type: ignore[attr-defined]


def doubled_back(grads: object) -> list[Tensor]:
    """Not what autograd would make of `reversed_rows`: that it is called is seen."""
    return [2 * grad.flip(0) for grad in grads]  # type: ignore[attr-defined]


def test_gradients_go_back_by_the_other_exchange() -> None:
    """Indices among what is sent have none, and all come back at their places."""
    generator = torch.Generator().manual_seed(0)
    first, last = (torch.randn(4, 3, generator=generator, requires_grad=True) for _ in range(2))
    index, weights = torch.arange(4), torch.randn(4, 3, generator=generator)
    found = exchanged([first, index, last], reversed_rows, doubled_back)
    assert torch.equal(found[0], first.flip(0))
    assert torch.equal(found[1], index.flip(0))
    assert torch.equal(found[2], last.flip(0))
    assert not found[1].requires_grad
    grads = torch.autograd.grad((found[0] * weights).sum() + found[2].square().sum(), (first, last))
    expected = torch.autograd.grad((first.flip(0) * weights).sum() + last.flip(0).square().sum(), (first, last))
    assert all(torch.equal(mine, 2 * plain) for mine, plain in zip(grads, expected, strict=True))


def test_what_is_received_may_be_changed_in_place() -> None:
    """As models do that clamp queries: of a view that a function's forward gives, autograd would refuse it."""
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]], requires_grad=True)
    (found,) = exchanged([x], lambda parts: [part.view(-1) for part in parts], lambda grads: [grads[0].view(2, 2)])
    found.clamp_(min=0)
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(grad, (x > 0).float())
