"""Matmuls of linear layers in fp8, forward and backward, rounded as the experts' are (see `moe.kernels.fp8`).

On a GPU by `torch._scaled_mm` with a scale for each row of either operand, from compute capability 9 on; on a CPU the
same values are multiplied in fp32.

Where ranks divide a layer (`Division`), what each rounds is what one process would round: of a matmul that sums over
what is divided, each rank has a part of every row, and they agree on the largest value of each.

Shape suffixes: M rows, m of them on this rank, K the layer's input width, N its output width, R what is summed over, of
which this rank may have a part, C the other width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.fp8_casts import (
    MULTIPLE,
    WIDEST,
    Runs,
    Scaled,
    cast_columns,
    cast_rows,
    cast_runs,
    largest_of_rows,
    plain_multiply,
)
from ..util.gpu import computes_on_cpu
from .division import DividingRanks, Division


def fp8_product(x: Tensor, weight: Tensor, is_transposed: bool, division: Division | None) -> Tensor:
    """x · Wᵀ of bf16 tensors in fp8; x · W of a weight that is held transposed."""
    out_MN: Tensor = _FP8Product.apply(x.flatten(0, -2), weight, is_transposed, division)
    return out_MN.unflatten(0, x.shape[:-1])


def suits_rows(x: Tensor) -> bool:
    """Whether an input is one that is multiplied in fp8."""
    return x.dtype == torch.bfloat16 and x.numel() > 0


def suits_fp8(weight: Tensor) -> bool:
    """Whether the widths of a linear layer are what matmuls in fp8 take."""
    return all(width % MULTIPLE == 0 and width <= WIDEST for width in weight.shape)


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight: Tensor, is_transposed: bool, division: Division | None) -> Tensor:
        ctx.save_for_backward(x_MK, weight)
        ctx.is_transposed, ctx.division = is_transposed, division
        if division is not None and division.of == "inputs":
            return _multiply_parts(x_MK, weight, division.ranks)
        return _multiply(cast_rows(x_MK), _summed_over(0 if is_transposed else 1, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_MK, weight = ctx.saved_tensors
        division: Division | None = ctx.division
        if division is None or division.of != "nothing":
            return *_gradients(ctx, x_MK, weight, grad_MN.contiguous()), None, None
        # it is the sum that is to be rounded: each rank has that of some of the rows, and nothing of the others
        rows, group = len(x_MK), division.ranks
        # of samples that are computed one by one there may be any number
        padding = (0, 0, 0, -rows % group.size)
        mine_mN = group.sum_scatter(F.pad(grad_MN, padding), 0)
        x_MK = F.pad(x_MK, padding)
        grad_x_mK, grad_weight = _gradients(ctx, group.mine(x_MK), weight, mine_mN)
        if grad_x_mK is None:
            return None, grad_weight, None, None
        grad_x_MK = torch.zeros_like(x_MK)
        group.mine(grad_x_MK).copy_(grad_x_mK)
        return grad_x_MK[:rows], grad_weight, None, None


def _gradients(ctx: Any, x_MK: Tensor, weight: Tensor, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Those of the input and of the weight, where they are needed."""
    x_needs, weight_needs, *_ = ctx.needs_input_grad
    division: Division | None = ctx.division
    grad_x_MK = grad_weight = None
    if x_needs and division is not None and division.of == "outputs":
        grad_x_MK = _multiply_parts(grad_MN, weight, division.ranks)
    elif x_needs:
        grad_x_MK = _multiply(cast_rows(grad_MN), _summed_over(1 if ctx.is_transposed else 0, weight))
    if weight_needs:
        rows = _one_run(len(x_MK), x_MK.device)
        factors = (x_MK, grad_MN) if ctx.is_transposed else (grad_MN, x_MK)
        a, b = (cast_runs(each, rows) for each in factors)
        grad_weight = _multiply(Scaled(a.codes, a.scales[0]), Scaled(b.codes, b.scales[0]))
    return grad_x_MK, grad_weight


def _multiply_parts(x_MR: Tensor, weight_RC: Tensor, ranks: DividingRanks) -> Tensor:
    """This rank's summand of a matmul that sums over R, which is divided: both operands are rounded by the largest
    value that any rank has in a row or column. What is divided of a weight is its dim 0, however it is held."""
    columns_1RC = weight_RC.unsqueeze(0)
    largest = torch.cat([largest_of_rows(weight_RC.t()), largest_of_rows(x_MR)])
    of_columns_C, of_rows_M = ranks.all_reduce_max(largest).split([weight_RC.shape[1], len(x_MR)])
    columns = cast_columns(columns_1RC, of_columns_C.unsqueeze(0))
    return _multiply(cast_rows(x_MR, of_rows_M), Scaled(columns.codes[0], columns.scales[0]))


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
