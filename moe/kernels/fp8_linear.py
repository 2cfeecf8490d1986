"""Linear layers whose matmuls run in fp8, forward and backward, rounded as the experts' are (see `moe.kernels.fp8`).

On a GPU by `torch._scaled_mm` with a scale for each row of either operand, from compute capability 9 on; on a CPU the
same values are multiplied in fp32.

Shape suffixes: M rows, K the layer's input width, N its output width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from expertmesh.moe.base.declared import StepPart
from expertmesh.moe.kernels.fp8_casts import (
    MULTIPLE,
    WIDEST,
    Runs,
    Scaled,
    cast_columns,
    cast_rows,
    cast_runs,
    plain_multiply,
)
from expertmesh.moe.kernels.gpu import computes_on_cpu

STEP_PART: StepPart = None


class FP8Linear(nn.Linear):
    """An nn.Linear that multiplies bf16 inputs and weights in fp8; of other dtypes, as nn.Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or x.numel() == 0:
            return super().forward(x)
        out_MN: Tensor = _FP8Linear.apply(x.flatten(0, -2), self.weight)
        out = out_MN.unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


def suits_fp8(weight_NK: Tensor) -> bool:
    """Whether the widths of a linear layer are what matmuls in fp8 take."""
    return all(width % MULTIPLE == 0 and width <= WIDEST for width in weight_NK.shape)


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return _multiply(cast_rows(x_MK), cast_rows(weight_NK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, weight_NK = ctx.saved_tensors
        x_needs, weight_needs = ctx.needs_input_grad
        grad_MN = grad_MN.contiguous()
        grad_x_MK = grad_weight_NK = None
        if x_needs:
            weight_KN = cast_columns(weight_NK.unsqueeze(0))
            grad_x_MK = _multiply(cast_rows(grad_MN), Scaled(weight_KN.codes[0], weight_KN.scales[0]))
        if weight_needs:
            rows = _one_run(len(x_MK), x_MK.device)
            grad, x = (cast_runs(each, rows) for each in (grad_MN, x_MK))
            grad_weight_NK = _multiply(Scaled(grad.codes, grad.scales[0]), Scaled(x.codes, x.scales[0]))
        return grad_x_MK, grad_weight_NK


def _one_run(num_rows: int, device: torch.device) -> Runs:
    """All rows as one expert's, padded as `cast_runs` wants it."""
    num_padded = -(-num_rows // MULTIPLE) * MULTIPLE
    end, padded_end = (torch.full((1,), last, dtype=torch.int32, device=device) for last in (num_rows, num_padded))
    return Runs(end, padded_end, num_padded)


def _multiply(a: Scaled, b: Scaled) -> Tensor:
    """a · bᵀ in bf16, of (m, k) and (n, k)."""
    if computes_on_cpu(a.codes):
        ends = torch.tensor([len(a.codes)], dtype=torch.int32, device=a.codes.device)
        return plain_multiply(a, Scaled(b.codes.unsqueeze(0), b.scales.unsqueeze(0)), ends)
    # tensor cores' own sums have fewer bits than fp32: without `use_fast_accum` they are added up in fp32 on the way
    product: Tensor = torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scales.unsqueeze(1),
        scale_b=b.scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product
