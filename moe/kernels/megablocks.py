"""MegaBlocks' expert kernel: the block-sparse matmuls of stanford-stk.

Neither package, nor triton, is imported before the kernel runs. Where MegaBlocks' compiled helper operators
are missing, those of `moe.kernels.megablocks_ops` take their place.

Shape suffixes: R rows, P rows with each expert's padded to full blocks, D model width, F expert width, e experts on
this rank.
"""

import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..util.errors import ExpertMeshError
from ..util.recompute_cache import placeholder
from ..util.step_parts import register_step_part
from .expert_rows import ExpertRows
from .kernel_registry import AutoPlace, ExpertKernel, KernelNeeds, NotInstalled
from .swiglu import SwiGLU

register_step_part(__name__, "expert GEMMs")

BLOCK = 128
"""Side of a block of stk's matrices; MegaBlocks knows no other."""

SPARSE_PACKAGES = ("megablocks", "stk", "triton")

_MAKE = "make install (without a clone: docs/how-to/install.md)"
_INSTALL = {
    "megablocks": _MAKE,
    "stk": _MAKE,
    "triton": "pip install 'triton>=3.6'",
}


def megablocks_sparse(
    rows_RD: Tensor, experts: ExpertRows, w1: Tensor, v1: Tensor, w2: Tensor, *, needs_output: bool = True
) -> Tensor:
    """Block-sparse matmuls over all experts at once, as `SparseGLU` in MegaBlocks (Gale et al. 2022).

    The hidden activations of all experts are one matrix (P, e·F) whose blocks are zero but where rows and columns
    belong to the same expert. The host waits once, for P. In fp32, a GPU multiplies in TF32.

    Raises:
        ExpertMeshError: D or F is no multiple of 128, a tensor is too large, or MegaBlocks is not installed.
    """
    width = w1.shape[0] // experts.num_experts
    check_megablocks_sparse(rows_RD.shape[1], width)
    check_offsets(rows_RD.shape[0] + (BLOCK - 1) * experts.num_experts, width, w1)
    load_megablocks()
    import megablocks.ops as ops
    import stk

    counts_e = experts.counts_e.int()
    ends_e = counts_e.cumsum(0, dtype=torch.int32)
    padded_ends_e = ops.round_up(counts_e, BLOCK).cumsum(0, dtype=torch.int32)
    rows = torch.arange(rows_RD.shape[0], dtype=torch.int32, device=rows_RD.device)
    expert_R = torch.searchsorted(ends_e, rows, right=True, out_int32=True)

    rows_PD = ops.padded_gather(rows_RD.contiguous(), rows, expert_R, ends_e, padded_ends_e, 1)
    topology = _topology(padded_ends_e, rows_PD.shape[0], width)
    gate, up = (stk.ops.sdd(rows_PD, weight.t(), topology).data for weight in (w1, v1))
    if experts.weights_R is None:
        hidden = SwiGLU.apply(gate, up, None)
    else:
        position_R = _padded_positions(rows, expert_R, ends_e, padded_ends_e)
        weights_P = rows_PD.new_zeros(rows_PD.shape[0], dtype=experts.weights_R.dtype)
        weights_P = weights_P.index_copy(0, position_R, experts.weights_R)
        # a block has 128 rows, and each of them a part in every block of its row of blocks
        by_block = weights_P.view(-1, 1, BLOCK).expand(-1, width // BLOCK, -1).reshape(-1)
        hidden = SwiGLU.apply(gate.flatten(0, 1), up.flatten(0, 1), by_block).view_as(gate)
    out_PD = _LastProduct.apply(hidden, w2, topology.size(), needs_output, *_indices(topology))
    return _Unpad.apply(out_PD, rows, expert_R, ends_e, padded_ends_e, needs_output)


def _topology(padded_ends_e: Tensor, num_rows: int, width: int) -> Any:
    """stk.Matrix (P, e·F) on the meta device with a row of F / 128 blocks for each 128 rows, under their expert's
    columns; and the same by columns (`ParallelDroplessMLP.topology` and `.sparse_transpose` in MegaBlocks).

    Indices are int32. MegaBlocks has int16, which a Triton of today (3.9, say) multiplies by 128 in 16 bits within
    stk's kernels: from block 256 on that is silently another block.
    """
    import megablocks.ops as ops
    import stk

    block_rows, blocks_per_row = num_rows // BLOCK, width // BLOCK
    block_columns = padded_ends_e.numel() * blocks_per_row
    device = padded_ends_e.device
    offsets = torch.arange(block_rows + 1, dtype=torch.int32, device=device) * blocks_per_row
    column_indices = ops.topology(padded_ends_e, BLOCK, block_rows, blocks_per_row).int()
    row_indices = torch.arange(block_rows, dtype=torch.int32, device=device).repeat_interleave(
        blocks_per_row, output_size=column_indices.numel()
    )

    _, by_column = ops.sort(column_indices, max((block_columns - 1).bit_length(), 1))
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    offsets_t = torch.cat([zero, ops.histogram(column_indices, block_columns).cumsum(0, dtype=torch.int32)])
    return stk.Matrix(
        (num_rows, block_columns * BLOCK),
        torch.empty(column_indices.numel(), BLOCK, BLOCK, device="meta"),
        row_indices,
        column_indices,
        offsets,
        row_indices.gather(0, by_column.long()),
        offsets_t,
        by_column,
    )


def _indices(t: Any) -> tuple[Tensor, ...]:
    """The indices, in the order in which `stk.Matrix` takes them."""
    return (t.row_indices, t.column_indices, t.offsets, t.column_indices_t, t.offsets_t, t.block_offsets_t)


class _LastProduct(torch.autograd.Function):
    """`stk.ops.dsd` of the hidden activations and w2, whose result can be left out (see `moe.util.recompute_cache`)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, w2: Tensor, size: torch.Size, needs_output: bool, *indices: Tensor) -> Tensor:
        import stk

        ctx.save_for_backward(hidden, w2, *indices)
        ctx.size = size
        if not needs_output:
            return placeholder(w2, size[0], w2.shape[1])
        out_PD: Tensor = stk.ops.dsd(stk.Matrix(size, hidden, *indices), w2)
        return out_PD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor | None, ...]:
        import stk

        hidden, w2, *indices = ctx.saved_tensors
        matrix = stk.Matrix(ctx.size, hidden, *indices)
        grad_hidden = stk.ops.sdd(grad_PD, w2.t(), matrix).data
        grad_w2 = stk.ops.dsd(matrix.t(), grad_PD) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_w2, None, None, *(None for _ in indices)


class _Unpad(torch.autograd.Function):
    """`megablocks.ops.padded_scatter`, whose own backward would ask the device for P again, and wait."""

    @staticmethod
    def forward(
        ctx: Any,
        padded_PD: Tensor,
        rows: Tensor,
        expert_R: Tensor,
        ends_e: Tensor,
        padded_ends_e: Tensor,
        needs_output: bool,
    ) -> Tensor:
        from megablocks.backend import kernels

        ctx.save_for_backward(rows, expert_R, ends_e, padded_ends_e)
        ctx.padded_shape = padded_PD.shape
        if not needs_output:
            return placeholder(padded_PD, rows.numel(), padded_PD.shape[1])
        return kernels.padded_scatter(padded_PD, rows, expert_R, None, ends_e, padded_ends_e, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows, expert_R, ends_e, padded_ends_e = ctx.saved_tensors
        position_R = _padded_positions(rows, expert_R, ends_e, padded_ends_e)
        grad_PD = grad_RD.new_zeros(ctx.padded_shape).index_copy_(0, position_R, grad_RD)
        return grad_PD, None, None, None, None, None


def _padded_positions(rows: Tensor, expert_R: Tensor, ends_e: Tensor, padded_ends_e: Tensor) -> Tensor:
    """The place of each row among those with padding: an expert's rows end at ends_e and its padding at padded_ends_e,
    so all padding before an expert shifts its rows."""
    padding_before_e = torch.cat([ends_e.new_zeros(1), (padded_ends_e - ends_e)[:-1]])
    return (rows + padding_before_e.index_select(0, expert_R)).long()


def check_megablocks_sparse(model_width: int, width: int) -> None:
    """
    Raises:
        ExpertMeshError: a width is no multiple of 128.
    """
    if model_width % BLOCK or width % BLOCK:
        raise ExpertMeshError(
            f"--expert-kernel megablocks-sparse needs hidden and expert width to be multiples of {BLOCK}; "
            f"this model has {model_width} and {width}; use --expert-kernel torch-grouped or loop"
        )


def check_offsets(padded_rows: int, width: int, weight: Tensor) -> None:
    """
    Raises:
        ExpertMeshError: the kernels' offsets into a tensor, 32 bits wide, would wrap around.
    """
    largest = max(padded_rows * max(width, weight.shape[1]), weight.numel())
    if largest >= 2**31:
        raise ExpertMeshError(
            "--expert-kernel megablocks-sparse takes tensors of fewer than 2^31 elements; with "
            f"{padded_rows} tokens and weights {tuple(weight.shape)} on this rank, one has {largest}; "
            "use --expert-kernel loop, or fewer tokens"
        )


def require(what: str, packages: Sequence[str]) -> None:
    """
    Raises:
        NotInstalled: a package is not installed; the message says that `what` needs it, and how to install it.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        commands = dict.fromkeys(_INSTALL[package] for package in missing)
        raise NotInstalled(f"{what} needs {' and '.join(missing)}, not installed here; run {' && '.join(commands)}")


@cache
def load_megablocks() -> None:
    """Import MegaBlocks, on our helper operators where its compiled ones are missing or were built for another torch.

    Raises:
        ExpertMeshError: it is not installed.
    """
    require("--expert-kernel megablocks-sparse", SPARSE_PACKAGES)
    try:
        import megablocks_ops
    except ImportError:
        from . import megablocks_ops

        sys.modules["megablocks_ops"] = megablocks_ops
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grouped GEMM not available")
        import megablocks  # noqa: F401


def _check(needs: KernelNeeds) -> None:
    for model_width, width in needs.widths:
        check_megablocks_sparse(model_width, width)
    flag = "--expert-kernel megablocks-sparse"
    if needs.device_type != "cuda":
        raise ExpertMeshError(f"{flag} needs a GPU; this run is on {needs.device_type}; use loop")
    require(flag, SPARSE_PACKAGES)


def _auto(needs: KernelNeeds) -> AutoPlace | None:
    if needs.dtype == torch.float32:
        return None
    return AutoPlace(20, "in grouped_mm this GPU would launch one matmul per expert")


MEGABLOCKS_SPARSE = ExpertKernel(
    product=None,
    fused=megablocks_sparse,
    joined=None,
    weighs=True,
    gathers=False,
    low_rank=None,
    check=_check,
    auto=_auto,
    note=lambda needs: "in fp32 it multiplies in TF32" if needs.dtype == torch.float32 else "",
)
