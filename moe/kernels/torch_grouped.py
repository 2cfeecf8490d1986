"""The expert kernel `torch-grouped`: `torch.nn.functional.grouped_mm` over all experts, without a wait for the device.

The GEMMs of a single expert are ordinary ones: all rows are its own, and a dense GEMM attains more of a GPU's rate than
a grouped one (see `training/model_setup/rates.json`). So are those of few experts (`ExpertRows.most_apart`), one after
the other, where the host knows how many rows each has: it waits for nothing more, and launches as many kernels as there
are experts.

Shape suffixes: R rows, D model width, F expert width, G = 2·F, e experts on this rank, I and O the widths of a
product's input and output.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..util.errors import ExpertMeshError
from ..util.step_parts import register_step_part
from .carve_out import leaving_room
from .expert_products import grouped_product, looped, padded
from .expert_rows import ExpertRows
from .grouped import MOST_ELEMENTS, GroupedMatmul, check_rows, grouped_mlp
from .kernel_registry import AutoPlace, ExpertKernel, KernelNeeds

register_step_part(__name__, "expert GEMMs")


def torch_grouped(
    rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """A complete expert at once.

    Raises:
        ExpertMeshError: D or F times the element size is no multiple of 16 bytes, the dtype is fp64, or on a GPU
            R times D or F reaches 2^31.
    """
    _check_torch_grouped(rows_RD, w1.shape[0] // experts.num_experts)
    return grouped_mlp(rows_RD, experts, (w1, v1), w2, _grouped_mm(experts), needs_output)


def torch_grouped_joined(
    rows_RD: Tensor, experts: ExpertRows, gate_up_eGD: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """`torch_grouped` with gate and up in one GEMM; in two, and with the same limit, where one is too large."""
    num_rows, both = rows_RD.shape[0], gate_up_eGD.shape[1]
    _check_torch_grouped(rows_RD, both // 2)
    firsts = gate_up_eGD.chunk(2, dim=1) if num_rows * both >= MOST_ELEMENTS else (gate_up_eGD,)
    return grouped_mlp(rows_RD, experts, firsts, w2, _grouped_mm(experts), needs_output)


def torch_grouped_product(x_RI: Tensor, experts: ExpertRows, weight_eOI: Tensor) -> Tensor:
    """A single product by `grouped_mm` (see `torch_grouped`)."""
    _check_torch_grouped(x_RI, weight_eOI.shape[1])
    return grouped_product(x_RI, experts, weight_eOI, _grouped_mm(experts))


def _check_torch_grouped(rows_RI: Tensor, other_width: int) -> None:
    _check_grouped_mm(rows_RI.dtype, rows_RI.shape[1], other_width)
    check_rows(rows_RI, other_width, "--expert-kernel torch-grouped", ", or --expert-kernel loop")


def _grouped_mm(experts: ExpertRows) -> GroupedMatmul:
    return GroupedMatmul(leaving_room(_multiply(experts), experts.is_beside))


def _multiply(experts: ExpertRows) -> Callable[..., Tensor]:
    if experts.num_experts == 1:
        return _plain_mm
    if experts.num_experts <= experts.most_apart and experts.on_host is not None:
        return looped(experts.on_host).multiply
    counts_e = experts.counts_e
    ends_e = counts_e.cumsum(0, dtype=torch.int32)

    def gmm(a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        product = F.grouped_mm(a.t() if trans_a else a, b.transpose(1, 2) if trans_b else b, offs=ends_e)
        if trans_a and _leaves_empty_groups(a.device):
            product.masked_fill_((counts_e == 0)[:, None, None], 0)
        return product

    return gmm


def _plain_mm(a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """`grouped_mm` of one expert."""
    if trans_a:
        return torch.mm(a.t(), b).unsqueeze(0)
    (matrix,) = b
    return torch.mm(a, matrix.t() if trans_b else matrix)


def _leaves_empty_groups(device: torch.device) -> bool:
    """Whether `grouped_mm` leaves weight gradients of experts without rows as it found the memory, instead of setting
    them to zero: on GPUs of compute capability 10 (pytorch#172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def _check_grouped_mm(dtype: torch.dtype, model_width: int, width: int) -> None:
    if dtype == torch.float64:
        raise ExpertMeshError("--expert-kernel torch-grouped has no float64; use --expert-kernel loop")
    step = 16 // dtype.itemsize
    if model_width % step or width % step:
        raise ExpertMeshError(
            f"--expert-kernel torch-grouped needs hidden and expert width to be multiples of {step} in {dtype}; this "
            f"model has {model_width} and {width}; use --expert-kernel loop"
        )


def _check_widths(needs: KernelNeeds) -> None:
    for model_width, width in needs.widths:
        _check_grouped_mm(needs.dtype, model_width, width)


def _auto_grouped(needs: KernelNeeds) -> AutoPlace | None:
    """Only bf16 on a GPU has a choice."""
    if needs.device_type == "cpu" or needs.dtype == torch.float32:
        return None
    if _has_grouped_mm(needs):
        return AutoPlace(30, f"one launch for all experts on {needs.device_type}")
    return AutoPlace(10, "as megablocks-sparse is not installed, or does not suit these experts")


def _has_grouped_mm(needs: KernelNeeds) -> bool:
    """Whether this GPU has a kernel for `grouped_mm`: those of compute capability 9 (Hopper) and 10 (Blackwell for
    servers) do. On others, 12 among them, torch loops over the experts, waiting for the device each time
    (`_grouped_mm_fallback` in ATen)."""
    return needs.capability[0] in (9, 10)


TORCH_GROUPED = ExpertKernel(
    product=torch_grouped_product,
    fused=torch_grouped,
    joined=torch_grouped_joined,
    weighs=True,
    gathers=False,
    low_rank=padded(torch_grouped_product),
    check=_check_widths,
    auto=_auto_grouped,
    note=lambda needs: "",
)
