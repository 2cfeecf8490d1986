"""Stand-ins for `megablocks_ops`, the helper operators that MegaBlocks compiles with nvcc.

Same names, arguments and results as MegaBlocks 0.10's csrc/, in torch operations on whatever device the tensors are on,
none of which makes the host wait. `moe.kernels.megablocks.load_megablocks` puts this module in place of the
compiled one where that was not built: it does not compile for CUDA 13, and takes no CPU tensors.

Shape suffixes: B batch, N entries, C bins, M outputs.
"""

import torch
from torch import Tensor


def exclusive_cumsum(x_BN: Tensor, dim: int, out_BN: Tensor) -> None:
    """out = sum along `dim` of all entries before each one; int16, int32 or int64."""
    torch.cumsum(x_BN, dim, dtype=x_BN.dtype, out=out_BN)
    out_BN.sub_(x_BN)


def inclusive_cumsum(x_BN: Tensor, dim: int, out_BN: Tensor) -> None:
    """out = sum along `dim` of all entries up to each one; int16, int32 or int64."""
    torch.cumsum(x_BN, dim, dtype=x_BN.dtype, out=out_BN)


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """How often each of 0 .. num_bins - 1 occurs in x (N) or in each row of x (B, N): int32, (C) or (B, C)."""
    counts = torch.zeros(*x.shape[:-1], num_bins, dtype=torch.int32, device=x.device)
    return counts.scatter_add_(-1, x.long(), torch.ones_like(x, dtype=torch.int32))


def sort(x_N: Tensor, end_bit: int, x_out_N: Tensor, iota_out_N: Tensor) -> None:
    """Sort x stably; writes it and the former index of each entry, both in x's dtype. Values use the lowest `end_bit`
    bits only."""
    values_N, order_N = torch.sort(x_N, stable=True)
    x_out_N.copy_(values_N)
    iota_out_N.copy_(order_N)


def indices(
    padded_bins_C: Tensor, block_size: int, output_block_rows: int, output_block_columns: int, out: Tensor
) -> None:
    """Block columns of a block-sparse matrix in which the rows of bin i have values in columns of expert i only.

    Args:
        padded_bins_C: int32, the row at which each bin ends, a multiple of block_size.
        out: int16, (output_block_rows · output_block_columns); of block row r in bin i, entry c is
            i · output_block_columns + c.
    """
    rows = torch.arange(output_block_rows, dtype=torch.int32, device=out.device)
    bins = _bin_of(rows * block_size, padded_bins_C)
    columns = torch.arange(output_block_columns, device=out.device)
    out.copy_((bins.unsqueeze(1) * output_block_columns + columns).flatten())


def replicate_forward(x_BC: Tensor, bins_C: Tensor, out_BM: Tensor) -> None:
    """out[:, m] = x[:, i], i being the bin that m falls into; bins_C holds the end of each bin, int32."""
    out_BM.copy_(x_BC.index_select(1, _bin_of_each(out_BM, bins_C)))


def replicate_backward(grad_BM: Tensor, bins_C: Tensor, out_BC: Tensor) -> None:
    """out[:, i] = sum of grad[:, m] over all m in bin i."""
    out_BC.zero_().index_add_(1, _bin_of_each(grad_BM, bins_C), grad_BM)


def _bin_of_each(entries_BM: Tensor, bins_C: Tensor) -> Tensor:
    return _bin_of(torch.arange(entries_BM.shape[1], dtype=torch.int32, device=bins_C.device), bins_C)


def _bin_of(positions: Tensor, bins_C: Tensor) -> Tensor:
    """int64, the first bin that ends after each position: empty bins are passed over."""
    return torch.searchsorted(bins_C, positions, right=True)
