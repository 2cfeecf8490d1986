"""The experts' matmuls in fp8 (float8_e4m3), with one scale per row: by data sheets at twice the rate of bf16.

Both operands of a matmul are rounded to fp8, and what is summed up together has one scale:

    x · Wᵀ      a row of x, and a row of each expert's W
    grad · W    a row of grad, and a column of each expert's W
    gradᵀ · x   of each expert's rows, a column of grad and a column of x

Sums are in fp32, results bf16. Scales are powers of two, by which nothing is rounded: a value becomes the same fp8
value, whatever shares its scale, unless it is less than 2^-13 of the largest. So forward and backward multiply by the
same weights, and which rows a rank has hardly matters. Gradients are e4m3 too: e5m2 has more range, which a scale per
row makes up for, and half the precision; besides, torch's operator takes nothing else.

On a CPU the same values are multiplied in fp32; on a GPU by `torch._scaled_grouped_mm`
(`torch.nn.functional.scaled_grouped_mm` calls another operator, of which torch 2.13 cannot tell the shapes without
running it).

Shape suffixes: R rows, P rows with padding, e experts on this rank, K the width summed over, N the other width, D and F
the model's and the experts'.
"""

import torch
from torch import Tensor

from ..util.gpu import computes_on_cpu
from .carve_out import leaving_room
from .fp8_casts import Scaled, cast_columns, cast_rows, cast_runs, padded_runs, plain_multiply
from .grouped import GroupedMatmul


def fp8_products(counts_e: Tensor, num_rows: int) -> GroupedMatmul:
    """Matmuls of bf16 tensors in fp8, with bf16 results, for `moe.kernels.grouped`; without a wait for the device."""
    padded = padded_runs(counts_e, num_rows)

    def cast(rows: Tensor, trans_a: bool) -> Scaled:
        return cast_runs(rows, padded) if trans_a else cast_rows(rows)

    def gmm(a: Tensor | Scaled, b: Tensor | Scaled, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        if isinstance(a, Tensor):
            a = cast(a, trans_a)
        if isinstance(b, Tensor):
            b = cast(b, trans_a) if trans_a else cast_rows(b) if trans_b else cast_columns(b)
        return _multiply(a, b, padded.padded_ends_e if trans_a else padded.ends_e)

    return GroupedMatmul(leaving_room(gmm), cast)


def _multiply(a: Scaled, b: Scaled, ends_e: Tensor) -> Tensor:
    """Expert by expert a · bᵀ, in bf16: for rows (R, k), split at ends_e, and matrices (e, n, k), (R, n); for (m, P)
    and (n, P), (e, m, n)."""
    if computes_on_cpu(a.codes):
        return plain_multiply(a, b, ends_e)
    # tensor cores' own sums have fewer bits than fp32: without `use_fast_accum` they are added up in fp32 on the way
    product: Tensor = torch._scaled_grouped_mm(
        a.codes,
        b.codes.transpose(-2, -1),
        a.scales.flatten(),
        b.scales.flatten() if b.codes.dim() == 2 else b.scales,
        offs=ends_e,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product
