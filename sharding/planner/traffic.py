"""What a rank sends in one step, in bytes: by collective, by group, and by link.

Counted is what a rank has to send where n ranks take part: of an all-gather n - 1 times its part; of a reduce-scatter
(n - 1)/n of its input; of an all-reduce twice that; of an all-to-all what goes to others.

Links: a ring's rank sends to the next one alone, and a node's k ranks of the group each begin a ring of their own (as
nccl has it, a ring a network card), so of what each sends 1/k leaves the node. An all-to-all goes straight from rank to
rank.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from sharding.planner.order import Act, Name, Run
from sharding.planner.setting import Setting
from sharding.planner.units import Unit

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
GroupName = Literal["dp", "ep", "cp", "all"]


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


def all_gather(unit: Unit) -> float:
    return float((unit.ranks - 1) * unit.computed)


def reduce_scatter(unit: Unit) -> float:
    """Of gradients, in fp32."""
    return float((unit.ranks - 1) * 4 * unit.trained)


def all_reduce(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def group_of(name: Name, setting: Setting) -> GroupName:
    """Over which a unit is shared out."""
    if name.kind == "experts":
        return "dp"
    return "ep" if setting.dense_shard == "hybrid" else "all"


def step_traffic(run: Run, balance: bool = False) -> list[Traffic]:
    """Everything that `training.step.train_step` sends, but what sends nothing since its group is one rank.

    Args:
        balance: whether there is a balancing loss, pooled over layers, whose counts are added up over all ranks.
    """
    forwards, world = run.setting.accumulation, run.setting.world_size
    times: Counter[Traffic] = Counter()
    for act in run.acts:
        for traffic in _of_act(act, run):
            times[traffic] += forwards
    times[Traffic("token counts", "all-reduce", "all", 1, all_reduce(world, forwards * 3 * 8))] = 1
    times[Traffic("losses", "all-reduce", "all", 1, all_reduce(world, 3 * 8))] = 1
    times[Traffic("gradient norm", "all-reduce", "all", 1, all_reduce(world, 8))] = 1
    if balance:
        counts = all_reduce(world, run.model.num_experts * 8)
        times[Traffic("expert counts", "all-reduce", "all", 1, counts)] = forwards
    return [replace(traffic, times=often) for traffic, often in times.items() if traffic.sent > 0]


def _of_act(act: Act, run: Run) -> Iterator[Traffic]:
    what = {"root": "embedding, LM head", "layer": "layers", "experts": "experts"}[act.unit.kind]
    unit, group = run.units[act.unit], group_of(act.unit, run.setting)
    if act.doing == "gather":
        yield Traffic(what, "all-gather", group, 1, all_gather(unit))
    elif act.doing == "reduce":
        yield Traffic(what, "reduce-scatter", group, 1, reduce_scatter(unit))
        yield Traffic(what, "all-reduce", "dp", 1, all_reduce(unit.replicas, 4 * unit.trained))
    elif act.span is not None:
        counts = 8 * run.model.num_experts * (1 - 1 / run.setting.ep_size)
        for stretch in act.span.stretches:
            if stretch.then in ("send", "exchange"):
                of_ep = "counts" if stretch.sent == counts else "rows"
                sent_what = "heads" if stretch.group == "cp" else of_ep
                yield Traffic(sent_what, "all-to-all", stretch.group, 1, stretch.sent)


def group_ranks(group: GroupName, setting: Setting) -> range:
    """The ranks of rank 0's group: of a dp group every ep_size-th, of an ep or cp group neighbours (see `Topology`)."""
    if group == "all":
        return range(setting.world_size)
    if group == "cp":
        return range(setting.cp_size)
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
