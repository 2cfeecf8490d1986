"""Brings tokens to their experts and the results back: within one process, or by all-to-all over the `ep` ranks.

Shape suffixes: T tokens on this rank, D model width, E experts, e experts on this rank, K experts per token, N = T·K
routed rows, n of them sent (N less padding), S ep ranks, P parts (chunks), R rows of a part that this rank receives.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.expert_rows import ExpertRows, even
from ..kernels.gathered_rows import GatheredRows
from ..util.recompute_cache import for_backward_alone, is_replaying, kept
from ..util.step_parts import register_step_part
from .dispatcher_registry import DispatchOptions, ExpertChunk, Sent
from .exchange import Arrive, Exchange, Home, Return, Send
from .permute import (
    ExpertOrder,
    PermuteRows,
    RowsToTokens,
    TokensToRows,
    WeighedRowsToTokens,
    WeightsToRows,
    expert_order,
    first_rows,
)

register_step_part(__name__, "dispatch")


class _LocalRows:
    """The rows of all experts, which are on this rank. No dataclass: FSDP makes a copy of one that a module is given,
    and what `weigh` and `gather` note would be lost."""

    def __init__(self, x_TD: Tensor, experts: ExpertRows, order: ExpertOrder, weights_TK: Tensor):
        self.x_TD = x_TD
        self.experts = experts
        self.order = order
        self.weights_TK = weights_TK
        self.is_weighed = False
        self.gathered: GatheredRows | None = None

    @property
    def reads_outputs(self) -> bool:
        """False in a replay of rows that are weighed, whose sums have been kept."""
        return not (self.is_weighed and is_replaying())

    @property
    def rows(self) -> list[Tensor]:
        return [self.x_TD]

    @property
    def parts(self) -> list[ExpertChunk]:
        return [self]

    def gather(self) -> GatheredRows:
        self.gathered = GatheredRows()
        return self.gathered

    def arrive(self, sent_TD: Tensor) -> Tensor:
        return TokensToRows.apply(sent_TD, self.order, self.gathered)

    def weigh(self) -> Tensor:
        self.is_weighed = True
        weights_R: Tensor = WeightsToRows.apply(self.weights_TK, self.order)
        return weights_R

    def give_back(self, rows_RD: Tensor) -> Tensor:
        return rows_RD

    def combine(self, returned: Sequence[Tensor]) -> Tensor:
        (rows_RD,) = returned
        if self.is_weighed:
            return WeighedRowsToTokens.apply(rows_RD, self.order, self.gathered)
        return RowsToTokens.apply(rows_RD, self.weights_TK, self.order)


class LocalDispatcher:
    """Every expert is on this rank: sort by expert, and back."""

    is_remote = False
    in_words = ""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def send(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, counts_E: Tensor, has_padding: bool) -> Sent:
        """As `Dispatcher.send`."""
        order = expert_order(experts_TK, self.num_experts, has_padding)
        if has_padding:
            # read by the host: in a replay it must not wait for the device
            order = first_rows(order, kept("rows without padding", lambda: int(counts_E.sum())))
        return _LocalRows(x_TD, ExpertRows(counts_E, order.source_n.numel()), order, weights_TK)


@dataclass(frozen=True)
class _ExchangedPart:
    """by_expert_R, by_source_R: permutations of received rows, sorted by source, to the order of experts, and back.
    None when the part is one expert: the rows are then grouped by expert already."""

    exchange: Exchange
    number: int
    experts: ExpertRows
    by_expert_R: Tensor | None
    by_source_R: Tensor | None

    def gather(self) -> None:
        """Each is sent as a row of its own."""
        return None

    def arrive(self, sent_RD: Tensor) -> Tensor:
        rows_RD = Arrive.apply(sent_RD, self.exchange, self.number)
        if self.by_expert_R is not None:
            rows_RD = PermuteRows.apply(rows_RD, self.by_expert_R, self.by_source_R)
        return rows_RD

    def weigh(self) -> None:
        """Their tokens' ranks have the weights."""
        return None

    def give_back(self, rows_RD: Tensor) -> Tensor:
        if self.by_source_R is not None:
            with for_backward_alone(is_replaying()):
                rows_RD = PermuteRows.apply(rows_RD, self.by_source_R, self.by_expert_R)
        return Return.apply(rows_RD, self.exchange, self.number)


@dataclass(frozen=True)
class _ExchangedRows:
    rows: tuple[Tensor, ...]
    parts: list[ExpertChunk]
    exchange: Exchange
    order: ExpertOrder
    weights_TK: Tensor

    @property
    def reads_outputs(self) -> bool:
        """False in a replay, where the returned rows have been kept (see `moe.util.recompute_cache`)."""
        return not is_replaying()

    def combine(self, returned: Sequence[Tensor]) -> Tensor:
        return RowsToTokens.apply(Home.apply(self.exchange, *returned), self.weights_TK, self.order)


class AllToAllDispatcher:
    """Expert i lives on ep rank i // e. Rows are exchanged in two all-to-alls per part, one there and one back.

    The counts are sent ahead of the rows, and read on the host once per layer: the only wait for the device. They are
    sent on a stream of their own, and the rows are sorted meanwhile, so that a GPU is at work while the host waits.

    Attributes:
        num_parts: chunks in which the rows are sent. Each has the rows of some of every rank's experts, so that no
            expert's rows are divided: results are the same bit for bit, and each weight is read once.
    """

    is_remote = True
    in_words = ""

    def __init__(self, num_experts: int, group: dist.ProcessGroup, num_parts: int = 1):
        self.num_experts = num_experts
        self.group = group
        self.ep_size = dist.get_world_size(group)
        assert num_experts % self.ep_size == 0, (num_experts, self.ep_size)
        self.sizes = part_sizes(num_experts // self.ep_size, num_parts)
        self._place_E = _places(num_experts, self.ep_size, self.sizes)

    def send(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, counts_E: Tensor, has_padding: bool) -> Sent:
        """As `Dispatcher.send`."""
        receive_counts_E, on_host = kept("counts", lambda: exchange_counts(counts_E, self.group, self.sizes))
        order = expert_order(self._places(experts_TK), self.num_experts, has_padding)
        with for_backward_alone(is_replaying()):
            rows_ND = TokensToRows.apply(x_TD, order)

        wait_for_counts(counts_E.device)
        if has_padding:
            # the rows' own gradient goes by the order of all of them: `Send` knows how many it sends
            order = first_rows(order, sum(map(sum, on_host.sent_PS)))
        exchange = Exchange(self.group, on_host.sent_PS, on_host.received_PS)
        rows = Send.apply(rows_ND, exchange)
        # row s: what ep rank s sends here, by local expert
        receive_counts_Se = receive_counts_E.view(self.ep_size, -1)
        counts = receive_counts_Se.split(self.sizes, dim=1)
        parts: list[ExpertChunk] = [
            self._part(exchange, number, counts_Se, on_host.by_expert[number])
            for number, counts_Se in enumerate(counts)
        ]
        return _ExchangedRows(rows, parts, exchange, order, weights_TK)

    def _part(self, exchange: Exchange, number: int, counts_Se: Tensor, on_host: list[int]) -> ExpertChunk:
        by_expert_R, by_source_R, num_rows = None, None, sum(on_host)
        if counts_Se.shape[1] > 1:
            by_expert_R = _transpose_blocks(counts_Se, num_rows)
            by_source_R = _transpose_blocks(counts_Se.t(), num_rows)
        experts = ExpertRows(counts_Se.sum(dim=0), num_rows, on_host)
        return _ExchangedPart(exchange, number, experts, by_expert_R, by_source_R)

    def _places(self, experts_TK: Tensor) -> Tensor:
        """The place of each choice's row among those that are sent."""
        if len(self.sizes) == 1:
            return experts_TK
        self._place_E = self._place_E.to(experts_TK.device)
        return self._place_E[experts_TK]


def plain_dispatcher(options: DispatchOptions) -> AllToAllDispatcher:
    """That of `--dispatch plain`."""
    return AllToAllDispatcher(options.num_experts, options.group, options.num_parts)


def part_sizes(num_experts: int, num_parts: int) -> list[int]:
    """The number of experts in each part, as even as possible."""
    assert 1 <= num_parts <= num_experts, (num_parts, num_experts)
    return even(num_experts, num_parts)


def _places(num_experts: int, ep_size: int, sizes: list[int]) -> Tensor:
    """Each expert's place in the order by part, then by rank; padding's is the last."""
    by_rank_Se = torch.arange(num_experts).view(ep_size, -1)
    in_order_E = torch.cat([part_Se.flatten() for part_Se in by_rank_Se.split(sizes, dim=1)])
    return torch.cat([in_order_E.argsort(), in_order_E.new_tensor([num_experts])])


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


class HostCounts(Protocol):
    """What ranks have told one another of their rows, in host memory.

    sent_PS, received_PS: for each part, rows to each rank, and rows from each rank. by_expert: for each part, the rows
    of each of this rank's experts.
    """

    @property
    def sent_PS(self) -> list[list[int]]: ...

    @property
    def received_PS(self) -> list[list[int]]: ...

    @property
    def by_expert(self) -> list[list[int]]: ...


class _Counts:
    """Of sent and received counts (2, S, e) in host memory, which may still be on their way there: what is asked of
    them is computed then."""

    def __init__(self, both_2Se: Tensor, sizes: Sequence[int]):
        self._both_2Se = both_2Se
        self._sizes = list(sizes)

    @cached_property
    def _splits_2PS(self) -> list[list[list[int]]]:
        parts = self._both_2Se.split(self._sizes, dim=2)
        splits: list[list[list[int]]] = torch.stack([part_2Se.sum(dim=2) for part_2Se in parts], dim=1).tolist()
        return splits

    @property
    def sent_PS(self) -> list[list[int]]:
        return self._splits_2PS[0]

    @property
    def received_PS(self) -> list[list[int]]:
        return self._splits_2PS[1]

    @cached_property
    def by_expert(self) -> list[list[int]]:
        return [counts_e.tolist() for counts_e in self._both_2Se[1].sum(dim=0).split(self._sizes)]


def exchange_counts(counts_E: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> tuple[Tensor, HostCounts]:
    """Tell every ep rank how many rows its experts will get from here. Neither result may be read before
    `wait_for_counts` has returned.

    Args:
        counts_E: int64, rows for each expert.
        group: the S ep ranks.
        sizes: experts of each of the P parts.

    Returns:
        receive_counts_E, int64: row by row of (S, e), how many rows each rank sends to each expert on this rank.
        What the host is told.
    """
    receive_counts_E = torch.empty_like(counts_E)
    with on_counts_stream(counts_E, receive_counts_E):
        dist.all_to_all_single(receive_counts_E, counts_E, group=group)
        both_2Se = torch.stack([counts_E, receive_counts_E]).view(2, dist.get_world_size(group), -1)
        both_2Se = both_2Se.to("cpu", non_blocking=True)
    return receive_counts_E, _Counts(both_2Se, sizes)


@contextmanager
def on_counts_stream(*tensors: Tensor) -> Iterator[None]:
    """Within it, operators run on the stream of the counts, after what has been queued so far.

    Args:
        tensors: all that these operators read or write and that exist already. They are kept until `wait_for_counts`
            has returned: the allocator would give the memory of one that the host gives up before to the next tensor
            of the stream that computes, which does not wait for this one.
    """
    module, counts = torch.get_device_module(tensors[0].device), _counts_stream(tensors[0].device)
    counts.kept.extend(tensors)
    counts.stream.wait_stream(module.current_stream())
    with module.stream(counts.stream):
        yield


def wait_for_counts(device: torch.device) -> None:
    """Wait until what `exchange_counts` has begun is done; returns at once where nothing is under way."""
    done, counts = torch.get_device_module(device).Event(), _counts_stream(device)
    done.record(counts.stream)
    done.synchronize()
    counts.kept.clear()


@dataclass(frozen=True)
class _CountsStream:
    """stream: on a CPU, where nothing is queued, a stand-in. kept: what its operators under way read and write."""

    stream: Any
    kept: list[Tensor] = field(default_factory=list)


@cache
def _counts_stream(device: torch.device) -> _CountsStream:
    """A stream apart from the one that computes, so that the counts do not wait for work queued there."""
    return _CountsStream(torch.get_device_module(device).Stream())
