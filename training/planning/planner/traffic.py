"""What a rank sends in one step, in bytes: by collective, by group, and by link.

Counted is what a rank has to send where n ranks take part: of an all-gather n - 1 times its shard; of a reduce-scatter
(n - 1)/n of its input; of an all-reduce twice that; of an all-to-all what goes to others; of a stage's output all.

Links: a ring's rank sends to the next one alone, and a node's k ranks of the group each begin a ring of their own (as
nccl has it, a ring a network card), so of what each sends 1/k leaves the node. An all-to-all goes straight from rank to
rank.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from ....sharding.topology import Axis
from .setting import Setting
from .step_order import Act, Name, PlannedRun
from .units import Unit, unit

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind that a step has.

    what: that is sent. group: the axis over which it goes. times: how often. sent: bytes that one rank sends, each
    time.
    """

    what: str
    kind: Kind
    group: Axis
    times: int
    sent: float

    @property
    def total(self) -> float:
        return self.times * self.sent


def all_gather(unit: Unit) -> float:
    return float((unit.ranks - 1) * unit.computed)


def reduce_scatter(unit: Unit) -> float:
    """Bytes that a rank sends in a reduce-scatter of a unit's gradients, in fp32."""
    return float((unit.ranks - 1) * 4 * unit.trained)


def all_reduce(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def axis_of(name: Name) -> Axis:
    """The ranks over which a unit is sharded."""
    if name.kind == "experts":
        return "dp"
    return "dense of tp" if name.kind == "region" else "dense"


def step_traffic(run: PlannedRun, balance: bool = False) -> list[Traffic]:
    """Everything that `training.step.train_step` sends, but what sends nothing since its group is one rank.

    Args:
        balance: whether there is a balancing loss, pooled over layers, whose counts are added up over all ranks.
    """
    forwards, world = run.setting.accumulation, run.setting.world_size
    times: Counter[Traffic] = Counter()
    for act in run.acts:
        for traffic in act_traffic(act, run):
            times[traffic] += forwards
    times[Traffic("layer outputs", "send", "pp", 1, stage_output(run))] = forwards * _sends(run)
    times.update(sharing(run))
    if (tp_size := run.setting.tp_size) > 1:
        once = run.measured.in_common * (1 - 1 / tp_size)
        times[Traffic("positions", "all-gather", "tp", 1, once)] = forwards * len(run.stages)
    times[Traffic("token counts", "all-reduce", "world", 1, all_reduce(world, forwards * 3 * 8))] = 1
    times[Traffic("losses, gradient norm", "all-reduce", "world", 1, all_reduce(world, 6 * 8))] = 1
    if balance:
        counts = all_reduce(run.setting.ranks_per_stage, run.model.num_experts * 8)
        times[Traffic("expert counts", "all-reduce", "stage", 1, counts)] = forwards
    return [replace(traffic, times=often) for traffic, often in times.items() if traffic.sent > 0 and often > 0]


def stage_output(run: PlannedRun) -> float:
    """Bytes of what a stage gives to the next one for a micro-batch, which are those of the gradient that comes back;
    what the routers' losses travel with is left out."""
    if run.setting.pp_size == 1:
        return 0.0
    return float(max(kind.carried for kind in run.measured.kinds))


def _sends(run: PlannedRun) -> int:
    """How often a rank sends a stage's output, or its gradient, for a micro-batch."""
    last = len(run.all_stages) - 1
    return sum((stage < last) + (stage > 0) for stage in run.stages)


def sharing(run: PlannedRun) -> list[Traffic]:
    """All-reduces of the gradients of parameters of which several pp indices, this one among them, have a copy."""
    found = []
    for parameter, holders in zip(run.model.root, run.root_holders, strict=True):
        if parameter.is_trained and len(holders) > 1 and run.pp_rank in holders:
            gradient = unit((parameter,), run.setting.dense_ranks).gradient
            found.append(Traffic("shared parameters", "all-reduce", "pp", 1, all_reduce(len(holders), gradient)))
    return found


def act_traffic(act: Act, run: PlannedRun) -> Iterator[Traffic]:
    """What one action sends, also what sends nothing since its group is one rank."""
    what = {"layer": "layers", "experts": "experts", "region": "heads, dense MLPs"}.get(act.unit.kind)
    if what is None or act.unit.layer < 0:
        what = "embedding, LM head"
    unit, group = run.units[act.unit], axis_of(act.unit)
    if act.doing == "gather":
        yield Traffic(what, "all-gather", group, 1, all_gather(unit))
    elif act.doing == "reduce":
        yield Traffic(what, "reduce-scatter", group, 1, reduce_scatter(unit))
        yield Traffic(what, "all-reduce", "dp", 1, all_reduce(unit.replicas, 4 * unit.trained))
    elif act.span is not None:
        for stretch in act.span.stretches:
            if stretch.then in ("send", "exchange"):
                # nothing else of the experts' is waited for at once
                of_ep = "counts" if stretch.then == "exchange" else "rows"
                sent_what = _IN_LAYERS.get(stretch.group, of_ep)
                yield Traffic(sent_what, stretch.exchange, stretch.group, 1, stretch.sent)


_IN_LAYERS = {"cp": "heads", "tp": "activations", "sequences": "sequences"}
"""What is sent within layers, over groups other than an ep group."""


@cache
def ranks_a_node(ranks: Sequence[int], gpus_per_node: int) -> int:
    """How many of a group's ranks share a node, where they are fewest."""
    return min(Counter(rank // gpus_per_node for rank in ranks).values())


def between_nodes(traffic: Traffic, setting: Setting, gpus_per_node: int) -> float:
    """The fraction of it that leaves the node."""
    return share_away(traffic.kind, setting.group(traffic.group), gpus_per_node)


def share_away(kind: str, ranks: Sequence[int], gpus_per_node: int) -> float:
    """The fraction of what a rank sends in a collective of `ranks` that leaves the node: to ranks on other nodes, or
    round a ring; of what a stage sends, where any has to leave it."""
    here = ranks_a_node(ranks, gpus_per_node)
    if here == len(ranks):
        return 0.0
    if kind == "send":
        return 1.0
    return (len(ranks) - here) / (len(ranks) - 1) if kind == "all-to-all" else 1 / here


def by_link(traffic: Sequence[Traffic], setting: Setting, gpus_per_node: int) -> tuple[float, float]:
    """(bytes inside the node, bytes between nodes) that a rank sends in a step."""
    away = sum(t.total * between_nodes(t, setting, gpus_per_node) for t in traffic)
    return sum(t.total for t in traffic) - away, away
