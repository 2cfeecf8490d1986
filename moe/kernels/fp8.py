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

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.moe.base.declared import StepPart
from expertmesh.moe.cpu.matmul import matmul, pad_rows
from expertmesh.moe.kernels.carve_out import leaving_room
from expertmesh.moe.kernels.expert_products import host_counts, runs
from expertmesh.moe.kernels.gpu import computes_on_cpu, takes_triton
from expertmesh.moe.kernels.grouped import GroupedMatmul

STEP_PART: StepPart = "expert GEMMs"

MULTIPLE = 16
"""Widths are multiples of this, and so are an expert's rows where they are summed over: 16 bytes, as the operator
requires."""

WIDEST = 2**15
"""Largest width of a row: as much as a program of the kernel that casts it holds in its registers."""


@dataclass(frozen=True)
class Scaled:
    """A matrix (n, k), or one for each expert, in fp8, to be summed over k.

    codes: (n, k) or (e, n, k), contiguous. scales: fp32, factors of the codes: (n,) or (e, n). For rows that are summed
    over, codes are (n, P), expert by expert, and scales (e, n).
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Runs:
    """Where each expert's rows end, without padding and with zeros after them; int32. An expert without rows has only
    zeros: the operator cannot sum over nothing. num_padded: an upper bound of all padded rows, as the host does not
    know their number."""

    ends_e: Tensor
    padded_ends_e: Tensor
    num_padded: int


def padded_runs(counts_e: Tensor, num_rows: int) -> Runs:
    padded_e = ((counts_e + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE).clamp(min=MULTIPLE)
    num_padded = -(-num_rows // MULTIPLE) * MULTIPLE + MULTIPLE * counts_e.numel()
    return Runs(counts_e.cumsum(0, dtype=torch.int32), padded_e.cumsum(0, dtype=torch.int32), num_padded)


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


def cast_rows(x: Tensor) -> Scaled:
    """Cast (..., n, k), to be summed over k."""
    if takes_triton(x):
        from expertmesh.moe.kernels.fp8_triton import fused_rows

        codes, scales = fused_rows(x.flatten(0, -2).contiguous())
        return Scaled(codes.view(x.shape), scales.view(x.shape[:-1]))
    return plain_rows(x)


def cast_columns(weight_eKN: Tensor) -> Scaled:
    """Cast each expert's matrix, to be summed over K: (e, N, K)."""
    if takes_triton(weight_eKN):
        from expertmesh.moe.kernels.fp8_triton import fused_columns

        return Scaled(*fused_columns(weight_eKN.contiguous()))
    return plain_rows(weight_eKN.transpose(1, 2))


def cast_runs(x_RN: Tensor, padded: Runs) -> Scaled:
    """Cast rows, to be summed over expert by expert: (N, P)."""
    if takes_triton(x_RN):
        from expertmesh.moe.kernels.fp8_triton import fused_runs

        return Scaled(*fused_runs(x_RN.contiguous(), padded.ends_e, padded.padded_ends_e, padded.num_padded))
    return plain_runs(x_RN, padded)


def plain_rows(x: Tensor) -> Scaled:
    """Cast (..., n, k) with a scale for each of n: the least power of two that brings all values within fp8's range."""
    largest = x.abs().amax(dim=-1).float()
    # in an fp32 value's bits: the exponent, one more if the fraction is above that of 448 = 1.75 · 2^8, less 8
    exponent = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    scales = (exponent << 23).view(torch.float32)
    one_over = ((254 - exponent) << 23).view(torch.float32)
    codes = (x.float() * one_over.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return Scaled(codes.contiguous(), scales)


def plain_runs(x_RN: Tensor, padded: Runs) -> Scaled:
    """`cast_runs` in torch's own operations."""
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


def plain_multiply(a: Scaled, b: Scaled, ends_e: Tensor) -> Tensor:
    """`_multiply` in fp32, rounded once."""
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
