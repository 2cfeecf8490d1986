"""Row permutations between token order and expert order, each its own autograd.Function.

In Triton kernels on a GPU (`moe.dispatch.permute_triton`), else in plain torch. Neither forward nor backward writes a
place twice: no scatter-add, so the same bits on every run, and no atomics on a GPU.

Shape suffixes: T tokens on this rank, D model width, K experts per token, n routed rows kept (T·K less padding),
R rows of any kind.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.gathered_rows import GatheredRows
from ..util.gpu import takes_triton
from ..util.recompute_cache import kept, placeholder, result_of
from ..util.step_parts import register_step_part

register_step_part(__name__, "permute, combine")


@dataclass(frozen=True)
class ExpertOrder:
    """The routed rows of this rank, sorted by expert (stable), padding left out, or last.

    source_n: for each kept row the flat index t·K + k it came from.
    position_TK: for each (token, choice) its place in the sorted order; where `is_kept_TK` is False, any valid index.
    is_kept_TK: None when every row is kept; contiguous.
    is_sparse: whether most choices have no row, for torch's own operations on a CPU, which then go by row.
    """

    source_n: Tensor
    position_TK: Tensor
    is_kept_TK: Tensor | None
    is_sparse: bool = False

    @property
    def token_n(self) -> Tensor:
        return self.source_n // self.position_TK.shape[1]


def expert_order(experts_TK: Tensor, num_experts: int, has_padding: bool) -> ExpertOrder:
    """The order of routed rows by expert; last come those of padding, whose expert is `num_experts`, which are not
    kept."""
    # few bits to sort by; as many values as experts, and one for padding
    key_N = experts_TK.reshape(-1).to(torch.int16 if num_experts < 2**15 else torch.int32)
    source_n = key_N.argsort(stable=True)
    position_N = torch.empty_like(source_n)
    position_N[source_n] = torch.arange(source_n.numel(), device=source_n.device)
    is_kept_TK = (experts_TK != num_experts).contiguous() if has_padding else None
    return ExpertOrder(source_n, position_N.view_as(experts_TK), is_kept_TK)


def first_rows(order: ExpertOrder, num_kept: int) -> ExpertOrder:
    """The first `num_kept` rows of an order: those that are no padding."""
    position_TK = order.position_TK.clamp(max=max(num_kept - 1, 0))
    return ExpertOrder(order.source_n[:num_kept], position_TK, order.is_kept_TK)


class TokensToRows(torch.autograd.Function):
    """rows_nD[i] = x_TD[token of row i]. Backward: each token gathers and sums the gradients of its K rows.

    On a GPU, rows that are not kept are undefined. Where they are to be `gathered`, the result is x_TD.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: ExpertOrder, gathered: GatheredRows | None = None) -> Tensor:
        ctx.order, ctx.gathered = order, gathered
        if gathered is not None:
            return given_to_gather(gathered, x_TD, order)
        return result_of(lambda: spread_tokens(x_TD, order), x_TD, order.source_n.numel(), x_TD.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor, None, None]:
        return gather_sum(grad_of_rows(ctx.gathered, grad_nD), ctx.order, None), None, None


class RowsToTokens(torch.autograd.Function):
    """out_TD[t] = sum over k of weights_TK[t, k] · rows_nD[row of (t, k)], summed in fp32, in the rows' dtype."""

    @staticmethod
    def forward(ctx: Any, rows_nD: Tensor, weights_TK: Tensor, order: ExpertOrder) -> Tensor:
        ctx.save_for_backward(rows_nD, weights_TK)
        ctx.order = order
        return gather_sum(rows_nD, order, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_nD, weights_TK = ctx.saved_tensors
        return *combine_backward(grad_TD, rows_nD, weights_TK, ctx.order), None


class WeightsToRows(torch.autograd.Function):
    """weights_n[i] = weights_TK[choice of row i]."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, order: ExpertOrder) -> Tensor:
        save_order(ctx, order)
        return weights_TK.reshape(-1).index_select(0, order.source_n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, None]:
        order, _ = saved_order(ctx)
        grad_TK = grad_n.new_zeros(order.position_TK.shape)
        grad_TK.view(-1).index_copy_(0, order.source_n, grad_n)
        return grad_TK, None


class WeighedRowsToTokens(torch.autograd.Function):
    """`RowsToTokens` of rows that have been weighed: their sums. In a replay those of the first run, for which nothing
    reads the rows."""

    @staticmethod
    def forward(ctx: Any, rows_nD: Tensor, order: ExpertOrder, gathered: GatheredRows | None = None) -> Tensor:
        save_order(ctx, order)
        ctx.gathered = gathered
        out_TD: Tensor = kept("tokens' sums", lambda: gather_sum(rows_nD, order, None))
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        order, _ = saved_order(ctx)
        return grad_to_rows(ctx.gathered, grad_TD, order), None, None


class PermuteRows(torch.autograd.Function):
    """rows_RD[index_R], where `inverse_R` is the inverse permutation and serves the backward. Either way each row is
    read once and written once, which torch's own operator does as well as any."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse_R = inverse_R
        return result_of(lambda: rows_RD.index_select(0, index_R), rows_RD, *rows_RD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return grad_RD.index_select(0, ctx.inverse_R), None, None


def save_order(ctx: Any, order: ExpertOrder, *tensors: Tensor) -> None:
    """Save an order for backward, and other tensors: where a layer is checkpointed, none of them is kept until it is
    recomputed."""
    ctx.is_sparse = order.is_sparse
    ctx.save_for_backward(order.source_n, order.position_TK, order.is_kept_TK, *tensors)


def saved_order(ctx: Any) -> tuple[ExpertOrder, list[Tensor]]:
    """What `save_order` has saved."""
    source_n, position_TK, is_kept_TK, *tensors = ctx.saved_tensors
    return ExpertOrder(source_n, position_TK, is_kept_TK, ctx.is_sparse), tensors


def given_to_gather(gathered: GatheredRows, x_TD: Tensor, order: ExpertOrder) -> Tensor:
    """Leave it to a kernel to gather the rows of x_TD."""
    gathered.put("token_R", order.token_n.to(torch.int32))
    return x_TD.contiguous()


def grad_of_rows(gathered: GatheredRows | None, grad_nD: Tensor) -> Tensor:
    """The gradient of rows, also of those that were gathered, whose own is a placeholder."""
    return grad_nD if gathered is None else gathered.take("grad_rows_RD")


def grad_to_rows(gathered: GatheredRows | None, grad_TD: Tensor, order: ExpertOrder) -> Tensor:
    """For the gradient of rows that of tokens' sums; a placeholder where it is to be gathered, too."""
    if gathered is None:
        return spread_tokens(grad_TD, order)
    gathered.put("grad_sums_UD", grad_TD)
    return placeholder(grad_TD, order.source_n.numel(), grad_TD.shape[1])


def spread_tokens(x_TD: Tensor, order: ExpertOrder) -> Tensor:
    """rows_nD[i] = x_TD[token of row i]."""
    if takes_triton(x_TD):
        from .permute_triton import fused_spread

        return fused_spread(x_TD.contiguous(), order.position_TK, order.is_kept_TK, order.source_n.numel())
    return plain_spread(x_TD, order)


def gather_sum(
    rows_nD: Tensor, order: ExpertOrder, weights_TK: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """For each token the sum of its kept rows, weighted where weights are given, accumulated in fp32, in `dtype`, by
    default the rows'."""
    dtype = dtype or rows_nD.dtype
    if takes_triton(rows_nD):
        from .permute_triton import fused_gather_sum

        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        return fused_gather_sum(rows_nD.contiguous(), order.position_TK, order.is_kept_TK, weights_TK, dtype)
    # on a GPU `index_add_` would be atomic
    by_row = order.is_sparse and rows_nD.device.type == "cpu"
    plain = sparse_gather_sum if by_row else plain_gather_sum
    return plain(rows_nD, order, weights_TK).to(dtype)


def combine_backward(grad_TD: Tensor, rows_nD: Tensor, weights_TK: Tensor, order: ExpertOrder) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights of `gather_sum`, the latter summed in fp32; those of choices not kept are 0."""
    if takes_triton(rows_nD):
        from .permute_triton import fused_combine_backward

        grad_TD, rows_nD, weights_TK = grad_TD.contiguous(), rows_nD.contiguous(), weights_TK.contiguous()
        return fused_combine_backward(grad_TD, rows_nD, weights_TK, order.position_TK, order.is_kept_TK)
    plain = sparse_combine_backward if order.is_sparse else plain_combine_backward
    return plain(grad_TD, rows_nD, weights_TK, order)


def plain_spread(x_TD: Tensor, order: ExpertOrder) -> Tensor:
    """`spread_tokens` in torch's own operations."""
    return x_TD.index_select(0, order.token_n)


def plain_gather_sum(rows_nD: Tensor, order: ExpertOrder, weights_TK: Tensor | None) -> Tensor:
    """`gather_sum` in torch's own operations, in the dtype it accumulates in."""
    num_tokens, top_k = order.position_TK.shape
    dtype = _accumulation_dtype(rows_nD)
    total_TD = torch.zeros(num_tokens, rows_nD.shape[1], dtype=dtype, device=rows_nD.device)
    if rows_nD.shape[0] == 0:
        return total_TD
    for k in range(top_k):
        chosen_TD = rows_nD.index_select(0, order.position_TK[:, k])
        weight_T1 = None if weights_TK is None else weights_TK[:, k].unsqueeze(-1)
        if order.is_kept_TK is not None:
            # masked, not multiplied by zero: the row a padding token points at is somebody else's, and its weight may
            # be no number
            is_left_out_T1 = ~order.is_kept_TK[:, k].unsqueeze(-1)
            chosen_TD = chosen_TD.masked_fill(is_left_out_T1, 0.0)
            weight_T1 = None if weight_T1 is None else weight_T1.masked_fill(is_left_out_T1, 0.0)
        if weight_T1 is None:
            total_TD += chosen_TD
        else:
            total_TD.addcmul_(chosen_TD.to(dtype), weight_T1)
    return total_TD


def sparse_gather_sum(rows_nD: Tensor, order: ExpertOrder, weights_TK: Tensor | None) -> Tensor:
    """As `plain_gather_sum`, each row read once, in the order of the rows."""
    dtype = _accumulation_dtype(rows_nD)
    total_TD = torch.zeros(order.position_TK.shape[0], rows_nD.shape[1], dtype=dtype, device=rows_nD.device)
    added_nD = rows_nD.to(dtype)
    if weights_TK is not None:
        weight_n1 = weights_TK.reshape(-1).index_select(0, order.source_n).unsqueeze(-1)
        added_nD = (added_nD * weight_n1).to(dtype)
    # a CPU adds rows of one token in their order: the same bits on every run
    return total_TD.index_add_(0, order.token_n, added_nD)


def plain_combine_backward(
    grad_TD: Tensor, rows_nD: Tensor, weights_TK: Tensor, order: ExpertOrder
) -> tuple[Tensor, Tensor]:
    """`combine_backward` in torch's own operations."""
    weight_n1 = weights_TK.reshape(-1).index_select(0, order.source_n).unsqueeze(-1)
    grad_rows_nD = (grad_TD.index_select(0, order.token_n) * weight_n1).to(rows_nD.dtype)
    grad_weights_TK = torch.zeros_like(weights_TK)
    if rows_nD.shape[0] > 0:
        for k in range(weights_TK.shape[1]):
            chosen_TD = rows_nD.index_select(0, order.position_TK[:, k])
            grad_weights_TK[:, k] = (chosen_TD.to(_accumulation_dtype(rows_nD)) * grad_TD).sum(dim=-1)
    if order.is_kept_TK is not None:
        grad_weights_TK.masked_fill_(~order.is_kept_TK, 0.0)
    return grad_rows_nD, grad_weights_TK


def sparse_combine_backward(
    grad_TD: Tensor, rows_nD: Tensor, weights_TK: Tensor, order: ExpertOrder
) -> tuple[Tensor, Tensor]:
    """As `plain_combine_backward`, each row read once."""
    weight_n1 = weights_TK.reshape(-1).index_select(0, order.source_n).unsqueeze(-1)
    grad_nD = grad_TD.index_select(0, order.token_n)
    grad_weight_n = (rows_nD.to(_accumulation_dtype(rows_nD)) * grad_nD).sum(dim=-1)
    grad_weights = weights_TK.new_zeros(weights_TK.numel())
    grad_weights.index_copy_(0, order.source_n, grad_weight_n.to(weights_TK.dtype))
    return (grad_nD * weight_n1).to(rows_nD.dtype), grad_weights.view_as(weights_TK)


def _accumulation_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


def count_experts(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Tokens that chose each expert, (E,) int64. Without `bincount`, which waits for the device to know its maximum."""
    one_hot = experts_TK.reshape(-1, 1) == torch.arange(num_experts, device=experts_TK.device)
    return one_hot.sum(dim=0)
