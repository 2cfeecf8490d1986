"""The expert kernels `loop` and `torch-grouped`, the GEMMs in fp8, and which kernel a run takes.

Shape suffixes: R rows, D model width, F expert width, G = 2·F, e experts on this rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cpu.matmul import matmul, pad_rows
from ..util.errors import ExpertMeshError
from ..util.gpu import computes_on_cpu
from ..util.recompute_cache import kept_product, placeholder
from .carve_out import leaving_room
from .expert_products import (
    compute_dtype,
    empty_as,
    grouped_product,
    host_counts,
    looped_product,
    padded,
    runs,
)
from .fp8 import fp8_products
from .fp8_casts import MULTIPLE, WIDEST
from .grouped import GroupedMatmul, grouped_mlp
from .kernel_entries import (
    LOOP_ENTRY,
    TORCH_GROUPED_ENTRY,
    KernelEntry,
    Precision,
    check_beside_fp8,
    check_kernel_name,
    kernels_that,
)
from .kernel_registry import KERNELS, AutoPlace, ExpertKernel, Needs
from .megablocks import MEGABLOCKS_SPARSE
from .weight_gradients import deferral_of, now_or_later


def loop(rows_RD: Tensor, counts_e: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, needs_output: bool = True) -> Tensor:
    """One matmul per expert. The reference for the other kernels, and the default on CPU."""
    return _LoopedGatedMLP.apply(rows_RD, host_counts(counts_e, rows_RD.shape[0]), w1, v1, w2, needs_output)


class _LoopedGatedMLP(torch.autograd.Function):
    """Written by hand so that weight gradients are written to one buffer, and half precision on a CPU without it is
    computed in fp32 one expert at a time instead of by the slow emulated matmul."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, counts: list[int], w1: Tensor, v1: Tensor, w2: Tensor, needs_output: bool
    ) -> Tensor:
        dtype = compute_dtype(rows_RD)
        out_RD = torch.empty_like(rows_RD) if needs_output else placeholder(rows_RD, *rows_RD.shape)
        kept = []
        weights = zip(*(w.chunk(len(counts)) for w in (w1, v1, w2)), strict=True)
        for rows, (w1_FD, v1_FD, w2_FD) in zip(runs(counts), weights, strict=True):
            if rows.stop == rows.start:
                continue
            x = pad_rows(rows_RD[rows].to(dtype))
            gate, up = (kept_product(partial(_times, x, weight_FD)) for weight_FD in (w1_FD, v1_FD))
            if needs_output:
                out = matmul(F.silu(gate).mul_(up), w2_FD.to(dtype))
                out_RD[rows] = out[: rows.stop - rows.start]
            kept += [gate.to(rows_RD.dtype), up.to(rows_RD.dtype)]
        ctx.save_for_backward(rows_RD, w1, v1, w2, *kept)
        ctx.counts, ctx.deferral = counts, deferral_of(w1, v1, w2)
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, *weights_and_kept = ctx.saved_tensors
        grad_rows_RD = torch.empty_like(rows_RD)
        experts = _input_gradients(ctx.counts, rows_RD, grad_RD, weights_and_kept, grad_rows_RD)
        weight_gradients = partial(_weight_gradients, empty_as(weights_and_kept[0]), ctx.counts)
        grads = now_or_later(ctx.deferral, weight_gradients, experts)
        return grad_rows_RD, None, *grads, None


def _input_gradients(
    counts: list[int], rows_RD: Tensor, grad_RD: Tensor, weights_and_kept: Sequence[Tensor], grad_rows_RD: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """For each expert that has rows, after its part of `grad_rows_RD` has been written: its rows, the gradients of its
    results, the hidden activations, and the gradients of gate and up."""
    dtype = compute_dtype(rows_RD)
    w1, v1, w2, *kept = weights_and_kept
    gates_and_ups = zip(kept[::2], kept[1::2], strict=True)
    weights = zip(*(w.chunk(len(counts)) for w in (w1, v1, w2)), strict=True)
    for rows, (w1_FD, v1_FD, w2_FD) in zip(runs(counts), weights, strict=True):
        if rows.stop == rows.start:
            continue
        x, grad = (pad_rows(t[rows].to(dtype)) for t in (rows_RD, grad_RD))
        gate, up = (t.to(dtype) for t in next(gates_and_ups))
        silu = F.silu(gate)
        hidden = silu * up
        d_hidden = matmul(grad, w2_FD.to(dtype).t())
        d_up = silu.mul_(d_hidden)
        d_gate = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
        d_rows = matmul(d_gate, w1_FD.to(dtype)).add_(matmul(d_up, v1_FD.to(dtype)))
        grad_rows_RD[rows] = d_rows[: rows.stop - rows.start]
        yield x, grad, hidden, d_gate, d_up


def _weight_gradients(
    empty: Callable[[], Tensor], counts: list[int], experts: Iterable[tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of w1, v1 and w2, from what `_input_gradients` gives."""
    grads = empty(), empty(), empty()
    with_rows = iter(experts)
    places = zip(*(grad.chunk(len(counts)) for grad in grads), strict=True)
    for count, (dw1_FD, dv1_FD, dw2_FD) in zip(counts, places, strict=True):
        if count == 0:
            dw1_FD.zero_(), dv1_FD.zero_(), dw2_FD.zero_()
            continue
        x, grad, hidden, d_gate, d_up = next(with_rows)
        matmul(hidden.t(), grad, dw2_FD)
        matmul(d_gate.t(), x, dw1_FD)
        matmul(d_up.t(), x, dv1_FD)
    return grads


def _times(x_MD: Tensor, weight_FD: Tensor) -> Tensor:
    """x · Wᵀ, in x's dtype."""
    return matmul(x_MD, weight_FD.to(x_MD.dtype).t())


def torch_grouped(
    rows_RD: Tensor, counts_e: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """`torch.nn.functional.grouped_mm` over all experts, without a wait for the device.

    Raises:
        ExpertMeshError: D or F times the element size is no multiple of 16 bytes, the dtype is fp64, or on a GPU
            R times D or F reaches 2^31.
    """
    num_experts = counts_e.numel()
    _check_torch_grouped(rows_RD, w1.shape[0] // num_experts)
    return grouped_mlp(rows_RD, num_experts, (w1, v1), w2, _grouped_mm(counts_e), needs_output)


def torch_grouped_joined(
    rows_RD: Tensor, counts_e: Tensor, gate_up_eGD: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """`torch_grouped` with gate and up in one GEMM; in two, and with the same limit, where one is too large."""
    num_rows, both = rows_RD.shape[0], gate_up_eGD.shape[1]
    _check_torch_grouped(rows_RD, both // 2)
    firsts = gate_up_eGD.chunk(2, dim=1) if num_rows * both >= _MOST_ELEMENTS else (gate_up_eGD,)
    return grouped_mlp(rows_RD, counts_e.numel(), firsts, w2, _grouped_mm(counts_e), needs_output)


def torch_grouped_product(x_RI: Tensor, counts_e: Tensor, weight_eOI: Tensor) -> Tensor:
    """A single product by `grouped_mm` (see `torch_grouped`)."""
    _check_torch_grouped(x_RI, weight_eOI.shape[1])
    return grouped_product(x_RI, weight_eOI, _grouped_mm(counts_e))


def _check_torch_grouped(rows_RI: Tensor, other_width: int) -> None:
    _check_grouped_mm(rows_RI.dtype, rows_RI.shape[1], other_width)
    _check_rows(rows_RI, other_width, "--expert-kernel torch-grouped", ", or --expert-kernel loop")


def _grouped_mm(counts_e: Tensor) -> GroupedMatmul:
    ends_e = counts_e.cumsum(0, dtype=torch.int32)

    def gmm(a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        product = F.grouped_mm(a.t() if trans_a else a, b.transpose(1, 2) if trans_b else b, offs=ends_e)
        if trans_a and _leaves_empty_groups(a.device):
            product.masked_fill_((counts_e == 0)[:, None, None], 0)
        return product

    return GroupedMatmul(leaving_room(gmm))


def _leaves_empty_groups(device: torch.device) -> bool:
    """Whether `grouped_mm` leaves weight gradients of experts without rows as it found the memory, instead of setting
    them to zero: on GPUs of compute capability 10 (pytorch#172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def fp8_grouped(
    rows_RD: Tensor, counts_e: Tensor, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """Grouped GEMMs in fp8 with one scale per row (see `moe.kernels.fp8`), without a wait for the device.

    Raises:
        ExpertMeshError: on a GPU R times D or F reaches 2^31.
    """
    num_rows, num_experts = rows_RD.shape[0], counts_e.numel()
    _check_rows(rows_RD, w1.shape[0] // num_experts, _FP8)
    return grouped_mlp(rows_RD, num_experts, (w1, v1), w2, fp8_products(counts_e, num_rows), needs_output)


def fp8_grouped_product(x_RI: Tensor, counts_e: Tensor, weight_eOI: Tensor) -> Tensor:
    """A single product in fp8 (see `fp8_grouped`)."""
    _check_rows(x_RI, weight_eOI.shape[1], _FP8)
    return grouped_product(x_RI, weight_eOI, fp8_products(counts_e, x_RI.shape[0]))


def _check_rows(rows_RI: Tensor, other_width: int, flag: str, instead: str = "") -> None:
    """Refuse too many rows: `grouped_mm` on a GPU counts their elements in 32 bits (torchtitan#1932). Shapes are on the
    host: no wait."""
    num_rows, width = rows_RI.shape
    elements = num_rows * max(width, other_width)
    if elements >= _MOST_ELEMENTS and not computes_on_cpu(rows_RI):
        raise ExpertMeshError(
            f"{flag} cannot take 2^31 elements; {num_rows} tokens on this rank, {width} and {other_width} wide, have "
            f"{elements}; use a smaller --per-device-train-batch-size (and a larger --gradient-accumulation-steps), or "
            f"a smaller --max-seq-length{instead}"
        )


def _check_grouped_mm(dtype: torch.dtype, model_width: int, width: int) -> None:
    if dtype == torch.float64:
        raise ExpertMeshError("--expert-kernel torch-grouped has no float64; use --expert-kernel loop")
    step = 16 // dtype.itemsize
    if model_width % step or width % step:
        raise ExpertMeshError(
            f"--expert-kernel torch-grouped needs hidden and expert width to be multiples of {step} in {dtype}; this "
            f"model has {model_width} and {width}; use --expert-kernel loop"
        )


_FP8 = "--expert-precision fp8"
_MOST_ELEMENTS = 2**31
"""As many elements as a grouped GEMM's rows or results cannot have on a GPU."""


def _check_widths(needs: Needs) -> None:
    for model_width, width in needs.widths:
        _check_grouped_mm(needs.dtype, model_width, width)


def _auto_grouped(needs: Needs) -> AutoPlace | None:
    """Only bf16 on a GPU has a choice."""
    if needs.device_type == "cpu" or needs.dtype == torch.float32:
        return None
    if _has_grouped_mm(needs):
        return AutoPlace(30, f"one launch for all experts on {needs.device_type}")
    return AutoPlace(10, "as megablocks-sparse is not installed, or does not suit these experts")


def _has_grouped_mm(needs: Needs) -> bool:
    """Whether this GPU has a kernel for `grouped_mm`: those of compute capability 9 (Hopper) and 10 (Blackwell for
    servers) do. On others, 12 among them, torch loops over the experts, waiting for the device each time
    (`_grouped_mm_fallback` in ATen)."""
    return needs.capability[0] in (9, 10)


def _auto_loop(needs: Needs) -> AutoPlace:
    if needs.device_type == "cpu":
        return AutoPlace(0, "this is a CPU")
    if needs.dtype == torch.float32:
        return AutoPlace(0, "the grouped kernels are made for bf16")
    return AutoPlace(0, f"widths {', '.join(f'{d} and {f}' for d, f in needs.widths)} do not suit grouped_mm")


LOOP = ExpertKernel(
    LOOP_ENTRY,
    product=looped_product,
    fused=loop,
    joined=None,
    low_rank=None,
    check=lambda needs: None,
    auto=_auto_loop,
    note=lambda needs: "",
)
KERNELS.register(LOOP)
KERNELS.register(
    ExpertKernel(
        TORCH_GROUPED_ENTRY,
        product=torch_grouped_product,
        fused=torch_grouped,
        joined=torch_grouped_joined,
        low_rank=padded(torch_grouped_product),
        check=_check_widths,
        auto=_auto_grouped,
        note=lambda needs: "",
    )
)
KERNELS.register(MEGABLOCKS_SPARSE)


@dataclass(frozen=True)
class KernelChoice:
    kernel: ExpertKernel
    why: str

    @property
    def name(self) -> str:
        return self.kernel.name


def choose_kernel(name: str, needs: Needs, precision: Precision = "same") -> KernelChoice:
    """The kernel for `--expert-kernel name`; "auto" picks by device, experts, dtype and what is installed. In fp8, it
    is the kernel for adapters.

    Raises:
        ExpertMeshError: the name is unknown, or that kernel is not installed, or cannot compute these experts.
    """
    check_kernel_name(name)
    if precision == "fp8":
        check_fp8(name, needs)
        is_cpu = needs.device_type == "cpu"
        how = "emulated on a CPU" if is_cpu else "grouped, with row-wise scales; MFU is of the bf16 peak"
        beside = choose_kernel(name, needs).kernel
        return KernelChoice(replace(FP8, low_rank=beside.low_rank or beside.product), how)
    if name == "auto":
        return _choose(needs)
    check_kernel(name, needs)
    kernel = KERNELS.get(name)
    note = kernel.note(needs)
    return KernelChoice(kernel, f"asked for; {note}" if note else "asked for")


def check_fp8(name: str, needs: Needs) -> None:
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
                f"{_FP8}: hidden and expert width have to be multiples of {MULTIPLE} up to {WIDEST}, and this model "
                f"has {width}; leave it out"
            )
    if needs.device_type == "cuda" and needs.capability[0] != 9:
        # the operator lets 10 pass too, and then ends the process: it is built for 9 alone (pytorch#187095)
        raise ExpertMeshError(
            f"{_FP8}: torch multiplies so on GPUs of compute capability 9 (H100, H200), and this one has "
            f"{'.'.join(map(str, needs.capability))}; leave it out"
        )


FP8 = ExpertKernel(
    KernelEntry(
        "fp8",
        how="Grouped GEMMs with one scale per row.",
        where="a GPU of compute capability 9; emulated on a CPU",
        beside_fp8=True,
        keeps_products=True,
        recorded_as="fp8",
    ),
    product=fp8_grouped_product,
    fused=fp8_grouped,
    joined=None,
    low_rank=None,
    check=partial(check_fp8, "auto"),
    auto=lambda needs: None,
    note=lambda needs: "",
)
"""What `--expert-precision fp8` takes, and no name."""


def _choose(needs: Needs) -> KernelChoice:
    """The default kernel: the first in `auto`'s order of those that can compute these experts, `loop` at the latest."""
    able = [kernel for kernel in KERNELS.entries() if _can_compute(kernel.name, needs)]
    places = [(kernel, place) for kernel in able if (place := kernel.auto(needs)) is not None]
    kernel, place = max(places, key=lambda each: each[1].preference)
    return KernelChoice(kernel, f"auto: {place.why}")


def _can_compute(name: str, needs: Needs) -> bool:
    try:
        check_kernel(name, needs)
    except ExpertMeshError:
        return False
    return True


def check_kernel(name: str, needs: Needs) -> None:
    """
    Raises:
        ExpertMeshError: the kernel is not installed, or cannot compute these experts in this dtype on this device.
    """
    kernel = KERNELS.get(name)
    if kernel.product is None and not needs.is_swiglu:
        raise ExpertMeshError(
            f"--expert-kernel {name} computes plain SwiGLU only, and this model's experts have biases, adapters or "
            f"another activation; use {kernels_that(lambda entry: KERNELS.get(entry.name).product is not None)}"
        )
    kernel.check(needs)
