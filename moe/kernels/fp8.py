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

from functools import partial

import torch
from torch import Tensor

from ..util.errors import ExpertMeshError
from ..util.gpu import computes_on_cpu
from ..util.step_parts import register_step_part
from .carve_out import leaving_room
from .expert_products import grouped_product
from .expert_rows import ExpertRows
from .fp8_casts import MULTIPLE, WIDEST, Scaled, cast_columns, cast_rows, cast_runs, padded_runs, plain_multiply
from .grouped import GroupedMatmul, check_rows, grouped_mlp
from .kernel_entries import KernelEntry, check_beside_fp8
from .kernel_registry import ExpertKernel, KernelNeeds

register_step_part(__name__, "expert GEMMs")

_FP8 = "--expert-precision fp8"


def fp8_grouped(
    rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """A complete expert at once, without a wait for the device.

    Raises:
        ExpertMeshError: on a GPU R times D or F reaches 2^31.
    """
    check_rows(rows_RD, w1.shape[0] // experts.num_experts, _FP8)
    return grouped_mlp(rows_RD, experts, (w1, v1), w2, fp8_products(experts), needs_output)


def fp8_grouped_product(x_RI: Tensor, experts: ExpertRows, weight_eOI: Tensor) -> Tensor:
    """A single product in fp8 (see `fp8_grouped`)."""
    check_rows(x_RI, weight_eOI.shape[1], _FP8)
    return grouped_product(x_RI, experts, weight_eOI, fp8_products(experts))


def fp8_products(experts: ExpertRows) -> GroupedMatmul:
    """Matmuls of bf16 tensors in fp8, with bf16 results, for `moe.kernels.grouped`; without a wait for the device."""
    padded = padded_runs(experts.counts_e, experts.num_rows)

    def cast(rows: Tensor, trans_a: bool) -> Scaled:
        return cast_runs(rows, padded) if trans_a else cast_rows(rows)

    def gmm(a: Tensor | Scaled, b: Tensor | Scaled, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        if isinstance(a, Tensor):
            a = cast(a, trans_a)
        if isinstance(b, Tensor):
            b = cast(b, trans_a) if trans_a else cast_rows(b) if trans_b else cast_columns(b)
        return _multiply(a, b, padded.padded_ends_e if trans_a else padded.ends_e)

    return GroupedMatmul(leaving_room(gmm, experts.is_beside), cast)


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


def check_fp8(name: str, needs: KernelNeeds) -> None:
    """
    Raises:
        ExpertMeshError: these experts cannot be computed in fp8 here, or not by `--expert-kernel name`.
    """
    check_beside_fp8(name)
    if needs.dtype != torch.bfloat16:
        raise ExpertMeshError(f"{_FP8}: everything else is computed in bf16; add --bf16")
    for width in (width for pair in needs.widths for width in pair):
        if width % MULTIPLE or width > WIDEST:
            raise ExpertMeshError(
                f"{_FP8}: hidden and expert width must be multiples of {MULTIPLE} up to {WIDEST}; this "
                f"model has {width}; leave the flag out"
            )
    if needs.device_type == "cuda" and needs.capability[0] != 9:
        # the operator lets 10 pass too, and then ends the process: it is built for 9 alone (pytorch#187095)
        raise ExpertMeshError(
            f"{_FP8}: needs a GPU of compute capability 9 (H100, H200); this one has "
            f"{'.'.join(map(str, needs.capability))}; leave it out"
        )


FP8 = KernelEntry(
    "fp8",
    how="Grouped GEMMs with one scale per row.",
    where="a GPU of compute capability 9; emulated on a CPU",
    beside_fp8=True,
    keeps_products=True,
    recorded_as="fp8",
    implementation=ExpertKernel(
        product=fp8_grouped_product,
        fused=fp8_grouped,
        joined=None,
        weighs=True,
        gathers=False,
        low_rank=None,
        check=partial(check_fp8, "auto"),
        auto=lambda needs: None,
        note=lambda needs: "",
    ),
)
"""What `--expert-precision fp8` takes, and no name."""
