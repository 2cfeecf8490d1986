"""What a rank sends in one step, in bytes: by collective, by group, and by link.

Counted is what a rank has to send where n ranks take part: of an all-gather n - 1 times its part; of a reduce-scatter
(n - 1)/n of its input; of an all-reduce twice that; of an all-to-all what goes to others.

Links: a ring's rank sends to the next one alone, and a node's k ranks of the group each begin a ring of their own (as
nccl has it, a ring a network card), so of what each sends 1/k leaves the node. An all-to-all goes straight from rank to
rank.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from sharding.planner.memory import rows_sent
from sharding.planner.setting import Setting, Unit, units_of
from sharding.planner.shapes import ModelShape

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
GroupName = Literal["dp", "ep", "all"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind that a step has.

    what: that is sent. group: over which it goes. times: how often. sent: bytes that one rank sends, each time.
    """

    what: str
    kind: Kind
    group: GroupName
    times: int
    sent: float

    @property
    def total(self) -> float:
        return self.times * self.sent


def all_gather(unit: Unit, number_bytes: int) -> float:
    return (unit.ranks - 1) * unit.shard * number_bytes


def reduce_scatter(unit: Unit, number_bytes: int) -> float:
    return (unit.ranks - 1) / unit.ranks * unit.gathered * number_bytes


def all_reduce(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def step_traffic(model: ModelShape, setting: Setting, balance: bool = False) -> list[Traffic]:
    """Everything that `training.step.train_step` sends, but what sends nothing since its group is one rank.

    Args:
        balance: whether there is a balancing loss, pooled over layers, whose counts are added up over all ranks.
    """
    return [traffic for traffic in _all_traffic(model, setting, balance) if traffic.sent > 0]


def _all_traffic(model: ModelShape, setting: Setting, balance: bool) -> Iterator[Traffic]:
    units, layers, forwards = units_of(model, setting), model.num_layers, setting.accumulation
    dense: GroupName = "ep" if setting.dense_shard == "hybrid" else "all"
    c = setting.compute_bytes
    gathers = layers * forwards * (2 if setting.reshard_after_forward else 1)
    yield Traffic("layers", "all-gather", dense, gathers, all_gather(units.layer, c))
    yield Traffic("layers", "reduce-scatter", dense, layers * forwards, reduce_scatter(units.layer, 4))
    yield Traffic("embedding, head", "all-gather", dense, forwards, all_gather(units.root, c))
    yield Traffic("embedding, head", "reduce-scatter", dense, forwards, reduce_scatter(units.root, 4))
    yield Traffic("experts", "all-gather", "dp", gathers, all_gather(units.experts, c))
    yield Traffic("experts", "reduce-scatter", "dp", layers * forwards, reduce_scatter(units.experts, 4))
    if setting.dense_shard == "hybrid":
        for what, unit, times in (("layers", units.layer, layers), ("embedding, head", units.root, 1)):
            yield Traffic(what, "all-reduce", "dp", times * forwards, all_reduce(setting.dp_size, unit.shard * 4))

    others = (setting.ep_size - 1) / setting.ep_size
    rows = rows_sent(setting, model) * model.moe.model_width * c
    # out and back, forward and backward; full checkpointing makes both of the forward's once more
    repeated = setting.checkpointing == "full"
    yield Traffic("rows", "all-to-all", "ep", layers * forwards * (6 if repeated else 4), others * rows)
    counts = others * model.moe.num_experts * 8
    yield Traffic("counts", "all-to-all", "ep", layers * forwards * (2 if repeated else 1), counts)

    world = setting.world_size
    yield Traffic("numbers of tokens", "all-reduce", "all", 1, all_reduce(world, forwards * 3 * 8))
    yield Traffic("losses", "all-reduce", "all", 1, all_reduce(world, 3 * 8))
    yield Traffic("gradient norm", "all-reduce", "all", 1, all_reduce(world, 8))
    if balance:
        yield Traffic("expert counts", "all-reduce", "all", forwards, all_reduce(world, model.moe.num_experts * 8))


def group_ranks(group: GroupName, setting: Setting) -> range:
    """The ranks of rank 0's group: of a dp group every ep_size-th, of an ep group neighbours (see `Topology`)."""
    if group == "all":
        return range(setting.world_size)
    size, other = (setting.dp_size, setting.ep_size) if group == "dp" else (setting.ep_size, setting.dp_size)
    are_neighbours = (group == "ep") != setting.ep_across_nodes
    return range(size) if are_neighbours else range(0, setting.world_size, other)


@cache
def ranks_a_node(ranks: Sequence[int], gpus_per_node: int) -> int:
    """How many of a group's ranks share a node, where they are fewest."""
    return min(Counter(rank // gpus_per_node for rank in ranks).values())


def between_nodes(traffic: Traffic, setting: Setting, gpus_per_node: int) -> float:
    """The share of it that leaves the node."""
    return share_away(traffic.kind, group_ranks(traffic.group, setting), gpus_per_node)


def share_away(kind: str, ranks: Sequence[int], gpus_per_node: int) -> float:
    """The share of what a rank sends in a collective of `ranks` that leaves the node: to ranks on other nodes, or round
    a ring."""
    here = ranks_a_node(ranks, gpus_per_node)
    if here == len(ranks):
        return 0.0
    return (len(ranks) - here) / (len(ranks) - 1) if kind == "all-to-all" else 1 / here


def by_link(traffic: Sequence[Traffic], setting: Setting, gpus_per_node: int) -> tuple[float, float]:
    """(bytes inside the node, bytes between nodes) that a rank sends in a step."""
    away = sum(t.total * between_nodes(t, setting, gpus_per_node) for t in traffic)
    return sum(t.total for t in traffic) - away, away
