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

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def loop(rows_RD: Tensor, counts_e: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
    """A matmul an expert. The oracle for the other kernels, and the default on CPU."""
    return _LoopedGatedMLP.apply(rows_RD, counts_e.tolist(), w1, v1, w2)


class _LoopedGatedMLP(torch.autograd.Function):
    """Written out by hand so that weight gradients land in one buffer, and half precision on a CPU without it is
    computed in fp32 one expert at a time instead of by the slow emulated matmul."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, counts: list[int], w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
        num_experts = len(counts)
        dtype = _compute_dtype(rows_RD)
        width = w1.shape[0] // num_experts
        gate_RF = rows_RD.new_empty(rows_RD.shape[0], width)
        up_RF = torch.empty_like(gate_RF)
        out_RD = torch.empty_like(rows_RD)
        experts = zip(w1.chunk(num_experts), v1.chunk(num_experts), w2.chunk(num_experts), strict=True)
        for rows, (w1_FD, v1_FD, w2_FD) in zip(_runs(counts), experts, strict=True):
            if rows.stop == rows.start:
                continue
            x = rows_RD[rows].to(dtype)
            gate = _matmul_into(gate_RF[rows], x, w1_FD.to(dtype).t())
            up = _matmul_into(up_RF[rows], x, v1_FD.to(dtype).t())
            _matmul_into(out_RD[rows], F.silu(gate).mul_(up), w2_FD.to(dtype))
        ctx.save_for_backward(rows_RD, w1, v1, w2, gate_RF, up_RF)
        ctx.counts = counts
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        rows_RD, w1, v1, w2, gate_RF, up_RF = ctx.saved_tensors
        num_experts = len(ctx.counts)
        dtype = _compute_dtype(rows_RD)
        grad_rows_RD = torch.empty_like(rows_RD)
        grad_w1, grad_v1, grad_w2 = torch.empty_like(w1), torch.empty_like(v1), torch.empty_like(w2)
        weights = zip(*(t.chunk(num_experts) for t in (w1, v1, w2, grad_w1, grad_v1, grad_w2)), strict=True)
        for rows, (w1_FD, v1_FD, w2_FD, dw1_FD, dv1_FD, dw2_FD) in zip(_runs(ctx.counts), weights, strict=True):
            if rows.stop == rows.start:
                dw1_FD.zero_(), dv1_FD.zero_(), dw2_FD.zero_()
                continue
            x, gate, up, grad = (t[rows].to(dtype) for t in (rows_RD, gate_RF, up_RF, grad_RD))
            silu = F.silu(gate)
            _matmul_into(dw2_FD, (silu * up).t(), grad)
            d_hidden = grad @ w2_FD.to(dtype).t()
            d_up = silu.mul_(d_hidden)
            d_gate = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
            _matmul_into(dw1_FD, d_gate.t(), x)
            _matmul_into(dv1_FD, d_up.t(), x)
            grad_rows_RD[rows] = (d_gate @ w1_FD.to(dtype)).addmm_(d_up, v1_FD.to(dtype))
        return grad_rows_RD, None, grad_w1, grad_v1, grad_w2


def _matmul_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Writes a @ b into `out`, without a copy where the dtypes agree; returns it as it was computed, in a's dtype."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    product = a @ b
    out.copy_(product)
    return product


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
    """Three `torch.nn.functional.grouped_mm` over all experts, without a wait for the device.

    Raises:
        ExpertMeshError: D or F times the element size is no multiple of 16 bytes, or the dtype is fp64.
    """
    num_experts, model_width = counts_e.numel(), rows_RD.shape[1]
    width = w1.shape[0] // num_experts
    _check_grouped_mm(rows_RD.dtype, model_width, width)
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    w1_eFD, v1_eFD, w2_eFD = (w.view(num_experts, width, model_width) for w in (w1, v1, w2))
    gate_RF = F.grouped_mm(rows_RD, w1_eFD.transpose(1, 2), offs=ends_e)
    up_RF = F.grouped_mm(rows_RD, v1_eFD.transpose(1, 2), offs=ends_e)
    return _ContiguousGrad.apply(F.grouped_mm(F.silu(gate_RF) * up_RF, w2_eFD, offs=ends_e))


def _check_grouped_mm(dtype: torch.dtype, model_width: int, width: int) -> None:
    if dtype == torch.float64:
        raise ExpertMeshError("--expert-kernel torch-grouped has no float64; use --expert-kernel loop")
    step = 16 // dtype.itemsize
    if model_width % step or width % step:
        raise ExpertMeshError(
            f"--expert-kernel torch-grouped needs hidden and expert width to be multiples of {step} in {dtype}; "
            f"this model has {model_width} and {width}; use --expert-kernel loop"
        )


class _ContiguousGrad(torch.autograd.Function):
    """grouped_mm's backward refuses an expanded gradient, as `out.sum()` sends one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


KERNELS: dict[str, Kernel] = {"loop": loop, "torch-grouped": torch_grouped}


@dataclass(frozen=True)
class KernelChoice:
    name: str
    kernel: Kernel
    why: str


def check_kernel_name(name: str) -> None:
    """
    Raises:
        ExpertMeshError: no kernel is called `name`.
    """
    if name not in ("auto", *KERNELS):
        raise ExpertMeshError(f"--expert-kernel {name} is unknown; use auto, {', '.join(KERNELS)}")


def choose_kernel(name: str, device_type: str, model_width: int, expert_width: int, dtype: torch.dtype) -> KernelChoice:
    """The kernel for `--expert-kernel name`; "auto" picks by device, sizes and dtype, and `why` says so.

    Raises:
        ExpertMeshError: the name is unknown, or that kernel cannot compute these sizes in this dtype.
    """
    check_kernel_name(name)
    if name == "torch-grouped":
        _check_grouped_mm(dtype, model_width, expert_width)
    if name != "auto":
        return KernelChoice(name, KERNELS[name], "asked for")
    if device_type == "cpu":
        return KernelChoice("loop", loop, "auto: this is a CPU")
    if dtype == torch.float32:
        return KernelChoice("loop", loop, "auto: grouped_mm is made for bf16")
    try:
        _check_grouped_mm(dtype, model_width, expert_width)
    except ExpertMeshError:
        return KernelChoice("loop", loop, f"auto: widths {model_width} and {expert_width} do not suit grouped_mm")
    return KernelChoice("torch-grouped", torch_grouped, f"auto: one launch for all experts on {device_type}")
