"""The grouped GEMM with autograd."""

from typing import Any

import torch
from torch import Tensor

from grouped_gemm import backend


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return backend.gmm(a, b, batch_sizes, trans_b=trans_b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b, batch_sizes = ctx.saved_tensors
        grad = grad.contiguous()
        lhs, rhs = (grad, a) if ctx.trans_b else (a, grad)
        grad_a = backend.gmm(grad, b, batch_sizes, trans_b=not ctx.trans_b)
        return grad_a, backend.gmm(lhs, rhs, batch_sizes, trans_a=True), None, None


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    return _GroupedGemm.apply(a, b, batch_sizes, trans_b)
