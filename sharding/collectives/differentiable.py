"""Exchanges between ranks through which gradients flow: the backward of one is another."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Send = Callable[[Sequence[Tensor]], list[Tensor]]


def exchanged(parts: Sequence[Tensor], send: Send, send_gradients: Send) -> list[Tensor]:
    """What `send` gives, differentiable: what have gradients are sent first, and then the others."""
    with_grad = iter(_Exchange.apply(send, send_gradients, *(x for x in parts if x.is_floating_point())))
    others = iter(send([x for x in parts if not x.is_floating_point()]))
    return [next(with_grad if x.is_floating_point() else others) for x in parts]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, send: Send, send_gradients: Send, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.send_gradients = send_gradients
        # the same memory as tensors of their own: a view that a function's forward returns, nobody may change in place,
        # and models do, as where they clamp queries
        return tuple(x.data for x in send(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.send_gradients(grads)
