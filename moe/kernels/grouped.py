"""The gated MLP of all experts in grouped GEMMs: each GEMM is one call for all experts.

Gate and up may be one GEMM, of one matrix per expert with w1's rows and then v1's: the tokens are read once, and
backward sums up their gradient in one accumulation, where two GEMMs give two rounded results that are then added.

Shape suffixes: R rows sorted by expert, D model width, F expert width, G = 2·F, e experts on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.recompute_cache import kept_product, placeholder
from .swiglu import swiglu_backward, swiglu_forward, swiglu_joined_backward
from .weight_gradients import deferral_of, now_or_later


@dataclass(frozen=True)
class GroupedMatmul:
    """gmm(a, b, trans_a=False, trans_b=False). With a_RK: expert by expert, its
    rows of a times b_eKN, or b_eNK if trans_b: (R, N). If trans_a, with b_RN: expert by expert a.T times b: (e, K, N).

    Attributes:
        multiply: the function that does this.
        cast: makes of rows what `multiply` multiplies by, and also takes in their place: for rows that several GEMMs
            share. cast(rows, trans_a) is for an operand of a GEMM with that trans_a.
    """

    multiply: Callable[..., Tensor]
    cast: Callable[[Tensor, bool], Any] = lambda rows, trans_a: rows

    def __call__(self, a: Any, b: Any, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        return self.multiply(a, b, trans_a=trans_a, trans_b=trans_b)


def for_any_rows(gmm: GroupedMatmul, num_experts: int) -> GroupedMatmul:
    """`gmm` for any number of rows: with none it is not called, as kernels are not made for that."""

    def multiply(a: Any, b: Any, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        if not isinstance(a, Tensor) or a.shape[0]:
            return gmm(a, b, trans_a=trans_a, trans_b=trans_b)
        if trans_a:
            return a.new_zeros(num_experts, a.shape[1], b.shape[1])
        return a.new_empty(0, b.shape[1 if trans_b else 2])

    def cast(rows: Tensor, trans_a: bool) -> Any:
        return gmm.cast(rows, trans_a) if rows.shape[0] else rows

    return GroupedMatmul(multiply, cast)


def grouped_gated_mlp(
    rows_RD: Tensor,
    num_experts: int,
    w1: Tensor,
    v1: Tensor,
    w2: Tensor,
    gmm: GroupedMatmul,
    needs_output: bool,
) -> Tensor:
    """The expert kernel of `moe.kernels.expert_kernels` by grouped GEMMs, three forward and six backward; weights
    (e·F, D)."""
    w1_eFD, v1_eFD, w2_eFD = (w.view(num_experts, -1, rows_RD.shape[1]) for w in (w1, v1, w2))
    return _GroupedGatedMLP.apply(rows_RD, w1_eFD, v1_eFD, w2_eFD, for_any_rows(gmm, num_experts), needs_output)


def grouped_joined_mlp(
    rows_RD: Tensor, gate_up_eGD: Tensor, w2: Tensor, gmm: GroupedMatmul, needs_output: bool
) -> Tensor:
    """`grouped_gated_mlp` of w1 and v1 in one tensor, by grouped GEMMs, two forward and four backward."""
    num_experts = gate_up_eGD.shape[0]
    w2_eFD = w2.view(num_experts, -1, rows_RD.shape[1])
    return _GroupedJoinedMLP.apply(rows_RD, gate_up_eGD, w2_eFD, for_any_rows(gmm, num_experts), needs_output)


class _GroupedGatedMLP(torch.autograd.Function):
    """Written by hand so that only two of four tensors (R, F) are kept: the activation's result is recomputed in
    backward, in the same pass as its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        w1_eFD: Tensor,
        v1_eFD: Tensor,
        w2_eFD: Tensor,
        gmm: GroupedMatmul,
        needs_output: bool,
    ) -> Tensor:

        def gate_and_up() -> tuple[Tensor, Tensor]:
            rows = gmm.cast(rows_RD, False)
            return gmm(rows, w1_eFD, trans_b=True), gmm(rows, v1_eFD, trans_b=True)

        gate_RF, up_RF = kept_product(gate_and_up)
        ctx.save_for_backward(rows_RD, w1_eFD, v1_eFD, w2_eFD, gate_RF, up_RF)
        ctx.gmm, ctx.deferral = gmm, deferral_of(w1_eFD, v1_eFD, w2_eFD)
        if not needs_output:
            return placeholder(rows_RD, *rows_RD.shape)
        return gmm(swiglu_forward(gate_RF, up_RF), w2_eFD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, w1_eFD, v1_eFD, w2_eFD, gate_RF, up_RF = ctx.saved_tensors
        gmm = ctx.gmm
        # a gradient may come expanded, as that of a sum does, which grouped GEMMs do not take
        grad_RD = grad_RD.contiguous()
        d_hidden_RF = gmm(grad_RD, w2_eFD, trans_b=True)
        d_gate_RF, d_up_RF, hidden_RF = swiglu_backward(d_hidden_RF, gate_RF, up_RF)
        grad_rows_RD = gmm(d_gate_RF, w1_eFD).add_(gmm(d_up_RF, v1_eFD))
        weight_gradients = partial(_weight_gradients, gmm)
        grads = now_or_later(ctx.deferral, weight_gradients, rows_RD, grad_RD, d_gate_RF, d_up_RF, hidden_RF)
        return grad_rows_RD, *grads, None, None


def _weight_gradients(
    gmm: GroupedMatmul, rows_RD: Tensor, grad_RD: Tensor, d_gate_RF: Tensor, d_up_RF: Tensor, hidden_RF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of w1, v1 and w2, each (e, F, D)."""
    rows = gmm.cast(rows_RD, True)
    grad_w1_eFD = gmm(d_gate_RF, rows, trans_a=True)
    grad_v1_eFD = gmm(d_up_RF, rows, trans_a=True)
    return grad_w1_eFD, grad_v1_eFD, gmm(hidden_RF, grad_RD, trans_a=True)


class _GroupedJoinedMLP(torch.autograd.Function):
    """As `_GroupedGatedMLP`, with gate and up in one tensor, and so their weights' and their own gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, gate_up_eGD: Tensor, w2_eFD: Tensor, gmm: GroupedMatmul, needs_output: bool
    ) -> Tensor:
        gate_up_RG = kept_product(lambda: gmm(rows_RD, gate_up_eGD, trans_b=True))
        ctx.save_for_backward(rows_RD, gate_up_eGD, w2_eFD, gate_up_RG)
        ctx.gmm, ctx.deferral = gmm, deferral_of(gate_up_eGD, w2_eFD)
        if not needs_output:
            return placeholder(rows_RD, *rows_RD.shape)
        return gmm(swiglu_forward(*gate_up_RG.chunk(2, dim=1)), w2_eFD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, gate_up_eGD, w2_eFD, gate_up_RG = ctx.saved_tensors
        gmm = ctx.gmm
        grad_RD = grad_RD.contiguous()
        d_gate_up_RG, hidden_RF = swiglu_joined_backward(gmm(grad_RD, w2_eFD, trans_b=True), gate_up_RG)
        grad_rows_RD = gmm(d_gate_up_RG, gate_up_eGD)
        weight_gradients = partial(_joined_weight_gradients, gmm)
        grads = now_or_later(ctx.deferral, weight_gradients, rows_RD, grad_RD, d_gate_up_RG, hidden_RF)
        return grad_rows_RD, *grads, None, None


def _joined_weight_gradients(
    gmm: GroupedMatmul, rows_RD: Tensor, grad_RD: Tensor, d_gate_up_RG: Tensor, hidden_RF: Tensor
) -> tuple[Tensor, Tensor]:
    """Those of w1 and v1, (e, G, D), and of w2, (e, F, D)."""
    return gmm(d_gate_up_RG, rows_RD, trans_a=True), gmm(hidden_RF, grad_RD, trans_a=True)
