"""SwiGLU, silu(gate) * up: the activation between the two halves of an expert, forward and backward.

In one Triton kernel each on a GPU, else in plain torch. Both compute in fp32 and round once, to the inputs' dtype.

With `weights_R` the result is multiplied by a weight for each row, before it is rounded (see `moe.kernels.weighing`).

Shape suffixes: R rows, F expert width, G = 2·F: gate, then up. Where gate and up are two tensors, and rows have no
weights, any shape works, as long as all tensors have the same and are contiguous.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..util.gpu import takes_triton
from ..util.step_parts import register_step_part

register_step_part(__name__, "experts' activation")


def swiglu_forward(gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """silu(gate) * up, not recorded by autograd on a GPU: for use inside an autograd function. Gate and up may also be
    the halves of one (R, G)."""
    if takes_triton(gate_RF):
        from .swiglu_triton import fused_forward

        return fused_forward(gate_RF, up_RF, weights_R)
    return plain_forward(gate_RF, up_RF, weights_R)


def swiglu_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up; the result of forward recomputed, so that it need not be kept; and the weights'
    gradient, if rows have weights."""
    if takes_triton(gate_RF):
        from .swiglu_triton import fused_backward

        return fused_backward(grad_RF, gate_RF, up_RF, weights_R)
    return plain_backward(grad_RF, gate_RF, up_RF, weights_R)


def swiglu_joined_backward(
    grad_RF: Tensor, gate_up_RG: Tensor, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`swiglu_backward` of gate and up in one tensor: their gradients in one, (R, G), and the others."""
    if takes_triton(gate_up_RG):
        from .swiglu_triton import fused_joined_backward

        return fused_joined_backward(grad_RF, gate_up_RG, weights_R)
    gate_RF, up_RF = gate_up_RG.chunk(2, dim=1)
    *d_gate_and_up, hidden_RF, d_weights_R = plain_backward(grad_RF, gate_RF, up_RF, weights_R)
    return torch.cat(d_gate_and_up, dim=1), hidden_RF, d_weights_R


class SwiGLU(Function):
    """silu(gate) * up, which keeps only gate and up for backward, and the rows' weights, which may be None."""

    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF, weights_R)
        return swiglu_forward(gate_RF, up_RF, weights_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        d_gate_RF, d_up_RF, _, d_weights_R = swiglu_backward(grad_RF.contiguous(), *ctx.saved_tensors)
        return d_gate_RF, d_up_RF, d_weights_R


def plain_forward(gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """`swiglu_forward` in torch's own operations."""
    hidden = F.silu(gate_RF.float()) * up_RF.float()
    if weights_R is not None:
        hidden *= weights_R.float().unsqueeze(1)
    return hidden.to(gate_RF.dtype)


def plain_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`swiglu_backward` in torch's own operations."""
    grad, gate, up = grad_RF.float(), gate_RF.float(), up_RF.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    hidden, d_weights_R = silu * up, None
    if weights_R is not None:
        d_weights_R = (grad * hidden).sum(dim=1).to(weights_R.dtype)
        weight_R1 = weights_R.float().unsqueeze(1)
        grad, hidden = grad * weight_R1, hidden * weight_R1
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    dtype = gate_RF.dtype
    return d_gate.to(dtype), (grad * silu).to(dtype), hidden.to(dtype), d_weights_R
