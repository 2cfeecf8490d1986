"""SwiGLU in one Triton kernel forward and one backward. Importing this needs triton; see `moe.kernels.swiglu`.

Why our own: backward also gives silu(gate) * up, of which the gradient of the next matrix is made, in the pass that it
makes anyway, so that a layer keeps two of its four tensors (R, F); and gate and up may be the halves of one tensor, as
one GEMM of both leaves them. liger's kernel gives gradients alone, and wants both contiguous.

Shape suffixes: R rows, F expert width, G = 2·F.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..util.step_parts import register_step_part, writes

register_step_part(
    __name__,
    "experts' activation",
    kernels={
        "_forward_kernel": writes("hidden_ptr"),
        "_backward_kernel": writes("d_gate_ptr", "d_up_ptr", "hidden_ptr"),
    },
)

BLOCK = tl.constexpr(1024)

_ALIGNED = 16


def fused_forward(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """As `moe.kernels.swiglu.plain_forward`."""
    hidden_RF = gate_RF.new_empty(gate_RF.shape)
    _launch(_forward_kernel, (gate_RF, up_RF), (hidden_RF,))
    return hidden_RF


def fused_backward(grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe.kernels.swiglu.plain_backward`."""
    d_gate_RF, d_up_RF, hidden_RF = (gate_RF.new_empty(gate_RF.shape) for _ in range(3))
    _launch(_backward_kernel, (gate_RF, up_RF, d_gate_RF, d_up_RF), (grad_RF, hidden_RF))
    return d_gate_RF, d_up_RF, hidden_RF


def fused_joined_backward(grad_RF: Tensor, gate_up_RG: Tensor) -> tuple[Tensor, Tensor]:
    """As `moe.kernels.swiglu.swiglu_joined_backward`."""
    d_gate_up_RG, hidden_RF = torch.empty_like(gate_up_RG), torch.empty_like(grad_RF)
    halves = (*gate_up_RG.chunk(2, dim=1), *d_gate_up_RG.chunk(2, dim=1))
    _launch(_backward_kernel, halves, (grad_RF, hidden_RF))
    return d_gate_up_RG, hidden_RF


def _launch(kernel: Any, halves: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
    """Launch a kernel. halves: contiguous, or each a half of one (R, G). others: contiguous."""
    assert all(t.is_contiguous() for t in others)
    width = others[0].shape[-1]
    is_contiguous = all(t.is_contiguous() for t in halves)
    step = width if is_contiguous else 2 * width
    assert is_contiguous or all(t.stride() == (step, 1) for t in halves)
    if is_contiguous and width % _ALIGNED == 0:
        # a single row; of other widths whether its length is aligned would depend on the number of rows, and Triton
        # compiles a kernel for either
        width, step = others[0].numel(), 0
    if others[0].numel() > 0:
        programs = others[0].numel() // width * triton.cdiv(width, BLOCK.value)
        # by default, fusing multiplications and additions is on up to Triton 3.9, with a warning, and off from 3.10
        kernel[(programs,)](*halves, *others, width, step, enable_fp_fusion=True)


@triton.jit
def _places(width, step):  # type: ignore[no-untyped-def]
    """Of this program: where in a half, where in another tensor, and which of these are inside of a row."""
    blocks = tl.cdiv(width, BLOCK)
    # rows times width passes 2^31 at 150 000 rows of Mixtral 8x7B
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row * step + column, row * width + column, column < width


@triton.jit
def _forward_kernel(gate_ptr, up_ptr, hidden_ptr, width, step):  # type: ignore[no-untyped-def]
    half, index, inside = _places(width, step)
    gate = tl.load(gate_ptr + half, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + half, mask=inside).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    tl.store(hidden_ptr + index, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, grad_ptr, hidden_ptr, width, step
):
    half, index, inside = _places(width, step)
    grad = tl.load(grad_ptr + index, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + half, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + half, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_gate_ptr + half, d_gate.to(d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + half, (grad * silu).to(d_up_ptr.dtype.element_ty), mask=inside)
    tl.store(hidden_ptr + index, (silu * up).to(hidden_ptr.dtype.element_ty), mask=inside)
