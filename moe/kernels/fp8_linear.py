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
from expertmesh.moe.model.rowwise import RowwiseLinear

STEP_PART: StepPart = None


class FP8Linear(nn.Linear):
    """An nn.Linear that multiplies bf16 inputs and weights in fp8; of other dtypes, as nn.Linear does."""

    def forward(self, x: Tensor) -> Tensor:
        return _multiplied(self, x, is_transposed=False) if _is_rounded(x) else super().forward(x)


class FP8RowwiseLinear(RowwiseLinear):
    """The same of one whose weight is held transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return _multiplied(self, x, is_transposed=True) if _is_rounded(x) else super().forward(x)


def _is_rounded(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.numel() > 0


def _multiplied(layer: nn.Linear, x: Tensor, is_transposed: bool) -> Tensor:
    out_MN: Tensor = _FP8Linear.apply(x.flatten(0, -2), layer.weight, is_transposed)
    out = out_MN.unflatten(0, x.shape[:-1])
    return out if layer.bias is None else out + layer.bias


def suits_fp8(weight: Tensor) -> bool:
    """Whether the widths of a linear layer are what matmuls in fp8 take."""
    return all(width % MULTIPLE == 0 and width <= WIDEST for width in weight.shape)


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight: Tensor, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(x_MK, weight)
        ctx.is_transposed = is_transposed
        return _multiply(cast_rows(x_MK), _summed_over(0 if is_transposed else 1, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_MK, weight = ctx.saved_tensors
        x_needs, weight_needs, _ = ctx.needs_input_grad
        grad_MN = grad_MN.contiguous()
        grad_x_MK = grad_weight = None
        if x_needs:
            grad_x_MK = _multiply(cast_rows(grad_MN), _summed_over(1 if ctx.is_transposed else 0, weight))
        if weight_needs:
            rows = _one_run(len(x_MK), x_MK.device)
            factors = (x_MK, grad_MN) if ctx.is_transposed else (grad_MN, x_MK)
            a, b = (cast_runs(each, rows) for each in factors)
            grad_weight = _multiply(Scaled(a.codes, a.scales[0]), Scaled(b.codes, b.scales[0]))
        return grad_x_MK, grad_weight, None


def _summed_over(dim: int, weight: Tensor) -> Scaled:
    """A weight cast to be summed over one of its dims, with a scale for each place in the other."""
    if dim == 1:
        return cast_rows(weight)
    columns = cast_columns(weight.unsqueeze(0))
    return Scaled(columns.codes[0], columns.scales[0])


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
