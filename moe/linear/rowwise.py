"""Linear layers whose weight is held transposed: those that tensor parallelism divides by their inputs.

So every parameter, of whatever layer, is divided along its dim 0, over whatever axes of ranks. They lie so without
tensor parallelism too: checkpoints, and what optimizers compute of blocks of rows, are then the same with any layout.

Shape suffixes: M rows of the input, K the layer's input width, N its output width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..cpu.matmul import matmul, pad_rows, padded_matmul
from ..util.gpu import computes_on_cpu


class RowwiseLinear(nn.Linear):
    """An nn.Linear with weight_KN, (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        out = rowwise_product(x, self.weight)
        return out if self.bias is None else out + self.bias


def hold_transposed(linear: Any) -> None:
    """Make an nn.Linear on the meta device a `RowwiseLinear`, in place; the parameter's name stays."""
    weight_NK = linear.weight
    assert weight_NK.is_meta
    linear.__class__ = RowwiseLinear
    linear.weight = nn.Parameter(weight_NK.detach().t().contiguous(), requires_grad=weight_NK.requires_grad)


def rowwise_product(x: Tensor, weight_KN: Tensor) -> Tensor:
    """x (..., K) · weight_KN."""
    if not computes_on_cpu(x) or torch.compiler.is_compiling():
        return x @ weight_KN
    out_MN: Tensor = _RowwiseProduct.apply(x.flatten(0, -2), weight_KN)
    return out_MN.unflatten(0, x.shape[:-1])


class _RowwiseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_KN: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_KN)
        return padded_matmul(x_MK, weight_KN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, weight_KN = ctx.saved_tensors
        x_needs, weight_needs = ctx.needs_input_grad
        padded_MN = pad_rows(grad_MN)
        grad_x_MK = matmul(padded_MN, weight_KN.t())[: len(x_MK)] if x_needs else None
        grad_weight_KN = matmul(pad_rows(x_MK).t(), padded_MN) if weight_needs else None
        return grad_x_MK, grad_weight_KN
