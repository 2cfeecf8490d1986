"""Brings tokens to their experts once: to each ep rank, or to each node and there to each rank.

A token with several experts on a rank, or on a node, is sent there as one row, and one row comes back: the weighted sum
of their results (HierMoE, arXiv 2508.09591; DeepEP). With K experts per token, spread evenly over N nodes, (N-1) ·
(1 - ((N-1)/N)^K) rows per token leave their node, where K · (N-1)/N do if each choice has a row of its own. Choices and
their weights, 2·K numbers per row, are sent beside the rows.

Rank b·L + l of an ep group is the l-th of the L ranks on its node b. By node, tokens go to node b by its l-th rank,
among ranks of equal place on their nodes, and from there to those of its node that have the experts; results come back
the same way, and are summed at each station.

Shape suffixes: T tokens on this rank, D model width, E experts, e experts on this rank, K experts per token, S ep
ranks, N nodes, L ranks per node, P parts (chunks), n rows sent, U rows received, R rows of a part's experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.expert_rows import ExpertRows
from ..kernels.gathered_rows import GatheredRows
from ..util.recompute_cache import is_replaying, kept
from ..util.step_parts import register_step_part
from .alltoall import on_counts_stream, part_sizes, wait_for_counts
from .dedup_relay import ArriveAndSpread, Combine, Relay, RelayBack, SendTokens, SumAndReturn
from .dedup_routes import ArriveChoices, Choices, OnceEach, SendChoices, first_choices, rows_sent_once, sparse_rows
from .dispatcher_registry import DispatchOptions, ExpertChunk, NodeGroups, Sent
from .exchange import Exchange
from .permute import ExpertOrder, WeightsToRows, count_experts, expert_order

register_step_part(__name__, "dispatch")


@dataclass(frozen=True)
class RowCounts:
    """How many rows are sent, as the host knows it.

    sent_PN, received_PN: to and from each destination of the first hop, by part. onward_PL, arriving_PL: inside the
    node, to and from each of its ranks. computed_Pe: by each of this rank's experts.
    """

    sent_PN: list[list[int]]
    received_PN: list[list[int]]
    onward_PL: list[list[int]]
    arriving_PL: list[list[int]]
    computed_Pe: list[list[int]]


class OnceDispatcher:
    """Expert i lives on ep rank i // e. The counts are sent ahead of the rows, all of them to all ranks, and read on
    the host once per layer: the only wait for the device.

    Args:
        num_experts: E.
        group: the ep ranks.
        num_parts: chunks in which rows are sent, each for some of every rank's experts; a token is sent once for each.
        nodes: by which a token is sent once to a node; None: once to a rank.
        sum_dtype: of sums that are sent back, and of those of gradients; None: the tokens'.
    """

    is_remote = True

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        num_parts: int = 1,
        nodes: NodeGroups | None = None,
        sum_dtype: torch.dtype | None = None,
    ):
        self.num_experts = num_experts
        self.group = group
        self.nodes = nodes
        self.sum_dtype = sum_dtype
        ep_size, self.ep_rank = group.size(), group.rank()
        assert num_experts % ep_size == 0, (num_experts, ep_size)
        self.sizes = part_sizes(num_experts // ep_size, num_parts)
        self.ranks_per_node = 1 if nodes is None else nodes.inside.size()
        assert ep_size % self.ranks_per_node == 0, (ep_size, self.ranks_per_node)
        self.num_nodes = ep_size // self.ranks_per_node
        self._tables = Tables.of(num_experts, self.num_nodes, self.ranks_per_node, self.sizes)

    @property
    def in_words(self) -> str:
        to = "rank" if self.nodes is None else f"node ({self.num_nodes} nodes of {self.ranks_per_node} ranks)"
        return f"a token is sent once to each {to}"

    @property
    def first_hop(self) -> dist.ProcessGroup:
        return self.group if self.nodes is None else self.nodes.across

    def send(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, counts_E: Tensor, has_padding: bool) -> Sent:
        """As `Dispatcher.send`."""
        num_destinations = len(self.sizes) * self.num_nodes
        self._tables = tables = self._tables.to(x_TD.device)
        choices = Choices(tables.node_E[experts_TK], tables.expert_E[experts_TK])
        firsts = first_choices(choices.destination_TK, num_destinations)

        def tell() -> tuple[Tensor, Tensor]:
            to_nodes = count_experts(firsts.destination_TK, num_destinations)
            to_ranks = [] if self.nodes is None else [self._to_ranks(tables.rank_E[experts_TK])]
            return gather_counts(torch.cat([counts_E, to_nodes, *to_ranks]), self.group)

        all_SC, host_SC = kept("counts", tell)
        # sorted while the host waits
        order = expert_order(firsts.destination_TK, num_destinations, has_padding=True)

        wait_for_counts(x_TD.device)
        rows = self.rows(host_SC)
        once = rows_sent_once(choices, firsts, order, num_destinations, sum(map(sum, rows.sent_PN)))
        of_choices, of_rows = (Exchange(self.first_hop, rows.sent_PN, rows.received_PN) for _ in range(2))
        sent_choices = SendChoices.apply(weights_TK, once, of_choices)
        sent_rows = SendTokens.apply(x_TD, once.order, of_rows, self.nodes is None)
        counts_Pe = self._own(all_SC).sum(dim=0).split(self.sizes)
        sum_dtype = self.sum_dtype or x_TD.dtype
        parts = [
            _Part(self, number, rows, of_choices, of_rows, sent_choices[number], counts_e, sum_dtype)
            for number, counts_e in enumerate(counts_Pe)
        ]
        return _SentOnce(sent_rows, parts, of_rows, once.order, x_TD.dtype)

    def _to_ranks(self, rank_TK: Tensor) -> Tensor:
        """Rows that this rank's tokens will be inside their experts' nodes, by part and ep rank."""
        number = len(self.sizes) * self.num_nodes * self.ranks_per_node
        return count_experts(first_choices(rank_TK, number).destination_TK, number)

    def _own(self, counts_SC: Tensor) -> Tensor:
        """The rows that each ep rank's tokens have at each expert of this rank, (S, e)."""
        size = sum(self.sizes)
        return counts_SC[:, self.ep_rank * size : (self.ep_rank + 1) * size]

    def rows(self, counts_SC: Tensor) -> RowCounts:
        """What all ranks have told, (S, C) in host memory, as rows between them."""
        num_parts, N, L = len(self.sizes), self.num_nodes, self.ranks_per_node
        node, place = divmod(self.ep_rank, L)
        to_nodes_SPN = counts_SC[:, self.num_experts :][:, : num_parts * N].view(-1, num_parts, N)
        sent_PN = to_nodes_SPN[self.ep_rank]
        received_PN = to_nodes_SPN[place::L, :, node].t()
        computed_Pe = [counts_e.tolist() for counts_e in self._own(counts_SC).sum(dim=0).split(self.sizes)]
        if self.nodes is None:
            return RowCounts(sent_PN.tolist(), received_PN.tolist(), [], [], computed_Pe)
        to_ranks_SPS = counts_SC[:, self.num_experts + num_parts * N :].view(-1, num_parts, N * L)
        # what comes from all nodes to rank l of this one, and goes on to its rank j
        inside_LPL = to_ranks_SPS.view(N, L, num_parts, N, L)[:, :, :, node].sum(dim=0)
        onward_PL, arriving_PL = inside_LPL[place], inside_LPL[:, :, place].t()
        return RowCounts(sent_PN.tolist(), received_PN.tolist(), onward_PL.tolist(), arriving_PL.tolist(), computed_Pe)


def once_dispatcher(options: DispatchOptions) -> OnceDispatcher:
    """That of `--dispatch rank`, and of node where the group has nodes."""
    return OnceDispatcher(options.num_experts, options.group, options.num_parts, options.nodes, options.sum_dtype)


@dataclass(frozen=True)
class Tables:
    """The places of all experts, and last of padding.

    node_E: its part and node, part · N + node. rank_E: its part and ep rank, part · S + rank. expert_E: its number
    among those of its part and node, by rank.
    """

    node_E: Tensor
    rank_E: Tensor
    expert_E: Tensor

    @staticmethod
    def of(num_experts: int, num_nodes: int, ranks_per_node: int, sizes: list[int]) -> "Tables":
        num_ranks = num_nodes * ranks_per_node
        # part and number in it, of each of a rank's experts
        numbered = [(part, number) for part, size in enumerate(sizes) for number in range(size)]
        node_E, rank_E, expert_E = [], [], []
        for expert in range(num_experts):
            rank, local = divmod(expert, sum(sizes))
            part, number = numbered[local]
            node, place = divmod(rank, ranks_per_node)
            node_E.append(part * num_nodes + node)
            rank_E.append(part * num_ranks + rank)
            expert_E.append(place * sizes[part] + number)
        node_E.append(len(sizes) * num_nodes)
        rank_E.append(len(sizes) * num_ranks)
        expert_E.append(-1)
        return Tables(torch.tensor(node_E), torch.tensor(rank_E), torch.tensor(expert_E))

    def to(self, device: torch.device) -> "Tables":
        if self.node_E.device == device:
            return self
        return Tables(self.node_E.to(device), self.rank_E.to(device), self.expert_E.to(device))


class _Part:
    """The rows of one chunk; by node, they go on to their ranks when they arrive."""

    def __init__(
        self,
        dispatcher: OnceDispatcher,
        number: int,
        rows: RowCounts,
        of_choices: Exchange,
        of_rows: Exchange,
        sent_choices: Tensor,
        counts_e: Tensor,
        sum_dtype: torch.dtype,
    ):
        self.dispatcher, self.number, self._rows = dispatcher, number, rows
        self._of_choices, self._of_rows, self._sent_choices = of_choices, of_rows, sent_choices
        on_host = rows.computed_Pe[number]
        self.experts, self.sum_dtype = ExpertRows(counts_e, sum(on_host), on_host), sum_dtype
        self._hop: tuple[ExpertOrder, Exchange] | None = None
        self._last: tuple[Tensor | None, ExpertOrder] | None = None
        self._gathered: GatheredRows | None = None

    def gather(self) -> GatheredRows:
        self._gathered = GatheredRows()
        return self._gathered

    def arrive(self, sent_RD: Tensor) -> Tensor:
        weights_UK, expert_UK = ArriveChoices.apply(self._sent_choices, self._of_choices, self.number)
        exchange, part = self._of_rows, self.number
        if self.dispatcher.nodes is not None:
            once, of_choices, onward = self._inside(expert_UK, self.dispatcher.nodes.inside)
            (sent_choices,) = SendChoices.apply(weights_UK, once, of_choices)
            sent_RD = Relay.apply(sent_RD, exchange, part, once.order, onward, self.sum_dtype)
            weights_UK, expert_UK = ArriveChoices.apply(sent_choices, of_choices, 0)
            self._hop = once.order, onward
            exchange, part = onward, 0
        num_experts = self.experts.num_experts
        here_UK = torch.where(expert_UK < 0, num_experts, expert_UK)
        order = sparse_rows(expert_order(here_UK, num_experts, has_padding=True), self.experts.num_rows)
        self._last = weights_UK, order
        return ArriveAndSpread.apply(sent_RD, exchange, part, order, self.sum_dtype, self._gathered)

    def weigh(self) -> Tensor | None:
        assert self._last is not None, "rows are weighed once they have arrived"
        weights_UK, order = self._last
        self._last = None, order
        weights_R: Tensor = WeightsToRows.apply(weights_UK, order)
        return weights_R

    def _inside(self, expert_UK: Tensor, group: dist.ProcessGroup) -> tuple[OnceEach, Exchange, Exchange]:
        """The rows that go on inside the node, and the exchanges of their choices and of themselves."""
        L, number, num_experts = self.dispatcher.ranks_per_node, self.number, self.experts.num_experts
        is_elsewhere_UK = expert_UK < 0
        choices = Choices(
            (expert_UK // num_experts).masked_fill(is_elsewhere_UK, L),
            (expert_UK % num_experts).masked_fill(is_elsewhere_UK, -1),
        )
        onward_L, arriving_L = self._rows.onward_PL[number], self._rows.arriving_PL[number]
        firsts = first_choices(choices.destination_TK, L)
        order = expert_order(firsts.destination_TK, L, has_padding=True)
        once = rows_sent_once(choices, firsts, order, L, sum(onward_L))
        of_choices, of_rows = (Exchange(group, [onward_L], [arriving_L]) for _ in range(2))
        return once, of_choices, of_rows

    def give_back(self, rows_RD: Tensor) -> Tensor:
        assert self._last is not None, "rows are given back once they have arrived"
        weights_UK, order = self._last
        exchange, part = (self._of_rows, self.number) if self._hop is None else (self._hop[1], 0)
        returned: Tensor = SumAndReturn.apply(
            rows_RD, weights_UK, order, exchange, part, self.sum_dtype, self._gathered
        )
        if self._hop is None:
            return returned
        hop_order, onward = self._hop
        return RelayBack.apply(returned, onward, hop_order, self._of_rows, self.number, self.sum_dtype)


@dataclass(frozen=True)
class _SentOnce:
    rows: tuple[Tensor, ...]
    parts: Sequence[ExpertChunk]
    exchange: Exchange
    order: ExpertOrder
    dtype: torch.dtype

    @property
    def reads_outputs(self) -> bool:
        """False in a replay, where the experts' results have been kept (see `moe.util.recompute_cache`)."""
        return not is_replaying()

    def combine(self, returned: Sequence[Tensor]) -> Tensor:
        return Combine.apply(self.exchange, self.order, self.dtype, *returned)


def gather_counts(counts_C: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Tell every ep rank all counts of this one. Neither result may be read before `wait_for_counts` has returned.

    Returns:
        (S, C) int64, the counts of all ranks: on their device, and in host memory.
    """
    with on_counts_stream(counts_C):
        # an all-gather, whose name differs between versions of torch; memory of this stream's own
        told_SC = counts_C.repeat(group.size(), 1)
        all_SC = torch.empty_like(told_SC)
        dist.all_to_all_single(all_SC, told_SC, group=group)
        return all_SC, all_SC.to("cpu", non_blocking=True)
