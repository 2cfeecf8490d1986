"""How long a step takes: a dry run's events on the clock of a rank's streams.

Three things overlap, as on a GPU's streams: kernels, one after the other; all-to-alls, which kernels wait for where
their rows are needed; and FSDP's gathering and reducing, each slower than alone while others run beside it. A layer's
kernels wait until its parameters are gathered, and until the host has called them; where the host has to know how many
rows come to a layer's experts, it waits for the kernels.

Left out: stragglers, data loading, and in a pipeline that different collectives meet on a link. What a rank waits for
other stages is not on its clock (see `planner.pipelines`).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ...monitoring.attribution import FSDP
from ..planner.account import LayerCosts, action_name
from ..planner.clock import Clock, StepTime, Transfer
from ..planner.costs import Cluster, kernel_seconds, seconds_among
from ..planner.hardware import Hardware
from .recorder import SENDS, Event, Maker


class EventClock(Clock):
    """A clock that goes through the events of a step."""

    def __init__(self, cluster: Cluster):
        super().__init__(cluster.hardware.rates)
        self.cluster, self.hardware = cluster, cluster.hardware
        self.gathering: dict[int, Transfer] = {}

    def go(self, event: Event) -> None:
        """Let what the event stands for be called, and run."""
        self.call(event.calls * self.rates.call)
        if event.waits:
            if event.unit is None:
                self.arrive(event.ranks)
            elif event.unit in self.gathering:
                self.until(self.gathering.pop(event.unit))
        elif event.is_read:
            self.launch()
            self.read()
        elif event.collective is not None:
            self._exchange(event)
        elif event.from_host:
            self.shard(event.from_host / self.hardware.device.host_bandwidth)
        else:
            self.launch()
            is_update = event.phase == "optimizer step"
            kind: Any = "update" if is_update else "matrices" if event.flops else "elementwise"
            self.kernel(event_seconds(event, self.hardware), kind)

    def _exchange(self, event: Event) -> None:
        if event.collective is None or event.collective in SENDS:
            # what stages send is in a pipeline's timetable
            return
        seconds, of_node = 0.0, self.cluster.gpus_per_node
        if len(event.ranks) > 1:
            seconds = seconds_among(event.collective, event.sent, event.ranks, self.hardware, of_node)
        if event.travels:
            self.send(event.ranks, seconds)
        elif event.place.part == FSDP:
            transfer = self.shard(seconds)
            if event.unit is not None:
                self.gathering[event.unit] = transfer
        elif event.gathers_activations:
            self.gather(seconds)
        elif len(event.ranks) > 1:
            self.wait(seconds)


def event_seconds(event: Event, hardware: Hardware) -> float:
    """Seconds of a kernel."""
    return kernel_seconds(event.flops, event.moved, event.work, hardware)


def step_seconds(
    events: Sequence[Event], times: Mapping[int | None, int], cluster: Cluster
) -> tuple[StepTime, dict[str, float]]:
    """Seconds of a step by what spends them; and of each action of a pipeline, by its name, the mean of all
    micro-batches.

    Args:
        events: of one rank, in order. times: for how many micro-batches of the step each stands that was run (see
            `times_of`).
    """
    clock, spent, step = EventClock(cluster), StepTime(), StepTime()
    actions: defaultdict[str, float] = defaultdict(float)
    micro_batches = sum(often for micro, often in times.items() if micro is not None)
    for (micro, action), together in groupby(events, key=lambda event: (event.micro, event.action)):
        is_update = False
        for event in together:
            is_update = is_update or event.phase == "optimizer step"
            clock.go(event)
        clock.end()
        before, spent = spent, replace(clock.spent)
        more = spent - before
        if is_update:
            # the host's calls where they take longer
            more = replace(more, update=more.update + more.launching, launching=0.0)
        step += more * times[micro]
        if action is not None:
            actions[action_name(action.kind, action.stage)] += more.total * times[micro] / micro_batches
    return step, dict(actions)


def layer_costs(
    events: Sequence[Event], kept: Sequence[tuple[Maker, int]], kinds: Sequence[int], cluster: Cluster
) -> dict[str, LayerCosts]:
    """What each kind of layer takes of the last micro-batch, the mean over those that were run; and what is "before"
    and "after" them; "root": FSDP with the parameters that are in no layer.

    Args:
        kept: see `Rehearsed`. kinds: of the layers that were run.
    """
    clock, last = EventClock(cluster), max(event.micro for event in events if event.micro is not None)
    # there are too many events for an object each
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    has_seen_layers = {True: False, False: False}
    for event in events:
        before, is_forward = clock.now, event.phase == "forward"
        clock.go(event)
        if event.micro != last:
            continue
        has_seen_layers[is_forward] |= event.layer is not None
        around = "after" if has_seen_layers[is_forward] == is_forward else "before"
        is_root = event.place.part == FSDP or event.unit is not None
        where = ("root" if is_root else around) if event.layer is None else str(kinds[event.layer])
        seconds = clock.now - before
        costs = found[where]
        costs["forward" if is_forward else "backward"] += seconds
        if is_forward and event.flops and event.place.part == "expert GEMMs":
            costs["weights"] += event_seconds(event, cluster.hardware)
            costs["queued"] += event.moved
    around = "before"
    for maker, size in kept:
        if maker.micro == last:
            around = around if maker.layer is None else "after"
            found[around if maker.layer is None else str(kinds[maker.layer])]["kept"] += size
    layers = Counter(map(str, kinds))
    return {where: LayerCosts(**costs) * (1 / max(1, layers[where])) for where, costs in found.items()}
