"""A row's weight, applied to what an expert computes between its matmuls: w · (h @ W2) is (w · h) @ W2.

Where a token's results are summed on the rank of their experts (see `moe.dispatch.dedup`), they are then ready to be
added up, and nothing later needs them: the weight's gradient is made of hidden values, which backward has, and not of
results, which would be kept or computed again, D numbers for each row. Megatron-LM does the same
(`weighted_bias_swiglu_impl`). A bias of the second matmul would have to be weighed too; experts with biases have their
results weighed.

`moe.kernels.swiglu` does it in its own pass; here it is one of its own, for other activations.

Shape suffixes: R rows, F expert width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..util.gpu import takes_triton
from ..util.step_parts import register_step_part

register_step_part(__name__, "experts' activation")


class WeighRows(Function):
    """Each row of hidden_RF times its weight, computed in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, hidden_RF: Tensor, weights_R: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_RF, weights_R)
        return weighed(hidden_RF, weights_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor]:
        return weighed_backward(grad_RF, *ctx.saved_tensors)


def weighed(hidden_RF: Tensor, weights_R: Tensor) -> Tensor:
    """Each row times its weight."""
    if takes_triton(hidden_RF):
        from .weighing_triton import fused_weighed

        return fused_weighed(hidden_RF.contiguous(), weights_R)
    return plain_weighed(hidden_RF, weights_R)


def weighed_backward(grad_RF: Tensor, hidden_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights, the latter summed in fp32."""
    if takes_triton(hidden_RF):
        from .weighing_triton import fused_weighed_backward

        return fused_weighed_backward(grad_RF.contiguous(), hidden_RF.contiguous(), weights_R)
    return plain_weighed_backward(grad_RF, hidden_RF, weights_R)


def plain_weighed(hidden_RF: Tensor, weights_R: Tensor) -> Tensor:
    """`weighed` in torch's own operations."""
    return (hidden_RF * weights_R.unsqueeze(1)).to(hidden_RF.dtype)


def plain_weighed_backward(grad_RF: Tensor, hidden_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    """`weighed_backward` in torch's own operations."""
    wide = torch.promote_types(hidden_RF.dtype, weights_R.dtype)
    d_weights_R = (grad_RF.to(wide) * hidden_RF).sum(dim=1).to(weights_R.dtype)
    return plain_weighed(grad_RF, weights_R), d_weights_R
