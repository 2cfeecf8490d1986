"""The experts' products in fp8 (float8_e4m3), with a scale a row: by data sheets at twice the rate of bf16.

Both operands of a product are rounded to fp8, and what is summed up together has one scale:

    x · Wᵀ      a row of x, and a row of each expert's W
    grad · W    a row of grad, and a column of each expert's W
    gradᵀ · x   of each expert's rows, a column of grad and a column of x

Sums are in fp32, results bf16. Scales are powers of two, by which nothing is rounded: a number becomes the same fp8
number, whatever else its scale is for, unless it is less than 2^-13 of the largest. So forward and backward multiply by
the same weights, and which rows a rank has hardly matters. Gradients are e4m3 too: e5m2 has more range, which a scale a
row makes up for, and half the precision; besides, torch's operator takes nothing else.

On a CPU the same numbers are multiplied in fp32; on a GPU by `torch._scaled_grouped_mm`
(`torch.nn.functional.scaled_grouped_mm` calls another operator, of which torch 2.13 cannot tell the shapes without
running it).

Shape suffixes: R rows, P rows with padding, e experts on this rank, K what is summed up, N the other width, D and F the
model's and the experts'.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.gpu import computes_on_cpu, takes_triton
from moe.grouped import GroupedMatmul
from moe.matmul import matmul, pad_rows
from moe.products import host_counts, runs

MULTIPLE = 16
"""What widths are multiples of, and an expert's rows where they are summed over: 16 bytes, as the operator wants."""

WIDEST = 2**15
"""Of a row: as much as a program of the kernel that casts it holds in its registers."""


@dataclass(frozen=True)
class Scaled:
    """A matrix (n, k), or one for each expert, in fp8, to be summed over k.

    codes: (n, k) or (e, n, k), contiguous. scales: fp32, what codes are multiplied by: (n,) or (e, n). Of rows that are
    summed over, codes are (n, P), expert by expert, and scales (e, n).
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Runs:
    """Where each expert's rows end, as they are, and with zeros after them; int32. An expert without rows has zeros
    alone: the operator has no sum over nothing. num_padded: all of them, and some more: the host does not know."""

    ends_e: Tensor
    padded_ends_e: Tensor
    num_padded: int


def padded_runs(counts_e: Tensor, num_rows: int) -> Runs:
    padded_e = ((counts_e + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE).clamp(min=MULTIPLE)
    num_padded = -(-num_rows // MULTIPLE) * MULTIPLE + MULTIPLE * counts_e.numel()
    return Runs(counts_e.cumsum(0, dtype=torch.int32), padded_e.cumsum(0, dtype=torch.int32), num_padded)


def fp8_products(counts_e: Tensor, num_rows: int) -> GroupedMatmul:
    """Products of bf16 in fp8, with bf16 results, as `moe.grouped` calls them; without a wait for the device."""
    padded = padded_runs(counts_e, num_rows)

    def cast(rows: Tensor, trans_a: bool) -> Scaled:
        return cast_runs(rows, padded) if trans_a else cast_rows(rows)

    def gmm(a: Tensor | Scaled, b: Tensor | Scaled, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        if isinstance(a, Tensor):
            a = cast(a, trans_a)
        if isinstance(b, Tensor):
            b = cast(b, trans_a) if trans_a else cast_rows(b) if trans_b else cast_columns(b)
        return _multiply(a, b, padded.padded_ends_e if trans_a else padded.ends_e)

    return GroupedMatmul(gmm, cast)


def cast_rows(x: Tensor) -> Scaled:
    """(..., n, k), to be summed over k."""
    if takes_triton(x):
        from moe.fp8_triton import fused_rows

        codes, scales = fused_rows(x.flatten(0, -2).contiguous())
        return Scaled(codes.view(x.shape), scales.view(x.shape[:-1]))
    return plain_rows(x)


def cast_columns(weight_eKN: Tensor) -> Scaled:
    """Each expert's matrix, to be summed over K: (e, N, K)."""
    if takes_triton(weight_eKN):
        from moe.fp8_triton import fused_columns

        return Scaled(*fused_columns(weight_eKN.contiguous()))
    return plain_rows(weight_eKN.transpose(1, 2))


def cast_runs(x_RN: Tensor, padded: Runs) -> Scaled:
    """Rows, to be summed over expert by expert: (N, P)."""
    if takes_triton(x_RN):
        from moe.fp8_triton import fused_runs

        return Scaled(*fused_runs(x_RN.contiguous(), padded.ends_e, padded.padded_ends_e, padded.num_padded))
    return plain_runs(x_RN, padded)


def plain_rows(x: Tensor) -> Scaled:
    """(..., n, k) with a scale for each of n: the least power of two that brings all numbers within fp8's."""
    largest = x.abs().amax(dim=-1).float()
    # in an fp32 number's bits: the exponent, one more if the fraction is above that of 448 = 1.75 · 2^8, less 8
    exponent = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    scales = (exponent << 23).view(torch.float32)
    one_over = ((254 - exponent) << 23).view(torch.float32)
    codes = (x.float() * one_over.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return Scaled(codes.contiguous(), scales)


def plain_runs(x_RN: Tensor, padded: Runs) -> Scaled:
    """As `cast_runs`."""
    counts, padded_counts = (
        host_counts(ends_e.diff(prepend=ends_e.new_zeros(1)), rows)
        for ends_e, rows in ((padded.ends_e, x_RN.shape[0]), (padded.padded_ends_e, padded.num_padded))
    )
    parts = [
        plain_rows(F.pad(x_RN[rows].t(), (0, padded_count - (rows.stop - rows.start))))
        for rows, padded_count in zip(runs(counts), padded_counts, strict=True)
    ]
    unused = x_RN.new_zeros(x_RN.shape[1], padded.num_padded - sum(padded_counts)).to(torch.float8_e4m3fn)
    return Scaled(torch.cat([*(part.codes for part in parts), unused], dim=1), torch.stack([p.scales for p in parts]))


def _multiply(a: Scaled, b: Scaled, ends_e: Tensor) -> Tensor:
    """Expert by expert a · bᵀ, in bf16: of rows (R, k) and matrices (e, n, k), cut at ends_e, (R, n); of (m, P) and
    (n, P), (e, m, n)."""
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


def plain_multiply(a: Scaled, b: Scaled, ends_e: Tensor) -> Tensor:
    """As `_multiply`, in fp32 and rounded once."""
    places = runs(ends_e.diff(prepend=ends_e.new_zeros(1)).tolist())
    if b.codes.dim() == 3:
        out_RN = a.codes.new_empty(a.codes.shape[0], b.codes.shape[1], dtype=torch.bfloat16)
        for expert, rows in enumerate(places):
            product = matmul(pad_rows(a.codes[rows].float()), b.codes[expert].float().t())[: rows.stop - rows.start]
            out_RN[rows] = product.mul_(a.scales[rows].unsqueeze(1)).mul_(b.scales[expert])
        return out_RN
    out_eMN = a.codes.new_empty(len(places), a.codes.shape[0], b.codes.shape[0], dtype=torch.bfloat16)
    for expert, rows in enumerate(places):
        product = matmul(a.codes[:, rows].float(), b.codes[:, rows].float().t())
        out_eMN[expert] = product.mul_(a.scales[expert].unsqueeze(1)).mul_(b.scales[expert])
    return out_eMN
