"""Brings tokens to their experts and the results back: within one process, or by all-to-all over the `ep` ranks.

A dispatcher is plain data and two functions, no `nn.Module`: `dispatch` gives the rows for this rank's experts and
a frozen plan, and `combine` takes that plan to bring the experts' outputs home.

Shape suffixes: T tokens on this rank, D model width, E experts, e experts on this rank, K experts a token,
N = T·K routed rows, n of them sent (N less padding), S ep ranks, R rows this rank receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from moe.permute import ExpertOrder, PermuteRows, RowsToTokens, TokensToRows
from moe.replay import ROWS_ARE_KEPT


@dataclass(frozen=True)
class LocalPlan:
    order: ExpertOrder


class LocalDispatcher:
    """Every expert is on this rank: sort by expert, and back."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(
        self, x_TD: Tensor, experts_TK: Tensor, counts_E: Tensor, has_padding: bool
    ) -> tuple[Tensor, Tensor, LocalPlan]:
        """Rows sorted by expert.

        Args:
            x_TD: tokens.
            experts_TK: int64 expert of each choice; E stands for padding, which is not routed.
            counts_E: int64, how many entries of experts_TK name each expert.
            has_padding: whether any entry may be E. Without padding the host need not wait for the device.

        Returns:
            rows_RD, counts_e (int64, rows for each expert, on x_TD's device), and the plan for `combine`.
        """
        order = _expert_order(experts_TK, self.num_experts if has_padding else None)
        if has_padding:
            order = _without_padding(order, int(counts_E.sum()))
        return TokensToRows.apply(x_TD, order), counts_E, LocalPlan(order)

    @property
    def reads_outputs(self) -> bool:
        """Whether `combine` reads the rows that it is given now, and not their shape alone."""
        return True

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, plan: LocalPlan) -> Tensor:
        """out_TD: for each token the weighted sum of its experts' rows; zero for padding."""
        return RowsToTokens.apply(rows_RD, weights_TK, plan.order)


@dataclass(frozen=True)
class AllToAllPlan:
    """sent and received: rows to and from each ep rank. The index pair is None when one expert lives here: the rows
    then come grouped by expert already."""

    order: ExpertOrder
    sent: list[int]
    received: list[int]
    by_expert_R: Tensor | None
    by_source_R: Tensor | None


class AllToAllDispatcher:
    """Expert i lives on ep rank i // e. Rows travel by two all-to-alls a layer, one there and one back.

    The counts travel ahead of the rows, and are read on the host once a layer: the only wait for the device. They go by
    a stream of their own, and the rows are sorted meanwhile, so that a GPU is at work while the host waits.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup):
        self.num_experts = num_experts
        self.group = group
        self.ep_size = dist.get_world_size(group)
        assert num_experts % self.ep_size == 0, (num_experts, self.ep_size)

    def dispatch(
        self, x_TD: Tensor, experts_TK: Tensor, counts_E: Tensor, has_padding: bool
    ) -> tuple[Tensor, Tensor, AllToAllPlan]:
        """As `LocalDispatcher.dispatch`, with rows_RD from all ep ranks and counts_e of this rank's experts."""
        receive_counts_E, splits_2S = exchange_counts(counts_E, self.group.group_name)
        order = _expert_order(experts_TK, self.num_experts if has_padding else None)
        rows_nD = TokensToRows.apply(x_TD, order, not ROWS_ARE_KEPT.get())

        _wait_for_counts(counts_E.device)
        sent, received = splits_2S.tolist()
        # row s: what ep rank s sends here, by local expert
        receive_counts_Se = receive_counts_E.view(self.ep_size, -1)
        if has_padding:
            order, rows_nD = _without_padding(order, sum(sent)), rows_nD[: sum(sent)]
        rows_RD = all_to_all(rows_nD, received, sent, self.group.group_name)
        by_expert_R, by_source_R = None, None
        if receive_counts_Se.shape[1] > 1:
            by_expert_R = _transpose_blocks(receive_counts_Se, sum(received))
            by_source_R = _transpose_blocks(receive_counts_Se.t(), sum(received))
            rows_RD = PermuteRows.apply(rows_RD, by_expert_R, by_source_R)
        plan = AllToAllPlan(order, sent, received, by_expert_R, by_source_R)
        return rows_RD, receive_counts_Se.sum(dim=0), plan

    @property
    def reads_outputs(self) -> bool:
        """As `LocalDispatcher.reads_outputs`: no, where what they were sent for is at hand (see `moe.replay`)."""
        return not ROWS_ARE_KEPT.get()

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, plan: AllToAllPlan) -> Tensor:
        """As `LocalDispatcher.combine`."""
        if plan.by_source_R is not None:
            rows_RD = PermuteRows.apply(rows_RD, plan.by_source_R, plan.by_expert_R, self.reads_outputs)
        rows_nD = all_to_all(rows_RD, plan.sent, plan.received, self.group.group_name)
        return RowsToTokens.apply(rows_nD, weights_TK, plan.order)


Dispatcher = LocalDispatcher | AllToAllDispatcher


def _expert_order(experts_TK: Tensor, padding: int | None) -> ExpertOrder:
    """The routed rows sorted by expert; last come those of `padding`, the largest value, which are not kept."""
    source_N = experts_TK.reshape(-1).argsort(stable=True)
    position_N = torch.empty_like(source_N)
    position_N[source_N] = torch.arange(source_N.numel(), device=source_N.device)
    is_kept_TK = None if padding is None else (experts_TK != padding).contiguous()
    return ExpertOrder(source_N, position_N.view_as(experts_TK), is_kept_TK)


def _without_padding(order: ExpertOrder, num_kept: int) -> ExpertOrder:
    """The first `num_kept` rows of an order."""
    position_TK = order.position_TK.clamp(max=max(num_kept - 1, 0))
    return ExpertOrder(order.source_n[:num_kept], position_TK, order.is_kept_TK)


def _transpose_blocks(lengths_AB: Tensor, num_rows: int) -> Tensor:
    """Index that brings rows grouped (a, b) into the order (b, a); block (a, b) has lengths_AB[a, b] rows.

    Pure arithmetic on the counts: nothing is sorted a second time.
    """
    lengths_old = lengths_AB.reshape(-1)
    starts_old_AB = (lengths_old.cumsum(0) - lengths_old).view_as(lengths_AB)
    lengths_new = lengths_AB.t().reshape(-1)
    starts_new = lengths_new.cumsum(0) - lengths_new
    shift = starts_old_AB.t().reshape(-1) - starts_new
    rows = torch.arange(num_rows, device=lengths_AB.device)
    return rows + shift.repeat_interleave(lengths_new, output_size=num_rows)


@torch.library.custom_op("expertmesh::exchange_counts", mutates_args=())
def exchange_counts(counts_E: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Tells every ep rank how many rows its experts will get from here. Neither result may be read before
    `_wait_for_counts` has returned.

    A registered operator, so that selective checkpointing can keep what it found out: recomputation then neither
    exchanges anything nor waits for the device.

    Args:
        counts_E: int64, rows for each expert.
        group_name: of the S ep ranks.

    Returns:
        receive_counts_E, int64: row by row of (S, e), what each rank sends to each expert that lives here.
        splits_2S, int64, in host memory: rows to each rank, and rows from each rank.
    """
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    receive_counts_E = torch.empty_like(counts_E)
    device, stream = torch.get_device_module(counts_E.device), _counts_stream(counts_E.device)
    stream.wait_stream(device.current_stream())
    with device.stream(stream):
        dist.all_to_all_single(receive_counts_E, counts_E, group=group)
        both_2E = torch.stack([counts_E, receive_counts_E])
        splits_2S = both_2E.view(2, dist.get_world_size(group), -1).sum(dim=2).to("cpu", non_blocking=True)
    return receive_counts_E, splits_2S


@exchange_counts.register_fake
def _(counts_E: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    return torch.empty_like(counts_E), counts_E.new_empty(2, dist.get_world_size(group), device="cpu")


def _wait_for_counts(device: torch.device) -> None:
    """Returns when what `exchange_counts` has begun is done, and at once where nothing is under way."""
    done = torch.get_device_module(device).Event()
    done.record(_counts_stream(device))
    done.synchronize()


@cache
def _counts_stream(device: torch.device) -> Any:
    """Apart from the stream that computes, so that the counts wait for nothing queued after them. On a CPU, where
    nothing is queued, a stand-in."""
    return torch.get_device_module(device).Stream()


@torch.library.custom_op("expertmesh::all_to_all", mutates_args=())
def all_to_all(rows: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """Rows exchanged between the ranks of a group: `sent[i]` rows go to rank i, `received[i]` come from it.

    A registered operator, so that autograd, selective checkpointing and `torch.compile` each see one node.
    A rank without a row takes part all the same: skipping would leave the others waiting.
    """
    out = rows.new_empty(sum(received), *rows.shape[1:])
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


@all_to_all.register_fake
def _(rows: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    return rows.new_empty(sum(received), *rows.shape[1:])


def _save_splits(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.received, ctx.sent, ctx.group_name = inputs


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return all_to_all(grad, ctx.sent, ctx.received, ctx.group_name), None, None, None


all_to_all.register_autograd(_all_to_all_backward, setup_context=_save_splits)
