"""What an expert kernel is: how each expert's matmuls with its rows are computed.

A kernel has a `product`, a matmul of all experts, of which experts of any family are composed (see
`moe.kernels.expert_products`), or, for plain SwiGLU, a complete expert at once, `fused`, or both:

    fused(rows_RD, experts, w1, v1, w2, needs_output=True) -> rows_RD

`experts` says which rows are whose (`moe.kernels.expert_rows`). w1 (gate), v1 (up) and w2 (down, transposed) are each
(e·F, D): MegaBlocks' layout, experts concatenated along dim 0. For expert i: (silu(x @ w1_i.T) * (x @ v1_i.T)) @ w2_i,
as the experts modules of most families in transformers. Without `needs_output` the last matmul is left out, and the
result serves only for its shape and its backward (see `moe.util.recompute_cache`). Where `experts` has weights of
rows, a kernel that `weighs` multiplies what the last matmul takes by them (see `moe.kernels.weighing`); others get
none.

A third way, `joined`, is `fused` with w1 and v1 in one tensor, for one GEMM in place of two:

    joined(rows_RD, experts, gate_up_eGD, w2, needs_output=True) -> rows_RD

where expert i has w1_i's rows and then v1_i's. It sums up in another order (see `moe.kernels.grouped`). Where `experts`
says which rows are to be gathered (see `moe.kernels.gathered_rows`), a kernel that `gathers` is given those of tokens;
others never are.

Shape suffixes: R rows, D model width, F expert width, G = 2·F, e experts on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..util.entry_checks import check_fields, check_value
from ..util.errors import ExpertMeshError
from .expert_products import Product
from .expert_rows import ExpertRows
from .kernel_entries import KERNELS, KernelEntry


class FusedSwiGLU(Protocol):
    def __call__(
        self, rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
    ) -> Tensor: ...


class JoinedSwiGLU(Protocol):
    def __call__(
        self, rows_RD: Tensor, experts: ExpertRows, gate_up_eGD: Tensor, w2: Tensor, *, needs_output: bool = True
    ) -> Tensor: ...


@dataclass(frozen=True)
class KernelNeeds:
    """The properties that decide whether a kernel can compute a model's experts.

    widths: D and F of each kind of MoE layer. is_swiglu: whether all experts are plain SwiGLU without biases and
    adapters. Adapters' ranks are no matter: their products are padded. assumed_capability: of a GPU that this process
    cannot ask.
    """

    device_type: str
    dtype: torch.dtype
    widths: tuple[tuple[int, int], ...]
    is_swiglu: bool = True
    assumed_capability: tuple[int, int] | None = None

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability; not to be asked for on another device."""
        return self.assumed_capability or torch.cuda.get_device_capability()


class NotInstalled(ExpertMeshError):
    """A kernel could compute these experts if its packages were installed."""


class AutoPlace(NamedTuple):
    """Where a kernel stands in the order in which `--expert-kernel auto` tries them, the highest first, and why it
    would be chosen."""

    preference: int
    why: str


@dataclass(frozen=True)
class ExpertKernel:
    """One way of computing experts.

    Attributes:
        product, fused: at least one of them; without `product` it computes plain SwiGLU alone.
        joined: beside `fused` alone.
        weighs: whether `fused` and `joined` heed the rows' weights. Around a `product` they are applied in any case.
        gathers: whether `joined` can gather rows.
        low_rank: what multiplies by adapters' matrices, of any rank, where that is not `product`.
        check: raises an ExpertMeshError if it is not installed, or cannot compute such experts. What `product` is
            needed for is checked already.
        auto: for experts that it can compute; None: `auto` never takes it for these.
        note: what to say beside "asked for" of such experts; mostly empty.
    """

    product: Product | None
    fused: FusedSwiGLU | None
    joined: JoinedSwiGLU | None
    weighs: bool
    gathers: bool
    low_rank: Product | None
    check: Callable[[KernelNeeds], None]
    auto: Callable[[KernelNeeds], AutoPlace | None]
    note: Callable[[KernelNeeds], str]


def register_expert_kernel(entry: KernelEntry) -> None:
    """Make a kernel known to `--expert-kernel` and its `auto`, to checks, `--help` and forecasts. To be called on all
    ranks, before flags are read.

    Raises:
        ValueError: its name is taken, or something does not go together or is missing.
    """
    what, kernel, names = f"--expert-kernel {entry.name}", entry.code, KERNELS.names()
    check_value(what, "implementation", kernel, ExpertKernel)
    if kernel.product is None and kernel.fused is None:
        raise ValueError(f"{what}: has neither product nor fused")
    if kernel.joined is not None and kernel.fused is None:
        raise ValueError(f"{what}: has joined, which is beside fused, and no fused")
    if entry.beside_fp8 and kernel.product is None:
        raise ValueError(f"{what}: has no product, by which it would multiply beside_fp8")
    if entry.recorded_as not in (entry.name, *names):
        raise ValueError(f"{what}: is recorded_as {entry.recorded_as}; known are {', '.join(names)}")
    check_fields(what, kernel)
    KERNELS.register(entry)
