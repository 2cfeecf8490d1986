"""The expert kernel `quack`: grouped GEMMs of the package quack-kernels, in CuTe DSL for Hopper and Blackwell. No GPU
has run it yet.

Where gate and up are one tensor, the activation is computed in the GEMMs' epilogues, from sums in fp32, forward and
backward. For that the package has the columns of gate and up take turns: gate 0, up 0, gate 1, up 1. A weight need not
lie so: `concat_layout` names a tensor of which two halves do, as w1's rows and then v1's, and which the kernel reads or
writes in turns, by strides. Our weights are given as they lie, or as transposed views, and so are their gradients; in
turns are only gate and up of rows, (R, G), and their gradients, which nothing but the package's GEMMs reads.

Two tensors have no such strides. To copy w1 and v1 into one moves as many bytes as the epilogues save where an expert
has D rows: there the activation is a pass of its own, as in `torch-grouped`.

Where gate and up are one tensor, rows of tokens need not be brought into the order of experts either: the GEMMs gather
them, and the gradients of the experts' sums, by `A_idx` (see `moe.kernels.gathered_rows`). Only their first operand can
be gathered, so that gradients of weights are computed as transposed ones, and written by strides.

The package tunes itself by trying out tiles, for each number of rows anew, unless `tuned` is False. It leaves no
multiprocessor free beside all-to-alls (see `moe.kernels.carve_out`).

Shape suffixes: R rows sorted by expert, U rows of which these may be gathered (else U = R), D model width, F expert
width, G = 2·F (in turns in rows, in halves in weights), e experts on this rank, I and O the widths of a product's input
and output, K what is summed over, N the other width.
"""

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.errors import ExpertMeshError
from ..util.recompute_cache import placeholder
from ..util.step_parts import register_step_part
from ..util.versions import installed_version, takes
from .expert_products import grouped_product, padded
from .expert_rows import ExpertRows
from .grouped import GroupedMatmul, check_rows, grouped_mlp
from .kernel_registry import ExpertKernel, KernelNeeds, NotInstalled
from .swiglu import swiglu_forward
from .weighing import weighed
from .weight_gradients import deferral_of, now_or_later

register_step_part(__name__, "expert GEMMs")

FLAG = "--expert-kernel quack"
PACKAGE, AT_LEAST = "quack-kernels", "0.6.5"
"""What is installed, and the release that was read."""
MODULE = "quack.gemm_interface"

TAKEN = {
    "gemm": (("A", "B"), ("out", "cu_seqlens_m", "cu_seqlens_k", "A_idx", "tuned", "concat_layout")),
    "gemm_gated": (("A", "B"), ("activation", "cu_seqlens_m", "A_idx", "tuned", "concat_layout")),
    "gemm_dgated": (
        ("A", "B", "PreAct"),
        ("activation", "cu_seqlens_m", "A_idx", "tuned", "colvec_scale", "colvec_reduce"),
    ),
}
"""What its functions are given: by position, and by name."""
PLANS = {"quack.gemm": ("_gemm_plan_cache",), "quack.epilogue.library": ("linear_act_mod", "dgated_mod")}
"""Where it keeps its plans (see `_forget_plans`)."""
MOST_PLANS = 8192
"""Of GEMMs without an epilogue of ours; with the others' some 30 MB."""

CARDS = {9: "Hopper", 10: "Blackwell"}
"""Major compute capabilities that it is for, with their names."""
_ELEMENTS = 8
"""In 16 bytes of bf16, of which a row's length is a multiple."""


def quack(
    rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """A complete expert at once.

    Raises:
        ExpertMeshError: R times D or F reaches 2^31.
    """
    check_rows(rows_RD, w1.shape[0] // experts.num_experts, FLAG)
    return grouped_mlp(rows_RD, experts, (w1, v1), w2, _Gemms.of(experts).grouped_mm, needs_output)


def quack_joined(
    rows_RD: Tensor, experts: ExpertRows, gate_up_eGD: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """`quack` with gate and up in one GEMM, and the activation in it. It gathers rows: rows_RD are then tokens, (U, D).

    Raises:
        ExpertMeshError: R times D or G reaches 2^31.
    """
    check_rows(rows_RD, gate_up_eGD.shape[1], FLAG, num_rows=experts.num_rows)
    gemms = _Gemms.of(experts)
    if experts.num_rows == 0:
        return grouped_mlp(rows_RD, experts, (gate_up_eGD,), w2, gemms.grouped_mm, needs_output)
    w2_eFD = w2.view(experts.num_experts, -1, w2.shape[1])
    out_RD: Tensor = _GatedMLP.apply(rows_RD, gate_up_eGD, w2_eFD, experts.weights_R, experts, gemms, needs_output)
    return out_RD


def quack_product(x_RI: Tensor, experts: ExpertRows, weight_eOI: Tensor) -> Tensor:
    """A single product.

    Raises:
        ExpertMeshError: R times I or O reaches 2^31.
    """
    check_rows(x_RI, weight_eOI.shape[1], FLAG)
    return grouped_product(x_RI, experts, weight_eOI, _Gemms.of(experts).grouped_mm)


@dataclass(frozen=True)
class _Gemms:
    """The package's functions, for experts whose rows begin and end at `bounds`, int32, (e + 1)."""

    bounds: Tensor

    @classmethod
    def of(cls, experts: ExpertRows) -> "_Gemms":
        return cls(F.pad(experts.counts_e.cumsum(0, dtype=torch.int32), (1, 0)))

    @property
    def grouped_mm(self) -> GroupedMatmul:
        def multiply(a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
            if trans_a:
                return self.over_rows(a, b)
            return self.by_row(a, b.transpose(1, 2) if trans_b else b)

        return GroupedMatmul(multiply)

    def by_row(self, x_RK: Tensor, weight_eKN: Tensor, **layout: Any) -> Tensor:
        """Each expert's rows by its matrix, (R, N)."""
        out_RN: Tensor = _package().gemm(x_RK, weight_eKN, cu_seqlens_m=self.bounds, tuned=False, **layout)
        return out_RN

    def over_rows(self, x_RK: Tensor, y_UN: Tensor, token_R: Tensor | None = None, **layout: Any) -> Tensor:
        """Of each expert's rows x.T · y, (e, K, N), y gathered where `token_R` is given; zeros without rows."""
        if token_R is None:
            out_eKN: Tensor = _package().gemm(x_RK.t(), y_UN, cu_seqlens_k=self.bounds, tuned=False, **layout)
            return out_eKN
        out_eKN = x_RK.new_empty(len(self.bounds) - 1, x_RK.shape[1], y_UN.shape[1])
        rows: dict[str, Any] = {"cu_seqlens_k": self.bounds, "A_idx": token_R, "tuned": False}
        _package().gemm(y_UN.t(), x_RK, out=out_eKN.transpose(1, 2), **rows, **layout)
        return out_eKN

    def _swiglu(self, token_R: Tensor | None) -> dict[str, Any]:
        return {"activation": "swiglu", "cu_seqlens_m": self.bounds, "A_idx": token_R, "tuned": False}

    def gated(self, rows_UD: Tensor, gate_up_eGD: Tensor, token_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gate and up, (R, G), and silu(gate) * up, (R, F), of rows that are gathered where `token_R` is given."""
        how = self._swiglu(token_R) | {"concat_layout": ("B",)}
        gate_up_RG, hidden_RF = _package().gemm_gated(rows_UD, gate_up_eGD.transpose(1, 2), **how)
        return gate_up_RG, hidden_RF

    def gated_backward(
        self, grad_UD: Tensor, w2_eFD: Tensor, gate_up_RG: Tensor, weights_R: Tensor | None, token_R: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of gate and up, (R, G), from the gradient of what w2 makes of silu(gate) * up times the row's
        weight, gathered where `token_R` is given; that, (R, F); and the weights' gradient."""
        how = self._swiglu(token_R)
        if weights_R is not None:
            how |= {"colvec_scale": weights_R, "colvec_reduce": True}
        d_gate_up_RG, hidden_RF, *more = _package().gemm_dgated(grad_UD, w2_eFD.transpose(1, 2), gate_up_RG, **how)
        return d_gate_up_RG, hidden_RF, *(more or [None])


def _package() -> Any:
    _forget_plans()
    return importlib.import_module(MODULE)


def _forget_plans() -> None:
    """It keeps a plan of each GEMM for each number of rows that it has ever seen, some 14 KB for those of a layer. What
    is needed is made again, in a tenth of a millisecond each; compiled kernels are kept elsewhere."""
    plans, *rest = (getattr(importlib.import_module(module), name) for module in PLANS for name in PLANS[module])
    if len(plans) > MOST_PLANS:
        plans.clear()
        for makers in rest:
            makers.cache_clear()


class _GatedMLP(torch.autograd.Function):
    """As `moe.kernels.grouped` has it, of rows of which there are some: it keeps gate and up, and has the activation's
    result computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_UD: Tensor,
        gate_up_eGD: Tensor,
        w2_eFD: Tensor,
        weights_R: Tensor | None,
        experts: ExpertRows,
        gemms: _Gemms,
        needs_output: bool,
    ) -> Tensor:
        computed = []
        token_R = None if experts.gathered is None else experts.gathered.take("token_R")

        def gate_and_up() -> Tensor:
            gate_up_RG, hidden_RF = gemms.gated(rows_UD, gate_up_eGD, token_R)
            computed.append(hidden_RF)
            return gate_up_RG

        gate_up_RG = experts.kept_product(gate_and_up)
        ctx.save_for_backward(rows_UD, gate_up_eGD, w2_eFD, weights_R, gate_up_RG, token_R)
        ctx.gemms, ctx.deferral = gemms, deferral_of(experts.call, gate_up_eGD, w2_eFD)
        ctx.gathered = experts.gathered
        if not needs_output:
            return placeholder(rows_UD, experts.num_rows, rows_UD.shape[1])
        if not computed:  # in a replay gate and up are those that were kept
            gate_RF, up_RF = (gate_up_RG[:, i::2].contiguous() for i in (0, 1))
            hidden_RF = swiglu_forward(gate_RF, up_RF, weights_R)
        else:
            hidden_RF = computed[0] if weights_R is None else weighed(computed[0], weights_R)
        return gemms.by_row(hidden_RF, w2_eFD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UD: Tensor) -> tuple[Tensor | None, ...]:
        rows_UD, gate_up_eGD, w2_eFD, weights_R, gate_up_RG, token_R = ctx.saved_tensors
        if token_R is not None:
            grad_UD = ctx.gathered.take("grad_sums_UD")
        # a gradient may come expanded, as that of a sum does, which grouped GEMMs do not take
        grad_UD = grad_UD.contiguous()
        d_gate_up_RG, hidden_RF, d_weights_R = ctx.gemms.gated_backward(grad_UD, w2_eFD, gate_up_RG, weights_R, token_R)
        grad_rows_RD = ctx.gemms.by_row(d_gate_up_RG, gate_up_eGD, concat_layout=("B",))
        weight_gradients = partial(_weight_gradients, ctx.gemms)
        grads = now_or_later(ctx.deferral, weight_gradients, rows_UD, grad_UD, hidden_RF, d_gate_up_RG, token_R)
        if token_R is not None:
            ctx.gathered.put("grad_rows_RD", grad_rows_RD)
            grad_rows_RD = placeholder(rows_UD, *rows_UD.shape)
        return grad_rows_RD, *grads, d_weights_R, None, None, None


def _weight_gradients(
    gemms: _Gemms, rows_UD: Tensor, grad_UD: Tensor, hidden_RF: Tensor, d_gate_up_RG: Tensor, token_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Those of gate and up, in halves, and of w2, each as it lies."""
    d_gate_up_eGD = gemms.over_rows(d_gate_up_RG, rows_UD, token_R, concat_layout=("out",))
    return d_gate_up_eGD, gemms.over_rows(hidden_RF, grad_UD, token_R)


def _lacking() -> str:
    """What the installed package lacks of what is expected of it, in words; empty if nothing.

    Raises:
        Exception: anything, where it cannot be imported.
    """
    functions = vars(importlib.import_module(MODULE))
    for name, (by_place, by_name) in TAKEN.items():
        if name not in functions or not takes(functions[name], by_place, by_name):
            return f"{MODULE}.{name} does not take what it is given"
    for module, names in PLANS.items():
        if missing := [name for name in names if not hasattr(importlib.import_module(module), name)]:
            return f"{module} has no {missing[0]}"
    return ""


def _check(needs: KernelNeeds) -> None:
    if needs.device_type != "cuda":
        raise ExpertMeshError(f"{FLAG} needs a GPU; this run is on {needs.device_type}; use loop")
    if needs.dtype != torch.bfloat16:
        raise ExpertMeshError(f"{FLAG} multiplies in bf16; this run computes in {needs.dtype}; add --bf16, or use loop")
    for widths in needs.widths:
        if any(width % _ELEMENTS for width in widths):
            raise ExpertMeshError(
                f"{FLAG} needs hidden and expert width to be multiples of {_ELEMENTS}; this model has {widths[0]} and "
                f"{widths[1]}; use loop"
            )
    major, minor = needs.capability
    if major not in CARDS:
        known = " or ".join(f"{each} ({name})" for each, name in CARDS.items())
        raise ExpertMeshError(
            f"{FLAG} needs a GPU of compute capability {known}; this one has {major}.{minor}; use torch-grouped"
        )
    _check_package()


def _check_package() -> None:
    installed = installed_version(PACKAGE)
    if not installed or Version(installed) < Version(AT_LEAST):
        found = f"this is {installed}" if installed else "not installed here"
        raise NotInstalled(f"{FLAG} needs {PACKAGE} {AT_LEAST}, {found}; run pip install '{PACKAGE}>={AT_LEAST}'")
    try:
        why = _lacking()
    except Exception as error:  # built for another torch or CUDA it fails in many ways
        why = "cannot be imported: " + " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if why:
        raise ExpertMeshError(f"{FLAG}: {PACKAGE} {installed}: {why}; use torch-grouped")


QUACK = ExpertKernel(
    product=quack_product,
    fused=quack,
    joined=quack_joined,
    weighs=True,
    gathers=True,
    low_rank=padded(quack_product),
    check=_check,
    auto=lambda needs: None,
    note=lambda needs: "no GPU has run it in our tests",
)
