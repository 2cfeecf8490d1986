"""Matrix products on a CPU by oneDNN where torch would take MKL, which runs at half oneDNN's speed on AMD's processors.

The results differ in rounding alone.

Shape suffixes: M, K, N of a product a_MK · b_KN.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe.padding import padded_rows

SMALL = 2**21
"""Below so many multiplications a call of oneDNN costs more than it gains."""


def matmul(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None) -> Tensor:
    """a_MK @ b_KN, written into `out_MN` (of any dtype) where that is given; without a gradient. Transposed views cost
    no copy."""
    if suits_onednn(a_MK, b_KN):
        product = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
    elif out_MN is not None and out_MN.dtype == a_MK.dtype:
        return torch.mm(a_MK, b_KN, out=out_MN)
    else:
        product = a_MK @ b_KN
    return product if out_MN is None else out_MN.copy_(product)


def pad_rows(x_MK: Tensor) -> Tensor:
    """With a few rows of zeros more (from 512 rows on, less than a sixteenth), so that batches of all lengths have few
    different ones: oneDNN compiles code for each length it meets, which takes longer than a small product."""
    num_rows = len(x_MK)
    if x_MK.device.type != "cpu" or padded_rows(num_rows) == num_rows:
        return x_MK
    return F.pad(x_MK, (0, 0, 0, padded_rows(num_rows) - num_rows))


def suits_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    is_fp32_on_cpu = a_MK.device.type == "cpu" and a_MK.dtype == torch.float32
    has_onednn = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return is_fp32_on_cpu and a_MK.numel() * b_KN.shape[1] >= SMALL and has_onednn


class Linear(nn.Linear):
    """An nn.Linear without bias whose products on a CPU are those of `matmul`, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        out_MN: Tensor = _LinearFunction.apply(x.flatten(0, -2), self.weight)
        return out_MN.unflatten(0, x.shape[:-1])


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return matmul(pad_rows(x_MK), weight_NK.t())[: len(x_MK)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, weight_NK = ctx.saved_tensors
        x_needs, weight_needs = ctx.needs_input_grad
        padded_MN = pad_rows(grad_MN)
        grad_x_MK = matmul(padded_MN, weight_NK)[: len(x_MK)] if x_needs else None
        grad_weight_NK = matmul(padded_MN.t(), pad_rows(x_MK)) if weight_needs else None
        return grad_x_MK, grad_weight_NK


def use_linear(module: nn.Module) -> None:
    """Make every nn.Linear without bias in `module` a `Linear`, in place: parameters and their names stay."""
    for child in module.modules():
        if type(child) is nn.Linear and child.bias is None:
            child.__class__ = Linear
