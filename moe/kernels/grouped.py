"""The gated MLP of all experts in grouped GEMMs: each GEMM is one call for all experts.

Gate and up may be one GEMM, of one matrix per expert with w1's rows and then v1's: the tokens are read once, and
backward sums up their gradient in one accumulation, where two GEMMs give two rounded results that are then added.

Shape suffixes: R rows sorted by expert, D model width, F expert width, G = 2·F, e experts on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.errors import ExpertMeshError
from ..util.gpu import computes_on_cpu
from ..util.recompute_cache import placeholder
from ..util.step_parts import register_step_part
from .expert_rows import ExpertRows
from .swiglu import swiglu_backward, swiglu_forward, swiglu_joined_backward
from .weight_gradients import deferral_of, now_or_later

register_step_part(__name__, "expert GEMMs")


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


MOST_ELEMENTS = 2**31
"""As many elements as a grouped GEMM's rows or results cannot have on a GPU."""


def check_rows(rows_RI: Tensor, other_width: int, flag: str, instead: str = "", num_rows: int | None = None) -> None:
    """Refuse too many rows: `grouped_mm` on a GPU counts their elements in 32 bits (torchtitan#1932). Shapes are on the
    host: no wait. num_rows: if they are not as many as it is given."""
    given, width = rows_RI.shape
    num_rows = given if num_rows is None else num_rows
    elements = num_rows * max(width, other_width)
    if elements >= MOST_ELEMENTS and not computes_on_cpu(rows_RI):
        raise ExpertMeshError(
            f"{flag} takes fewer than 2^31 elements; {num_rows} tokens on this rank, {width} and "
            f"{other_width} wide, have {elements}; use a smaller --per-device-train-batch-size (and a "
            f"larger --gradient-accumulation-steps), or a smaller --max-seq-length{instead}"
        )


def grouped_mlp(
    rows_RD: Tensor, experts: ExpertRows, firsts: Sequence[Tensor], w2: Tensor, gmm: GroupedMatmul, needs_output: bool
) -> Tensor:
    """A fused expert kernel (see `moe.kernels.kernel_registry`) by grouped GEMMs, three forward and six backward; two
    and four of gate and up in one.

    Args:
        firsts: w1 and v1, or one tensor of both.
    """
    w2_eFD, *firsts_eFD = (weight.view(experts.num_experts, -1, rows_RD.shape[1]) for weight in (w2, *firsts))
    gmm = for_any_rows(gmm, experts.num_experts)
    out_RD: Tensor = _GroupedMLP.apply(rows_RD, w2_eFD, experts.weights_R, experts, gmm, needs_output, *firsts_eFD)
    return out_RD


class _GroupedMLP(torch.autograd.Function):
    """Written by hand so that only two of four tensors (R, F) are kept: the activation's result is recomputed in
    backward, in the same pass as its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        w2_eFD: Tensor,
        weights_R: Tensor | None,
        experts: ExpertRows,
        gmm: GroupedMatmul,
        needs_output: bool,
        *firsts_eFD: Tensor,
    ) -> Tensor:

        def gate_and_up() -> list[Tensor]:
            rows = gmm.cast(rows_RD, False)
            return [gmm(rows, weight_eFD, trans_b=True) for weight_eFD in firsts_eFD]

        kept = experts.kept_product(gate_and_up)
        ctx.save_for_backward(rows_RD, w2_eFD, weights_R, *firsts_eFD, *kept)
        ctx.gmm, ctx.deferral = gmm, deferral_of(experts.call, w2_eFD, *firsts_eFD)
        if not needs_output:
            return placeholder(rows_RD, *rows_RD.shape)
        gate_RF, up_RF = kept if len(kept) == 2 else kept[0].chunk(2, dim=1)
        return gmm(swiglu_forward(gate_RF, up_RF, weights_R), w2_eFD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, w2_eFD, weights_R, *others = ctx.saved_tensors
        firsts_eFD, kept = others[: len(others) // 2], others[len(others) // 2 :]
        gmm = ctx.gmm
        # a gradient may come expanded, as that of a sum does, which grouped GEMMs do not take
        grad_RD = grad_RD.contiguous()
        activation_backward = partial(
            swiglu_backward if len(kept) == 2 else swiglu_joined_backward, weights_R=weights_R
        )
        *d_firsts, hidden_RF, d_weights_R = activation_backward(gmm(grad_RD, w2_eFD, trans_b=True), *kept)
        grad_rows_RD, *more = (gmm(d, weight_eFD) for d, weight_eFD in zip(d_firsts, firsts_eFD, strict=True))
        for each in more:
            grad_rows_RD.add_(each)
        weight_gradients = partial(_weight_gradients, gmm)
        grad_w2, *grads = now_or_later(ctx.deferral, weight_gradients, rows_RD, grad_RD, hidden_RF, *d_firsts)
        return grad_rows_RD, grad_w2, d_weights_R, None, None, None, *grads


def _weight_gradients(
    gmm: GroupedMatmul, rows_RD: Tensor, grad_RD: Tensor, hidden_RF: Tensor, *d_firsts: Tensor
) -> tuple[Tensor, ...]:
    """Those of w2, and of the first matrices, each as it lies."""
    rows = gmm.cast(rows_RD, True)
    return gmm(hidden_RF, grad_RD, trans_a=True), *(gmm(d, rows, trans_a=True) for d in d_firsts)
