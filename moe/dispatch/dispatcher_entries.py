"""The dispatchers: the values of `--dispatch`, and what checks, forecasts, `--help` and the README's table read of
them. Nothing here imports torch: what dispatches is made by an entry's `make`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..util.registry import Registry

if TYPE_CHECKING:
    from .dispatcher_registry import Dispatcher, DispatchOptions


@dataclass(frozen=True)
class EPGroup:
    """What decides which dispatcher `--dispatch auto` takes.

    ranks_per_node: ranks of the group on each node; None where nodes have unequally many. top_k: experts per token.
    """

    size: int
    ranks_per_node: int | None
    top_k: int

    @property
    def spans_nodes(self) -> bool:
        return self.ranks_per_node is None or self.ranks_per_node < self.size

    @property
    def ranks_of_token(self) -> float:
        """On how many ranks the experts of a token are, on average, where each choice is as likely to be on any."""
        return self.size * (1 - (1 - 1 / self.size) ** self.top_k)


@dataclass(frozen=True)
class DispatcherEntry:
    """
    Attributes:
        name: the value of `--dispatch`.
        how: for people: what of a token travels where, as in "once to each rank".
        sums: whether sums of several experts' results travel back, to which `--dispatch-sums` applies.
        by_nodes: whether it exchanges tokens in `NodeGroups`, and so depends on which ranks share a node.
        without_nodes: where an EP group is on one node, or its nodes have one rank each or unequally many of them, the
            dispatcher that takes the place of one that goes by nodes; its own name for the others.
        auto: where it stands in the order in which `auto` tries dispatchers, the highest first; None: `auto` never
            takes it for such a group.
        is_recorded: whether forecasts and dry runs can be made of it: it asks how many rows come by
            `alltoall.exchange_counts`, and sends them by `exchange.Exchange`.
        elsewhere: values of other tools' flags that ask for the same.
        make: makes a layer's (see `moe.util.registry`).
    """

    name: str
    how: str
    sums: bool
    by_nodes: bool
    without_nodes: str
    auto: Callable[[EPGroup], int | None]
    is_recorded: bool
    elsewhere: tuple[str, ...]
    make: "str | Callable[[DispatchOptions], Dispatcher]"


_FEW_RANKS = 2 / 3
"""Of a token's choices, at most as many ranks as `auto` sends it to once each, within a node. Forecast for Qwen3
30B-A3B on 8 H100, where 8 choices are on 5.3 ranks: 5 to 12 % more tokens/s."""

PLAIN_ENTRY = DispatcherEntry(
    "plain",
    how="a copy for each expert",
    sums=False,
    by_nodes=False,
    without_nodes="plain",
    # of one expert per token nothing is sent twice, and inside a node links are fast
    auto=lambda group: 20 if group.top_k == 1 or not group.spans_nodes else 0,
    is_recorded=True,
    elsewhere=("alltoall",),
    make="moe.dispatch.alltoall:plain_dispatcher",
)
RANK_ENTRY = DispatcherEntry(
    "rank",
    how="one for each rank with some of them",
    sums=True,
    by_nodes=False,
    without_nodes="rank",
    auto=lambda group: 30 if not group.spans_nodes and group.ranks_of_token <= _FEW_RANKS * group.top_k else None,
    is_recorded=True,
    elsewhere=(),
    make="moe.dispatch.dedup:once_dispatcher",
)
NODE_ENTRY = DispatcherEntry(
    "node",
    how="one for each node, and on from there",
    sums=True,
    by_nodes=True,
    without_nodes="rank",
    auto=lambda group: 10,
    is_recorded=True,
    elsewhere=("deepep",),
    make="moe.dispatch.dedup:once_dispatcher",
)

DISPATCHERS = Registry("--dispatch", ("auto",), (PLAIN_ENTRY, RANK_ENTRY, NODE_ENTRY))
"""All that can be asked for; `moe.dispatch.dispatcher_registry.register_dispatcher` adds to it."""


def dispatchers_of(asked: str) -> tuple[DispatcherEntry, ...]:
    """Those that `--dispatch` may come to: any, by "auto".

    Raises:
        ExpertMeshError: the name is unknown.
    """
    return DISPATCHERS.entries() if asked == "auto" else (DISPATCHERS.get(asked),)


def resolve_dispatch(asked: str, ep_size: int, ranks_per_node: int | None, top_k: int) -> DispatcherEntry:
    """The dispatcher for `--dispatch`; "auto" becomes the first in its order.

    Args:
        ranks_per_node: of an ep group; None where nodes have unequally many. With one rank on each node, or all on
            one, once to each node is once to each rank.

    Raises:
        ExpertMeshError: the name is unknown.
    """
    group = EPGroup(ep_size, ranks_per_node, top_k)
    places = [(entry, place) for entry in dispatchers_of(asked) if (place := entry.auto(group)) is not None]
    entry = max(places, key=lambda each: each[1])[0] if asked == "auto" else DISPATCHERS.get(asked)
    has_nodes = ranks_per_node is not None and 1 < ranks_per_node < ep_size
    return entry if has_nodes or not entry.by_nodes else DISPATCHERS.get(entry.without_nodes)


def help_of_dispatch() -> str:
    """What `--help` says of `--dispatch`."""
    ways = "; ".join(f"{entry.name}: {entry.how}" for entry in DISPATCHERS.entries())
    auto = "node across nodes; rank if that sends a third less; else plain"
    return f"How tokens travel. {ways}. auto: {auto}"
