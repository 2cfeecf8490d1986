"""A dry run in figures: of a rank's step the cost of each part (FLOPs, bytes moved, kernels' time at a card's rates),
the time of all, memory, and bytes sent."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ....sharding.parallelize.offload import frozen_experts
from ....sharding.stages import layers_here
from ....sharding.state import local_tensor
from ..memory import LASTING, Communicator
from ..planner.account import KINDS, Figures, Moment, PartCost
from ..planner.costs import Cluster, share_away
from .recorder import Event
from .seconds import event_seconds, step_seconds
from .world import Rehearsed


def figures_of(rehearsed: Rehearsed, names: Sequence[tuple[int, ...]] | None = None) -> Figures:
    """The figures of a step of as many micro-batches as are asked for.

    Args:
        names: of a short model, the layers of the complete one for whose moments each of its own stands.
    """
    asked, events = rehearsed.asked, rehearsed.recorder.events
    times = times_of(rehearsed, asked.config.micro_batches(asked.world_size))
    in_host = 0
    if asked.config.offload:
        kinds = max(rehearsed.held.values(), key=sum)
        in_host = sum(size for kind, size in zip(KINDS, kinds, strict=True) if kind in LASTING)
    elif asked.config.offload_experts:
        in_host = sum(local_tensor(part).nbytes for part in frozen_experts(rehearsed.model))
    return Figures(
        len(layers_here(rehearsed.model)),
        rehearsed.parameter_bytes,
        rehearsed.trained_bytes,
        rehearsed.state,
        in_host,
        rehearsed.held if names is None else _renamed(rehearsed.held, names),
        _sent_by(rehearsed, times),
        parts_of(events, times, asked.cluster),
        *step_seconds(events, times, asked.cluster),
        needed_flops(rehearsed, times),
        rehearsed.recorder.waits,
        sum(event.calls for event in events if event.micro is None),
    )


def _renamed(held: Mapping[Moment, tuple[int, ...]], names: Sequence[tuple[int, ...]]) -> dict[Moment, tuple[int, ...]]:
    return {
        replace(moment, layer=layer): kinds
        for moment, kinds in held.items()
        for layer in ((None,) if moment.layer is None else names[moment.layer])
    }


def stages_in_words(own: Sequence[int] | None, layers: Sequence[int]) -> str:
    """A rank's `own` stages and their layers; empty without a pipeline. layers: how many each stage has."""
    if own is None:
        return ""
    ends = [0, *accumulate(layers)]
    named = (f"stage {stage + 1} (layers {ends[stage]} to {ends[stage + 1] - 1})" for stage in own)
    return f"{', '.join(named)} of {len(layers)}"


def communicators(events: Sequence[Event], groups: Mapping[str, str]) -> list[Communicator]:
    """A rank's communicators with more than one rank. groups: what each process group is called, by torch's name."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for event in events:
        if event.collective is not None and len(event.ranks) > 1:
            ranks[event.group].update(event.ranks)
            kinds[event.group].add(event.collective)
    return [Communicator.of(groups[name], len(ranks[name]), kinds[name]) for name in ranks]


def _sent_by(
    rehearsed: Rehearsed, times: Mapping[int | None, int]
) -> dict[tuple[str, int, str], tuple[int, float, float]]:
    """What the rank sends in a step (see `Figures.sent`)."""
    totals: defaultdict[tuple[str, int, str], tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    for event in rehearsed.recorder.events:
        if event.collective is None or len(event.ranks) == 1:
            continue
        key, often = (rehearsed.groups[event.group], len(event.ranks), event.collective), times[event.micro]
        (number, total, between), sent = totals[key], often * event.sent
        away = share_away(key[2], event.ranks, rehearsed.asked.cluster.gpus_per_node)
        totals[key] = (number + often, total + sent, between + sent * away)
    return dict(totals)


def parts_of(events: Sequence[Event], times: Mapping[int | None, int], cluster: Cluster) -> dict[str, PartCost]:
    """The parts of a step, of whose micro-batches a few were run: those after the first are alike."""
    # there are too many events for an object each
    parts: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        often, part = times[event.micro], parts[event.place.part or "other"]
        part["flops"] += often * event.flops
        part["recomputed"] += often * ((event.flops - event.needed) * (event.phase != "optimizer step"))
        part["sent"] += often * event.sent
        if event.is_kernel:
            part["moved"] += often * event.moved
            part["kernels"] += often
            part["seconds"] += often * event_seconds(event, cluster.hardware)
    return {name: PartCost(**part) for name, part in parts.items()}


def needed_flops(rehearsed: Rehearsed, times: Mapping[int | None, int]) -> float:
    """FLOPs of the mean rank without recomputation in a step: what a model needs does not depend on who computes it."""
    of_experts = rehearsed.rows_over_mean
    return sum(
        times[event.micro] * event.needed / (of_experts if event.place.part == "expert GEMMs" else 1.0)
        for event in rehearsed.recorder.events
    )


def times_of(rehearsed: Rehearsed, micro: int) -> dict[int | None, int]:
    """For how many of a step's `micro` micro-batches each one stands that was run, by its number; None: what is in none
    of them. The one in the middle stands for those that were not run: in a pipeline's first and last ones no other
    micro-batch is on its way."""
    seen = 1 + max(event.micro for event in rehearsed.recorder.events if event.micro is not None)
    return {None: 1} | dict.fromkeys(range(seen), 1) | {seen // 2: micro - seen + 1}
