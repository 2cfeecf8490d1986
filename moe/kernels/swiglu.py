"""SwiGLU, silu(gate) * up: the activation between the two halves of an expert, forward and backward.

In one Triton kernel each on a GPU, else in plain torch. Both compute in fp32 and round once, to the inputs' dtype.

Shape suffixes: R rows, F expert width, G = 2·F: gate, then up. Where gate and up are two tensors, any shape works, as
long as all tensors have the same and are contiguous.
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


def swiglu_forward(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """silu(gate) * up, not recorded by autograd on a GPU: for use inside an autograd function. Gate and up may also be
    the halves of one (R, G)."""
    if takes_triton(gate_RF):
        from .swiglu_triton import fused_forward

        return fused_forward(gate_RF, up_RF)
    return plain_forward(gate_RF, up_RF)


def swiglu_backward(grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and silu(gate) * up recomputed, so that it need not be kept."""
    if takes_triton(gate_RF):
        from .swiglu_triton import fused_backward

        return fused_backward(grad_RF, gate_RF, up_RF)
    return plain_backward(grad_RF, gate_RF, up_RF)


def swiglu_joined_backward(grad_RF: Tensor, gate_up_RG: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_backward` of gate and up in one tensor: their gradients in one, (R, G), and silu(gate) * up, (R, F)."""
    if takes_triton(gate_up_RG):
        from .swiglu_triton import fused_joined_backward

        return fused_joined_backward(grad_RF, gate_up_RG)
    *d_gate_and_up, hidden_RF = plain_backward(grad_RF, *gate_up_RG.chunk(2, dim=1))
    return torch.cat(d_gate_and_up, dim=1), hidden_RF


class SwiGLU(Function):
    """silu(gate) * up, which keeps only gate and up for backward."""

    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF)
        return swiglu_forward(gate_RF, up_RF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor]:
        d_gate_RF, d_up_RF, _ = swiglu_backward(grad_RF.contiguous(), *ctx.saved_tensors)
        return d_gate_RF, d_up_RF


def plain_forward(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """`swiglu_forward` in torch's own operations."""
    return (F.silu(gate_RF.float()) * up_RF.float()).to(gate_RF.dtype)


def plain_backward(grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_backward` in torch's own operations."""
    grad, gate, up = grad_RF.float(), gate_RF.float(), up_RF.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.to(gate_RF.dtype), (grad * silu).to(gate_RF.dtype), (silu * up).to(gate_RF.dtype)
