"""Expert kernels: the gated MLP of each expert over its rows, all behind one signature.

    kernel(rows_RD, counts_e, w1, v1, w2) -> rows_RD

Row r belongs to the expert in whose run it falls when the rows are cut by counts_e (int64, on the rows' device).
w1 (gate), v1 (up) and w2 (down, transposed) are each (e·F, D): MegaBlocks' layout, experts concatenated along dim 0.
For expert i: (silu(x @ w1_i.T) * (x @ v1_i.T)) @ w2_i, as `MixtralExperts.forward` in transformers.

Shape suffixes: R rows, D model width, F expert width, e experts on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.errors import ExpertMeshError
from moe.grouped import grouped_gated_mlp
from moe.kernel_names import check_kernel_name
from moe.matmul import matmul, pad_rows
from moe.megablocks import (
    GROUPED_PACKAGES,
    SPARSE_PACKAGES,
    check_megablocks_sparse,
    megablocks_grouped,
    megablocks_sparse,
    require,
)

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def loop(rows_RD: Tensor, counts_e: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
    """A matmul an expert. The oracle for the other kernels, and the default on CPU."""
    return _LoopedGatedMLP.apply(rows_RD, counts_e.tolist(), w1, v1, w2)


class _LoopedGatedMLP(torch.autograd.Function):
    """Written out by hand so that weight gradients land in one buffer, and half precision on a CPU without it is
    computed in fp32 one expert at a time instead of by the slow emulated matmul."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, counts: list[int], w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
        dtype = _compute_dtype(rows_RD)
        out_RD = torch.empty_like(rows_RD)
        kept = []
        weights = zip(*(w.chunk(len(counts)) for w in (w1, v1, w2)), strict=True)
        for rows, (w1_FD, v1_FD, w2_FD) in zip(_runs(counts), weights, strict=True):
            if rows.stop == rows.start:
                continue
            x = pad_rows(rows_RD[rows].to(dtype))
            gate = matmul(x, w1_FD.to(dtype).t())
            up = matmul(x, v1_FD.to(dtype).t())
            out = matmul(F.silu(gate).mul_(up), w2_FD.to(dtype))
            out_RD[rows] = out[: rows.stop - rows.start]
            kept += [gate.to(rows_RD.dtype), up.to(rows_RD.dtype)]
        ctx.save_for_backward(rows_RD, w1, v1, w2, *kept)
        ctx.counts = counts
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        rows_RD, w1, v1, w2, *kept = ctx.saved_tensors
        dtype = _compute_dtype(rows_RD)
        grad_rows_RD = torch.empty_like(rows_RD)
        grad_w1, grad_v1, grad_w2 = torch.empty_like(w1), torch.empty_like(v1), torch.empty_like(w2)
        gates_and_ups = zip(kept[::2], kept[1::2], strict=True)
        weights = zip(*(t.chunk(len(ctx.counts)) for t in (w1, v1, w2, grad_w1, grad_v1, grad_w2)), strict=True)
        for rows, (w1_FD, v1_FD, w2_FD, dw1_FD, dv1_FD, dw2_FD) in zip(_runs(ctx.counts), weights, strict=True):
            if rows.stop == rows.start:
                dw1_FD.zero_(), dv1_FD.zero_(), dw2_FD.zero_()
                continue
            x, grad = (pad_rows(t[rows].to(dtype)) for t in (rows_RD, grad_RD))
            gate, up = (t.to(dtype) for t in next(gates_and_ups))
            silu = F.silu(gate)
            matmul((silu * up).t(), grad, dw2_FD)
            d_hidden = matmul(grad, w2_FD.to(dtype).t())
            d_up = silu.mul_(d_hidden)
            d_gate = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
            matmul(d_gate.t(), x, dw1_FD)
            matmul(d_up.t(), x, dv1_FD)
            d_rows = matmul(d_gate, w1_FD.to(dtype)).add_(matmul(d_up, v1_FD.to(dtype)))
            grad_rows_RD[rows] = d_rows[: rows.stop - rows.start]
        return grad_rows_RD, None, grad_w1, grad_v1, grad_w2


def _runs(counts: list[int]) -> list[slice]:
    runs, start = [], 0
    for count in counts:
        runs.append(slice(start, start + count))
        start += count
    return runs


def _compute_dtype(rows: Tensor) -> torch.dtype:
    emulated = rows.device.type == "cpu" and rows.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if emulated and not torch.cpu._is_avx512_bf16_supported() else rows.dtype


def torch_grouped(rows_RD: Tensor, counts_e: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm` over all experts, without a wait for the device.

    Raises:
        ExpertMeshError: D or F times the element size is no multiple of 16 bytes, or the dtype is fp64.
    """
    num_experts = counts_e.numel()
    _check_grouped_mm(rows_RD.dtype, rows_RD.shape[1], w1.shape[0] // num_experts)
    ends_e = counts_e.cumsum(0, dtype=torch.int32)

    def gmm(a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        return F.grouped_mm(a.t() if trans_a else a, b.transpose(1, 2) if trans_b else b, offs=ends_e)

    return grouped_gated_mlp(rows_RD, num_experts, w1, v1, w2, gmm)


def _check_grouped_mm(dtype: torch.dtype, model_width: int, width: int) -> None:
    if dtype == torch.float64:
        raise ExpertMeshError("--expert-kernel torch-grouped has no float64; use --expert-kernel loop")
    step = 16 // dtype.itemsize
    if model_width % step or width % step:
        raise ExpertMeshError(
            f"--expert-kernel torch-grouped needs hidden and expert width to be multiples of {step} in {dtype}; "
            f"this model has {model_width} and {width}; use --expert-kernel loop"
        )


KERNELS: dict[str, Kernel] = {
    "loop": loop,
    "torch-grouped": torch_grouped,
    "megablocks-sparse": megablocks_sparse,
    "megablocks-grouped": megablocks_grouped,
}


@dataclass(frozen=True)
class KernelChoice:
    name: str
    kernel: Kernel
    why: str


def choose_kernel(name: str, device_type: str, model_width: int, expert_width: int, dtype: torch.dtype) -> KernelChoice:
    """The kernel for `--expert-kernel name`; "auto" picks by device, sizes, dtype and what is installed.

    Raises:
        ExpertMeshError: the name is unknown, or that kernel is not installed, or cannot compute these sizes in this
            dtype on this device.
    """
    check_kernel_name(name)
    if name == "auto":
        name, why = _choose(device_type, model_width, expert_width, dtype)
        return KernelChoice(name, KERNELS[name], f"auto: {why}")
    check_kernel(name, device_type, model_width, expert_width, dtype)
    if name == "megablocks-sparse" and dtype == torch.float32:
        return KernelChoice(name, megablocks_sparse, "asked for; in fp32 it multiplies in TF32")
    return KernelChoice(name, KERNELS[name], "asked for")


def _choose(device_type: str, model_width: int, expert_width: int, dtype: torch.dtype) -> tuple[str, str]:
    """(name, why). Only bf16 on a GPU has a choice."""
    if device_type == "cpu":
        return "loop", "this is a CPU"
    if dtype == torch.float32:
        return "loop", "the grouped kernels are made for bf16"
    sizes = (device_type, model_width, expert_width, dtype)
    if _can_compute("torch-grouped", *sizes) and _has_grouped_mm():
        return "torch-grouped", f"one launch for all experts on {device_type}"
    if _can_compute("megablocks-sparse", *sizes):
        return "megablocks-sparse", "in grouped_mm this GPU would launch a matmul an expert"
    if _can_compute("torch-grouped", *sizes):
        return "torch-grouped", "without megablocks-sparse, as it is not installed or its widths not multiples of 128"
    return "loop", f"widths {model_width} and {expert_width} do not suit grouped_mm"


def _has_grouped_mm() -> bool:
    """Whether this GPU has a kernel for `grouped_mm`: those before Hopper (compute capability 9) do without, and torch
    then loops over the experts, waiting for the device each time (`_grouped_mm_fallback` in ATen)."""
    return torch.cuda.get_device_capability() >= (9, 0)


def _can_compute(name: str, device_type: str, model_width: int, expert_width: int, dtype: torch.dtype) -> bool:
    try:
        check_kernel(name, device_type, model_width, expert_width, dtype)
    except ExpertMeshError:
        return False
    return True


def check_kernel(name: str, device_type: str, model_width: int, expert_width: int, dtype: torch.dtype) -> None:
    """
    Raises:
        ExpertMeshError: the kernel is not installed, or cannot compute these sizes in this dtype on this device.
    """
    if name == "torch-grouped":
        _check_grouped_mm(dtype, model_width, expert_width)
    if name.startswith("megablocks") and device_type != "cuda":
        raise ExpertMeshError(f"--expert-kernel {name} needs a GPU, and this run is on {device_type}; use loop")
    if name == "megablocks-sparse":
        check_megablocks_sparse(model_width, expert_width)
        require(f"--expert-kernel {name}", SPARSE_PACKAGES)
    if name == "megablocks-grouped":
        if dtype != torch.bfloat16:
            raise ExpertMeshError(f"--expert-kernel {name} computes in bf16 only; add --bf16, or use loop")
        require(f"--expert-kernel {name}", GROUPED_PACKAGES)
