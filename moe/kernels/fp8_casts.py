"""Casts to fp8 (float8_e4m3) with one scale per row, of matrices and of the rows of each expert; and on a CPU the
products of what was cast.

Scales are powers of two, by which nothing is rounded (see `moe.kernels.fp8`).

Shape suffixes: R rows, P rows with padding, e experts on this rank, K the width summed over, N the other width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..util.gpu import takes_triton
from .expert_rows import read_counts, runs

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


def cast_rows(x: Tensor, largest: Tensor | None = None) -> Scaled:
    """Cast (..., n, k), to be summed over k.

    Args:
        largest: of each row, as `largest_of_rows` has it, where k is a part of what is summed over.
    """
    if takes_triton(x):
        from .fp8_triton import fused_rows

        codes, scales = fused_rows(x.flatten(0, -2).contiguous(), largest)
        return Scaled(codes.view(x.shape), scales.view(x.shape[:-1]))
    return plain_rows(x, largest)


def cast_columns(weight_eKN: Tensor, largest_eN: Tensor | None = None) -> Scaled:
    """Cast each expert's matrix, to be summed over K: (e, N, K).

    Args:
        largest_eN: of each column, as `largest_of_rows` has it of the transpose, where K is a part of what is summed
            over.
    """
    if takes_triton(weight_eKN):
        from .fp8_triton import fused_columns

        return Scaled(*fused_columns(weight_eKN.contiguous(), largest_eN))
    return plain_rows(weight_eKN.transpose(1, 2), largest_eN)


def largest_of_rows(x: Tensor) -> Tensor:
    """The largest absolute value of each row of (..., n, k), by which it is scaled, as the bits of an fp32 value: int32
    (..., n), of the values' order; greater than all others where a value is NaN."""
    # one pass over what may be a transposed view; NaN comes with any sign
    return torch.linalg.vector_norm(x, math.inf, dim=-1).float().abs().view(torch.int32)


def cast_runs(x_RN: Tensor, padded: Runs) -> Scaled:
    """Cast rows, to be summed over expert by expert: (N, P)."""
    if takes_triton(x_RN):
        from .fp8_triton import fused_runs

        return Scaled(*fused_runs(x_RN.contiguous(), padded.ends_e, padded.padded_ends_e, padded.num_padded))
    return plain_runs(x_RN, padded)


def plain_rows(x: Tensor, largest: Tensor | None = None) -> Scaled:
    """Cast (..., n, k) with a scale for each of n: the least power of two that brings all values within fp8's range."""
    if largest is None:
        largest = largest_of_rows(x)
    # the exponent, one more if the fraction is above that of 448 = 1.75 · 2^8, less 8
    exponent = (((largest + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    scales = (exponent << 23).view(torch.float32)
    one_over = ((254 - exponent) << 23).view(torch.float32)
    codes = (x.float() * one_over.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return Scaled(codes.contiguous(), scales)


def plain_runs(x_RN: Tensor, padded: Runs) -> Scaled:
    """`cast_runs` in torch's own operations."""
    counts, padded_counts = (
        read_counts(ends_e.diff(prepend=ends_e.new_zeros(1)), rows)
        for ends_e, rows in ((padded.ends_e, x_RN.shape[0]), (padded.padded_ends_e, padded.num_padded))
    )
    parts = [
        plain_rows(F.pad(x_RN[rows].t(), (0, padded_count - (rows.stop - rows.start))))
        for rows, padded_count in zip(runs(counts), padded_counts, strict=True)
    ]
    unused = x_RN.new_zeros(x_RN.shape[1], padded.num_padded - sum(padded_counts)).to(torch.float8_e4m3fn)
    return Scaled(torch.cat([*(part.codes for part in parts), unused], dim=1), torch.stack([p.scales for p in parts]))


def plain_multiply(a: Scaled, b: Scaled, ends_e: Tensor) -> Tensor:
    """Expert by expert a · bᵀ in fp32, rounded once to bf16: what a GPU's matmul in fp8 gives."""
    places = runs(ends_e.diff(prepend=ends_e.new_zeros(1)).tolist())
    if b.codes.dim() == 3:
        out_RN = a.codes.new_empty(a.codes.shape[0], b.codes.shape[1], dtype=torch.bfloat16)
        for expert, rows in enumerate(places):
            product = a.codes[rows].float() @ b.codes[expert].float().t()
            out_RN[rows] = product.mul_(a.scales[rows].unsqueeze(1)).mul_(b.scales[expert])
        return out_RN
    out_eMN = a.codes.new_empty(len(places), a.codes.shape[0], b.codes.shape[0], dtype=torch.bfloat16)
    for expert, rows in enumerate(places):
        product = a.codes[:, rows].float() @ b.codes[:, rows].float().t()
        out_eMN[expert] = product.mul_(a.scales[expert].unsqueeze(1)).mul_(b.scales[expert])
    return out_eMN
