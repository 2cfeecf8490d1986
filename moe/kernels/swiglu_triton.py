"""SwiGLU in one Triton kernel forward and one backward. Importing this needs triton; see `moe.kernels.swiglu`.

Shape suffixes: R rows, F expert width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.moe.base.declared import StepPart, writes

STEP_PART: StepPart = "experts' activation"

BLOCK = tl.constexpr(1024)


def fused_forward(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """As `moe.kernels.swiglu.plain_forward`."""
    assert all(t.is_contiguous() for t in (gate_RF, up_RF))
    hidden_RF = torch.empty_like(gate_RF)
    size = gate_RF.numel()
    if size > 0:
        _launch(_forward_kernel, size, gate_RF, up_RF, hidden_RF)
    return hidden_RF


def fused_backward(grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe.kernels.swiglu.plain_backward`."""
    assert all(t.is_contiguous() for t in (grad_RF, gate_RF, up_RF))
    d_gate_RF, d_up_RF, hidden_RF = (torch.empty_like(gate_RF) for _ in range(3))
    size = gate_RF.numel()
    if size > 0:
        _launch(_backward_kernel, size, grad_RF, gate_RF, up_RF, d_gate_RF, d_up_RF, hidden_RF)
    return d_gate_RF, d_up_RF, hidden_RF


def _launch(kernel: Any, size: int, *tensors: Tensor) -> None:
    # by default, fusing multiplications and additions is on up to Triton 3.9, with a warning, and off from 3.10
    kernel[(triton.cdiv(size, BLOCK.value),)](*tensors, size, enable_fp_fusion=True)


@writes("hidden_ptr")
@triton.jit
def _forward_kernel(gate_ptr, up_ptr, hidden_ptr, size):  # type: ignore[no-untyped-def]
    # rows times width passes 2^31 at 150 000 rows of Mixtral 8x7B
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    gate = tl.load(gate_ptr + index, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + index, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@writes("d_gate_ptr", "d_up_ptr", "hidden_ptr")
@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, hidden_ptr, size
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    grad = tl.load(grad_ptr + index, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + index, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_gate_ptr + index, d_gate.to(d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + index, (grad * silu).to(d_up_ptr.dtype.element_ty), mask=inside)
    tl.store(hidden_ptr + index, (silu * up).to(hidden_ptr.dtype.element_ty), mask=inside)
