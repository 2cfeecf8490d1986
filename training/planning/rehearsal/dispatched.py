"""How many rows are sent where each token goes once to a rank or a node: what ranks tell one another, for dry runs.

Of K distinct experts of E, drawn evenly, some are among m of them with probability 1 - (1 - m/E)(1 - m/(E-1)) ...
(1 - m/(E-K+1)); where a rank's share of the choices is told, m is that share of E.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ....moe.dispatch import alltoall
from ....moe.dispatch import dedup as once
from ....moe.dispatch.dedup import OnceDispatcher, RowCounts
from ....moe.dispatch.dispatcher_entries import DISPATCHERS
from ....moe.kernels import expert_rows
from ....moe.kernels.expert_rows import even
from ....moe.util.errors import ExpertMeshError
from ....moe.util.recompute_cache import is_replaying
from ..planner.asked import Asked
from .recorder import Recorder


def expected_rows(dispatcher: OnceDispatcher, tokens: int, top_k: int, shares: Sequence[float] = ()) -> RowCounts:
    """Rows of a layer, all ranks having as many tokens.

    Args:
        dispatcher: of this rank. tokens: without padding. top_k: experts per token.
        shares: of all choices, each ep rank's; none: equally much.
    """
    nodes, on_node, sizes = dispatcher.num_nodes, dispatcher.ranks_per_node, dispatcher.sizes
    shares = shares or [1 / (nodes * on_node)] * (nodes * on_node)
    of_parts = [size / sum(sizes) for size in sizes]
    node = dispatcher.ep_rank // on_node
    of_nodes = [sum(shares[first : first + on_node]) for first in range(0, nodes * on_node, on_node)]
    ranks = range(node * on_node, (node + 1) * on_node)

    def reached(share: float) -> float:
        experts = share * dispatcher.num_experts
        return 1 - prod(max(1 - experts / (dispatcher.num_experts - drawn), 0.0) for drawn in range(top_k))

    def rows(share: float) -> int:
        return round(tokens * reached(share))

    computed = round(nodes * on_node * tokens * top_k * shares[dispatcher.ep_rank])
    return RowCounts(
        [[rows(part * share) for share in of_nodes] for part in of_parts],
        [[rows(part * of_nodes[node])] * nodes for part in of_parts],
        [[nodes * rows(part * shares[rank]) for rank in ranks] for part in of_parts],
        [[nodes * rows(part * shares[dispatcher.ep_rank])] * on_node for part in of_parts],
        [even(number, size) for number, size in zip(split(computed, sizes), sizes, strict=True)],
    )


def check_recorded(dispatch: str) -> None:
    """
    Raises:
        ExpertMeshError: no forecast can be made of a run with this dispatcher.
    """
    if not DISPATCHERS.get(dispatch).is_recorded:
        raise ExpertMeshError(f"--dispatch {dispatch}: cannot be recorded, so there is no forecast of it")


def split(rows: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `rows`."""
    ends = [round(rows * sum(shares[: number + 1]) / sum(shares)) for number in range(len(shares))]
    return [end - start for start, end in pairwise([0, *ends])]


class Splits:
    """Rows to and from each ep rank, by chunk, and those of this rank's experts, as even as possible (see
    `moe.dispatch.alltoall.HostCounts`)."""

    def __init__(self, sent: list[int], received: list[int], sizes: Sequence[int]):
        self.sent_PS, self.received_PS = (
            [list(part) for part in zip(*(split(n, sizes) for n in rows), strict=True)] for rows in (sent, received)
        )
        self.by_expert = [even(sum(rows_S), size) for rows_S, size in zip(self.received_PS, sizes, strict=True)]


@contextmanager
def given_rows(asked: Asked, tokens: int, top_k: int, shares: Sequence[float], recorder: Recorder) -> Iterator[None]:
    """Within it, how many rows there are is not asked of other ranks, and every expert here has as many as any other.

    Args:
        tokens: of a micro-batch. top_k: experts of each. shares: of all choices, each ep rank's; none: equally much.
    """
    ep_size, ep_rank = asked.config.ep_size, asked.rank % asked.config.ep_size

    def exchange_counts(counts_E: Tensor, group: Any, sizes: Sequence[int]) -> tuple[Tensor, Splits]:
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E, group=group)
        recorder.read()
        sent = split(tokens * top_k, shares or (1.0,) * ep_size)
        return received_E, Splits(sent, [sent[ep_rank]] * ep_size, sizes)

    def rows(dispatcher: OnceDispatcher, told: Any) -> RowCounts:
        # in a replay they have been in host memory since the first run
        if not is_replaying():
            recorder.read()
        return expected_rows(dispatcher, tokens, top_k, shares)

    def gather_counts(counts_C: Tensor, group: Any) -> tuple[Tensor, None]:
        counts_SC = counts_C.new_empty(group.size(), counts_C.numel())
        dist.all_to_all_single(torch.empty_like(counts_SC), counts_SC, group=group)
        return torch.empty_like(counts_SC), None

    with (
        mock.patch.multiple(alltoall, exchange_counts=exchange_counts, wait_for_counts=lambda device: None),
        mock.patch.multiple(once, gather_counts=gather_counts, wait_for_counts=lambda device: None),
        mock.patch.object(expert_rows, "read_counts", lambda counts_e, num_rows: even(num_rows, counts_e.numel())),
        mock.patch.object(OnceDispatcher, "rows", rows),
    ):
        yield
