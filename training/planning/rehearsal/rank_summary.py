"""All that a dry run tells of one rank, in figures: of its step the cost breakdown by part (FLOPs, bytes moved, and
kernels' time at a card's rates), memory, and bytes sent. How long a step takes the planner says."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ....moe.experts.model_layers import decoder_layers
from ....sharding.parallelize.offload import frozen_experts
from ....sharding.pipeline.pipeline import Pipeline, pipeline_of
from ....sharding.stages import layers_here
from ....sharding.state import local_tensor
from ...config.train_config import TrainConfig
from ..memory import Communicator, Fit
from ..planner.cost import kernel_seconds
from ..planner.hardware import Hardware
from .peaks import PeakMemory
from .recorder import Event
from .world import Rehearsed


@dataclass
class PartCost:
    """Cost of one part of a step.

    flops: computed; recomputed: of these, by activation checkpointing. moved: bytes read and written on the device.
    kernels: launched. seconds: at the card's rates, without collectives.
    """

    name: str
    flops: float = 0.0
    recomputed: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    sent: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class SentBytes:
    """Collectives of one kind in one group, of a whole step. group: its purpose. ranks: in it. times: calls. total:
    bytes to other ranks, of all calls."""

    group: str
    ranks: int
    kind: str
    times: int
    total: float


@dataclass(frozen=True)
class Moment:
    """The most that tensors hold in a phase, and where that is."""

    phase: str
    peak: int
    where: str


@dataclass(frozen=True)
class Account:
    """Cost breakdown of one rank's step, memory in bytes.

    Attributes:
        forwards: micro-batches of a step.
        layers: how many were run, of how many. stages: of a pipeline, that were run, in words.
        moments: by phase. sent: the most bytes first.
        parts: the one that takes longest first.
        needed: FLOPs of the mean rank without recomputation.
        host_waits: how often the host waits for the device, in the micro-batches that were run. update_operators: that
            it calls outside of forwards and backwards.
    """

    rank: int
    forwards: int
    layers: tuple[int, int]
    stages: str
    parameters: int
    memory: PeakMemory
    fit: Fit
    moments: Sequence[Moment]
    sent: Sequence[SentBytes]
    parts: Sequence[PartCost]
    needed: float
    host_waits: int
    update_operators: int

    @property
    def total(self) -> PartCost:
        """Sums over all parts."""
        figures = (field.name for field in fields(PartCost)[1:])
        return PartCost("all", *(sum(getattr(part, figure) for part in self.parts) for figure in figures))

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds and FLOPs."""
        memory = asdict(self.memory) | {"at": [[*place, size] for place, size in self.memory.at.items()]}
        return asdict(self) | {"memory": memory, "fits": self.fit.is_enough, "needed_bytes": self.fit.total}


def account_of(rehearsed: Rehearsed, config: TrainConfig, hardware: Hardware, world_size: int, rank: int) -> Account:
    """The cost breakdown of a step of as many micro-batches as `config` asks for."""
    forwards = config.micro_batches(world_size)
    events, memory = rehearsed.recorder.events, rehearsed.memory
    in_host = memory.kinds.lasting if config.offload else 0.0
    if config.offload_experts:
        in_host = float(sum(local_tensor(part).nbytes for part in frozen_experts(rehearsed.model)))
    return Account(
        rank,
        forwards,
        (len(layers_here(rehearsed.model)), len(decoder_layers(rehearsed.model))),
        stages_in_words(pipeline_of(rehearsed.model)),
        rehearsed.counts.total,
        memory,
        Fit.of(memory.kinds, communicators(events, rehearsed.groups), hardware.device.memory, in_host),
        _moments(memory, in_host if config.offload_experts else 0.0),
        sent_by(rehearsed, forwards),
        parts_of(rehearsed, forwards, hardware),
        needed_flops(rehearsed, forwards),
        rehearsed.recorder.waits,
        round(rehearsed.recorder.calls[None]),
    )


def stages_in_words(pipeline: Pipeline | None) -> str:
    """A rank's stages and their layers; empty without a pipeline."""
    if pipeline is None:
        return ""
    stages, index = pipeline.stages, pipeline.groups.index
    own = (
        f"stage {index + 1 + stages.pp_size * chunk} (layers {stages.layers[stage][0]} to {stages.layers[stage][-1]})"
        for chunk, stage in enumerate(stages.here)
    )
    return f"{', '.join(own)} of {stages.pp_size * pipeline.chunks}"


def communicators(events: Sequence[Event], groups: Mapping[str, str]) -> list[Communicator]:
    """A rank's communicators with more than one rank. groups: what each process group is called, by torch's name."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for event in events:
        if event.collective is not None and len(event.ranks) > 1:
            ranks[event.group].update(event.ranks)
            kinds[event.group].add(event.collective)
    return [Communicator.of(groups[name], len(ranks[name]), kinds[name]) for name in ranks]


def _moments(memory: PeakMemory, in_host: float) -> list[Moment]:
    """Peaks by phase, of whichever micro-batch, without what is in host memory all the time."""
    moments: list[Moment] = []
    for phase in ("forward", "recomputation", "backward", "optimizer step"):
        in_layers: defaultdict[int | None, int] = defaultdict(int)
        for (of, _, layer), size in memory.at.items():
            if of == phase:
                in_layers[layer] = max(in_layers[layer], size)
        for is_layer in (True, False):
            sizes = {layer: size for layer, size in in_layers.items() if (layer is not None) == is_layer}
            if sizes:
                layer, size = max(sizes.items(), key=lambda item: item[1])
                outside = "clipping, update" if phase == "optimizer step" else "outside of the layers"
                moments.append(Moment(phase, size - int(in_host), f"layer {layer}" if is_layer else outside))
    return moments


def sent_by(rehearsed: Rehearsed, micro: int) -> list[SentBytes]:
    """What the rank sends in a step of `micro` micro-batches."""
    often = times_of(rehearsed, micro)
    totals: defaultdict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in rehearsed.recorder.events:
        if event.collective is None or len(event.ranks) == 1:
            continue
        total = totals[rehearsed.groups[event.group], len(event.ranks), event.collective]
        for place, more in enumerate((1, event.sent)):
            total[place] += often[event.micro] * more
    found = (SentBytes(*key, int(times), sent) for key, (times, sent) in totals.items())
    return sorted(found, key=lambda sent: -sent.total)


def parts_of(rehearsed: Rehearsed, micro: int, hardware: Hardware) -> list[PartCost]:
    """The parts of a step of `micro` micro-batches, of which a few were run: those after the first are alike."""
    times = times_of(rehearsed, micro)
    parts: dict[str, PartCost] = defaultdict(lambda: PartCost(""))
    for event in rehearsed.recorder.events:
        part, often = parts[event.place.part or "other"], times[event.micro]
        part.name = event.place.part or "other"
        part.flops += often * event.flops
        part.recomputed += often * (event.flops - event.needed) * (event.phase != "optimizer step")
        part.sent += often * event.sent
        if event.is_kernel:
            part.moved += often * event.moved
            part.kernels += often
            part.seconds += often * event_seconds(event, hardware)
    return sorted(parts.values(), key=lambda part: -part.seconds)


def needed_flops(rehearsed: Rehearsed, micro: int) -> float:
    """FLOPs of the mean rank without recomputation in a step of `micro` micro-batches."""
    times = times_of(rehearsed, micro)
    return sum(
        times[event.micro] * event.needed / _rows_over_mean(event, rehearsed) for event in rehearsed.recorder.events
    )


def _rows_over_mean(event: Event, rehearsed: Rehearsed) -> float:
    """By how much an event is larger than on the mean rank: what a model needs does not depend on who computes it."""
    return rehearsed.rows_over_mean if event.place.part == "expert GEMMs" else 1.0


def times_of(rehearsed: Rehearsed, micro: int) -> dict[int | None, int]:
    """For how many of a step's `micro` micro-batches each one stands that was run, by its number; None: what is in none
    of them. The one in the middle stands for those that were not run: in a pipeline's first and last ones no other
    micro-batch is on its way."""
    seen = 1 + max(event.micro for event in rehearsed.recorder.events if event.micro is not None)
    return {None: 1} | dict.fromkeys(range(seen), 1) | {seen // 2: micro - seen + 1}


def event_seconds(event: Event, hardware: Hardware) -> float:
    return kernel_seconds(event.flops, event.moved, event.work, hardware)
