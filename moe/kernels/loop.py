"""The expert kernel `loop`: one matmul per expert. The reference for the others, and the default on a CPU.

Shape suffixes: R rows, D model width, F expert width, e experts on this rank, I and O the widths of a product's input
and output, K what is summed over, N the other width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.recompute_cache import placeholder
from ..util.step_parts import register_step_part
from .expert_products import grouped_product, looped, multiply_dtype, multiply_into
from .expert_rows import ExpertRows, runs
from .kernel_registry import AutoPlace, ExpertKernel, KernelNeeds
from .weight_gradients import deferral_of, now_or_later

register_step_part(__name__, "expert GEMMs")


def loop(rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, needs_output: bool = True) -> Tensor:
    """A complete expert at once."""
    return _LoopedGatedMLP.apply(rows_RD, experts, w1, v1, w2, needs_output)


class _LoopedGatedMLP(torch.autograd.Function):
    """Written by hand so that weight gradients are written to one buffer, and half precision on a CPU without it is
    computed in fp32 one expert at a time instead of by the slow emulated matmul."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, needs_output: bool
    ) -> Tensor:
        dtype, counts = multiply_dtype(rows_RD), experts.counts()
        out_RD = torch.empty_like(rows_RD) if needs_output else placeholder(rows_RD, *rows_RD.shape)
        kept = []
        weights = zip(*(w.chunk(len(counts)) for w in (w1, v1, w2)), strict=True)
        for rows, (w1_FD, v1_FD, w2_FD) in zip(runs(counts), weights, strict=True):
            if rows.stop == rows.start:
                continue
            x = rows_RD[rows].to(dtype)
            gate, up = (experts.kept_product(partial(_times, x, weight_FD)) for weight_FD in (w1_FD, v1_FD))
            if needs_output:
                multiply_into(out_RD[rows], F.silu(gate).mul_(up), w2_FD.to(dtype))
            kept += [gate.to(rows_RD.dtype), up.to(rows_RD.dtype)]
        ctx.save_for_backward(rows_RD, w1, v1, w2, *kept)
        ctx.counts, ctx.deferral = counts, deferral_of(experts.call, w1, v1, w2)
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, *weights_and_kept = ctx.saved_tensors
        grad_rows_RD = torch.empty_like(rows_RD)
        experts = _input_gradients(ctx.counts, rows_RD, grad_RD, weights_and_kept, grad_rows_RD)
        weight_gradients = partial(_weight_gradients, _empty_as(weights_and_kept[0]), ctx.counts)
        grads = now_or_later(ctx.deferral, weight_gradients, experts)
        return grad_rows_RD, None, *grads, None


def _input_gradients(
    counts: list[int], rows_RD: Tensor, grad_RD: Tensor, weights_and_kept: Sequence[Tensor], grad_rows_RD: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """For each expert that has rows, after its part of `grad_rows_RD` has been written: its rows, the gradients of its
    results, the hidden activations, and the gradients of gate and up."""
    dtype = multiply_dtype(rows_RD)
    w1, v1, w2, *kept = weights_and_kept
    gates_and_ups = zip(kept[::2], kept[1::2], strict=True)
    weights = zip(*(w.chunk(len(counts)) for w in (w1, v1, w2)), strict=True)
    for rows, (w1_FD, v1_FD, w2_FD) in zip(runs(counts), weights, strict=True):
        if rows.stop == rows.start:
            continue
        x, grad = (t[rows].to(dtype) for t in (rows_RD, grad_RD))
        gate, up = (t.to(dtype) for t in next(gates_and_ups))
        silu = F.silu(gate)
        hidden = silu * up
        d_hidden = grad @ w2_FD.to(dtype).t()
        d_up = silu.mul_(d_hidden)
        d_gate = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
        grad_rows_RD[rows] = (d_gate @ w1_FD.to(dtype)).add_(d_up @ v1_FD.to(dtype))
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
        multiply_into(dw2_FD, hidden.t(), grad)
        multiply_into(dw1_FD, d_gate.t(), x)
        multiply_into(dv1_FD, d_up.t(), x)
    return grads


def _times(x_MD: Tensor, weight_FD: Tensor) -> Tensor:
    """x · Wᵀ, in x's dtype."""
    return x_MD @ weight_FD.to(x_MD.dtype).t()


def _empty_as(weight: Tensor) -> Callable[[], Tensor]:
    """Makes an uninitialised tensor of this one's shape, strides, dtype and device, without holding its memory."""
    return partial(torch.empty_strided, weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)


def looped_product(x_RI: Tensor, experts: ExpertRows, weight_eOI: Tensor) -> Tensor:
    """A single product."""
    return grouped_product(x_RI, experts, weight_eOI, looped(experts.counts()))


def _auto_loop(needs: KernelNeeds) -> AutoPlace:
    if needs.device_type == "cpu":
        return AutoPlace(0, "this is a CPU")
    if needs.dtype == torch.float32:
        return AutoPlace(0, "the grouped kernels are for bf16")
    return AutoPlace(0, f"widths {', '.join(f'{d} and {f}' for d, f in needs.widths)} do not suit grouped_mm")


LOOP = ExpertKernel(
    product=looped_product,
    fused=loop,
    joined=None,
    weighs=False,
    gathers=False,
    low_rank=None,
    check=lambda needs: None,
    auto=_auto_loop,
    note=lambda needs: "",
)
