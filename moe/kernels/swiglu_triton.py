"""SwiGLU in one Triton kernel forward and one backward. Importing this needs triton; see `moe.kernels.swiglu`.

Why our own: backward also gives silu(gate) * up, of which the gradient of the next matrix is made, in the pass that it
makes anyway, so that a layer keeps two of its four tensors (R, F); and gate and up may be the halves of one tensor, as
one GEMM of both leaves them. liger's kernel gives gradients alone, and wants both contiguous.

Shape suffixes: R rows, F expert width, G = 2·F, B programs for a row.
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
        "_backward_kernel": writes("d_gate_ptr", "d_up_ptr", "hidden_ptr", "sums_ptr"),
    },
)

BLOCK = 1024

_ALIGNED = 16


def fused_forward(gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """As `moe.kernels.swiglu.plain_forward`."""
    hidden_RF = gate_RF.new_empty(gate_RF.shape)
    _launch(_forward_kernel, (gate_RF, up_RF), (hidden_RF,), weights_R)
    return hidden_RF


def fused_backward(
    grad_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `moe.kernels.swiglu.plain_backward`."""
    d_gate_RF, d_up_RF, hidden_RF = (gate_RF.new_empty(gate_RF.shape) for _ in range(3))
    d_weights_R = _launch_backward((gate_RF, up_RF, d_gate_RF, d_up_RF), (grad_RF, hidden_RF), weights_R)
    return d_gate_RF, d_up_RF, hidden_RF, d_weights_R


def fused_joined_backward(
    grad_RF: Tensor, gate_up_RG: Tensor, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `moe.kernels.swiglu.swiglu_joined_backward`."""
    d_gate_up_RG, hidden_RF = torch.empty_like(gate_up_RG), torch.empty_like(grad_RF)
    halves = (*gate_up_RG.chunk(2, dim=1), *d_gate_up_RG.chunk(2, dim=1))
    return d_gate_up_RG, hidden_RF, _launch_backward(halves, (grad_RF, hidden_RF), weights_R)


def _launch_backward(halves: tuple[Tensor, ...], others: tuple[Tensor, ...], weights_R: Tensor | None) -> Tensor | None:
    """The weights' gradient, if there are any: each program's sum, and then those of a row, always in one order."""
    sums_RB = None
    if weights_R is not None:
        num_rows, width = others[0].shape
        sums_RB = weights_R.new_empty(num_rows, triton.cdiv(width, block_of_row(width)))
    _launch(_backward_kernel, halves, others, weights_R, sums_RB)
    return None if sums_RB is None else sums_RB.sum(dim=1)


def block_of_row(width: int) -> int:
    """How many elements of a row a program processes at a time, where each row has a weight."""
    return min(BLOCK, triton.next_power_of_2(width))


def _launch(kernel: Any, halves: tuple[Tensor, ...], others: tuple[Tensor, ...], *of_rows: Tensor | None) -> None:
    """Launch a kernel.

    Args:
        halves: contiguous, or each a half of one (R, G).
        others: contiguous.
        of_rows: the rows' weights, or None, and what there is of each program.
    """
    assert all(t.is_contiguous() for t in others)
    width = others[0].shape[-1]
    is_contiguous = all(t.is_contiguous() for t in halves)
    step = width if is_contiguous else 2 * width
    assert is_contiguous or all(t.stride() == (step, 1) for t in halves)
    block = BLOCK
    if of_rows[0] is not None:
        block = block_of_row(width)
    elif is_contiguous and width % _ALIGNED == 0:
        # a single row; of other widths whether its length is aligned would depend on the number of rows, and Triton
        # compiles a kernel for either
        width, step = others[0].numel(), 0
    if others[0].numel() > 0:
        programs = others[0].numel() // width * triton.cdiv(width, block)
        # by default, fusing multiplications and additions is on up to Triton 3.9, with a warning, and off from 3.10
        kernel[(programs,)](*halves, *others, *of_rows, width, step, block, enable_fp_fusion=True)


@triton.jit
def _places(width, step, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of this program: where in a half, where in another tensor, which of these are inside of a row, and which row."""
    blocks = tl.cdiv(width, block)
    # rows times width passes 2^31 at 150 000 rows of Mixtral 8x7B
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    column = (program % blocks) * block + tl.arange(0, block)
    return row * step + column, row * width + column, column < width, row


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, hidden_ptr, weights_ptr, width, step, block: tl.constexpr
):
    """weights_ptr may be None."""
    half, index, inside, row = _places(width, step, block)
    gate = tl.load(gate_ptr + half, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + half, mask=inside).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    if weights_ptr is not None:
        hidden *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(hidden_ptr + index, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    d_gate_ptr,
    d_up_ptr,
    grad_ptr,
    hidden_ptr,
    weights_ptr,
    sums_ptr,
    width,
    step,
    block: tl.constexpr,
):
    """weights_ptr and sums_ptr may be None. The latter gets the program's part of the weight's gradient."""
    half, index, inside, row = _places(width, step, block)
    grad = tl.load(grad_ptr + index, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + half, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + half, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    hidden = silu * up
    if weights_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.where(inside, grad * hidden, 0.0), axis=0))
        weight = tl.load(weights_ptr + row).to(tl.float32)
        grad *= weight
        hidden *= weight
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(d_gate_ptr + half, d_gate.to(d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + half, (grad * silu).to(d_up_ptr.dtype.element_ty), mask=inside)
    tl.store(hidden_ptr + index, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
