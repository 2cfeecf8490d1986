"""One example of each call that launches Triton kernels, for `benchmarks.kernels`: our wrappers, and MegaBlocks' and
stk's as `moe.kernels.megablocks` calls them. Sizes: a rank of Mixtral 8x7B at ep 8, with one expert.

To add a kernel: a function that calls its wrapper, and an `Example` of it in `EXAMPLES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOKENS, TOP_K, D, F = 4096, 2, 4096, 14336
ROWS = TOKENS * TOP_K


@dataclass(frozen=True)
class Example:
    call: Callable[[torch.dtype], None]
    dtype: torch.dtype
    narrow: dict[str, str] = field(default_factory=dict)
    """What is read or written by less than 128 bits a thread, by the name of its pointer, and why."""
    since: int = 80
    """The least compute capability times ten on which these kernels are ever run."""

    @property
    def title(self) -> str:
        return f"{self.call.__name__.removeprefix('_')} {str(self.dtype).removeprefix('torch.')}"


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory, which begins, as torch's allocator has it, at a multiple of 16 bytes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _swiglu(dtype: torch.dtype) -> None:
    from expertmesh.moe.kernels.swiglu_triton import fused_backward, fused_forward, fused_joined_backward

    grad, gate, up = (_empty(dtype, ROWS, F) for _ in range(3))
    gate_up = _empty(dtype, ROWS, 2 * F)
    for weights in (None, _empty(torch.float32, ROWS)):
        fused_forward(gate, up, weights)
        fused_backward(grad, gate, up, weights)
        fused_forward(gate_up[:, :F], gate_up[:, F:], weights)
        fused_joined_backward(grad, gate_up, weights)


def _weighing(dtype: torch.dtype) -> None:
    from expertmesh.moe.kernels.weighing_triton import fused_weighed, fused_weighed_backward

    grad, hidden, weights = _empty(dtype, ROWS, F), _empty(dtype, ROWS, F), _empty(torch.float32, ROWS)
    fused_weighed(hidden, weights)
    fused_weighed_backward(grad, hidden, weights)


def _permute(dtype: torch.dtype) -> None:
    """With padding, which reads the most; sums in the rows' dtype, and in fp32, as partial sums may travel."""
    from expertmesh.moe.dispatch.permute_triton import fused_combine_backward, fused_gather_sum, fused_spread

    tokens, rows = _empty(dtype, TOKENS, D), _empty(dtype, ROWS, D)
    position = _empty(torch.int64, TOKENS, TOP_K)
    is_kept, weights = _empty(torch.bool, TOKENS, TOP_K), _empty(torch.float32, TOKENS, TOP_K)
    fused_spread(tokens, position, is_kept, ROWS)
    fused_gather_sum(rows, position, is_kept, weights, dtype)
    fused_gather_sum(rows, position, is_kept, None, torch.float32)
    fused_combine_backward(tokens, rows, weights, position, is_kept)


def _dequantizing(dtype: torch.dtype) -> None:
    from expertmesh.moe.linear.dequantize_triton import fused_fp8, fused_mxfp4, fused_nf4

    fused_fp8(_empty(torch.uint8, F, D), _empty(torch.float32, F, 1), dtype)
    pairs = _empty(torch.float32, 256, 2)
    fused_nf4(_empty(torch.uint8, F, D // 2), _empty(torch.float32, F, D // 64), pairs, D, dtype)
    fused_mxfp4(_empty(torch.uint8, F, D // 2), _empty(torch.uint8, F, D // 32), pairs, D, dtype)


def _casts_to_fp8(dtype: torch.dtype) -> None:
    """Rows of what is multiplied, rows of a weight with each width, and columns of both; and where ranks divide what is
    summed over, the largest values first."""
    from expertmesh.moe.kernels.fp8_casts import largest_of_rows
    from expertmesh.moe.kernels.fp8_triton import fused_columns, fused_rows, fused_runs

    ends = _empty(torch.int32, 1)
    for width in (D, F):
        rows = _empty(dtype, ROWS, width)
        fused_rows(rows)
        fused_rows(rows, largest_of_rows(rows))
        fused_runs(rows, ends, ends, ROWS + 16)
    weight = _empty(dtype, 1, F, D)
    fused_columns(weight)
    fused_columns(weight, largest_of_rows(weight.transpose(1, 2)))


def _cross_entropy(dtype: torch.dtype) -> None:
    from expertmesh.training.loss.head_triton import fused_losses_and_gradient

    fused_losses_and_gradient(_empty(dtype, TOKENS, 32000), _empty(torch.int64, TOKENS), _empty(torch.float32, TOKENS))


def _divided_cross_entropy(dtype: torch.dtype) -> None:
    from expertmesh.training.loss.head_triton import fused_gradient, fused_row_figures

    logits, targets = _empty(dtype, TOKENS, 8000), _empty(torch.int64, TOKENS)
    highest, exp_sums, _ = fused_row_figures(logits, targets)
    fused_gradient(logits, targets, highest, exp_sums)


def _megablocks_sparse(dtype: torch.dtype) -> None:
    """Forward and backward, on the CPU: MegaBlocks reads counts from the device. Of what has a size, memory is
    touched for a few rows only."""
    from expertmesh.moe.kernels.expert_rows import ExpertRows
    from expertmesh.moe.kernels.megablocks import megablocks_sparse

    rows_RD = torch.zeros(2 * 128, D, dtype=dtype, requires_grad=True)
    weights = [torch.empty(F, D, dtype=dtype, requires_grad=True) for _ in range(3)]
    experts = ExpertRows(torch.tensor([len(rows_RD)]), len(rows_RD))
    out_RD = megablocks_sparse(rows_RD, experts, *weights)
    torch.autograd.grad(out_RD, (rows_RD, *weights), torch.zeros_like(out_RD))


ONE = "one value per program"
SCALES = "one value per 256"
CODES = "one byte per value, per thread as many as 128 bits of weight hold"
TABLE = "looked up, one value at a time"
WEIGHTS, OF_ROWS = dict.fromkeys(("weights", "sums"), ONE), dict.fromkeys(("weights", "d_weights"), ONE)
CHOICES = dict.fromkeys(("position", "is_kept", "weights", "grad_weights"), "one value per row of D")
ROW_FIGURES = ("highest", "exp_sums", "at_target")
CASTS = {
    **dict.fromkeys(("scales", "largest", "numbers"), "one value per row or column"),
    **dict.fromkeys(("ends", "padded_ends"), ONE),
}
COPIES = "one to four values per thread in every configuration that MegaBlocks tries"

EXAMPLES = [
    Example(_swiglu, torch.bfloat16, WEIGHTS),
    Example(_swiglu, torch.float32, WEIGHTS),
    Example(_weighing, torch.bfloat16, OF_ROWS),
    Example(_weighing, torch.float32, OF_ROWS),
    Example(_permute, torch.bfloat16, CHOICES),
    Example(_permute, torch.float32, CHOICES),
    Example(_dequantizing, torch.bfloat16, {"codes": CODES, "scales": SCALES, "pairs": TABLE}),
    Example(_casts_to_fp8, torch.bfloat16, CASTS, since=90),
    Example(_cross_entropy, torch.bfloat16, dict.fromkeys(("targets", "weights", "losses"), ONE)),
    Example(_divided_cross_entropy, torch.bfloat16, dict.fromkeys(("targets", *ROW_FIGURES), ONE)),
    Example(
        _megablocks_sparse,
        torch.bfloat16,
        {
            **dict.fromkeys(("iptr", "optr"), COPIES),
            **dict.fromkeys(("indices", "bin_ids", "bins", "padded_bins"), ONE),
            **dict.fromkeys(("row_indices", "column_indices", "offsets", "block_offsets_t"), "one value per block"),
        },
    ),
]
