"""All that a dry run tells of one rank, in figures: of its step the cost breakdown by part (FLOPs, bytes moved, and
time at a card's rates), its part of a pipeline, memory, and bytes sent."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any

from ....sharding.pipeline.pipeline import Pipeline, pipeline_of
from ....sharding.pipeline.schedule import Action, ScheduleName, make_schedule
from ....sharding.pipeline.timeline import Costs, simulate
from ....sharding.stages import layers_here
from ...config.train_config import TrainConfig
from ..memory import Communicator, Fit
from ..planner.clock import Clock, StepTime, Transfer
from ..planner.cost import kernel_seconds, seconds_among
from ..planner.hardware import Hardware
from .peaks import PeakMemory
from .recorder import SENDS, Event
from .world import Rehearsed


@dataclass(frozen=True)
class StageSeconds:
    """What a stage takes for one micro-batch. weights: of weight gradients that are computed later than others; send:
    of the output's way to the next stage, or of its gradient's to the one before."""

    forward: float
    backward: float
    weights: float
    send: float


def slowest_of_stages(by_rank: Iterable[Mapping[int, StageSeconds]]) -> dict[int, StageSeconds]:
    """Each stage's seconds where several of its ranks were run: of each figure the largest, as the ranks of a stage
    exchange tokens with one another and wait for the slowest."""
    slowest: dict[int, StageSeconds] = {}
    for stages in by_rank:
        for number, seconds in stages.items():
            known = slowest.get(number, seconds)
            slowest[number] = StageSeconds(*map(max, astuple(known), astuple(seconds)))
    return slowest


@dataclass(frozen=True)
class PipelinePart:
    """A rank's part of a pipeline.

    Attributes:
        index: the rank's pp index.
        layers: its decoder layers, as (first, last) of each of its stages.
        stages: what its stages take.
        waited: seconds of a step in which it waits for other stages.
        bubble: the mean over all ranks, as a share of the time from the first forward to the last backward.
    """

    schedule: ScheduleName
    pp_size: int
    chunks: int
    micro_batches: int
    index: int
    layers: Sequence[tuple[int, int]]
    stages: Mapping[int, StageSeconds]
    waited: float = 0.0
    bubble: float = 0.0

    @staticmethod
    def of(pipeline: Pipeline, micro_batches: int, stages: Mapping[int, StageSeconds]) -> "PipelinePart":
        """The part of a rank whose stages were run."""
        layers = [(part[0], part[-1]) for part in (pipeline.stages.layers[stage] for stage in pipeline.stages.here)]
        figures = (pipeline.schedule, pipeline.stages.pp_size, pipeline.chunks, micro_batches, pipeline.groups.index)
        return PipelinePart(*figures, layers, stages).among(stages)

    def among(self, stages: Mapping[int, StageSeconds]) -> "PipelinePart":
        """The same where these stages were run; others take as long as their mean."""
        mean = [sum(figures) / len(stages) for figures in zip(*map(astuple, stages.values()), strict=True)]
        all_stages = [stages.get(stage, StageSeconds(*mean)) for stage in range(self.pp_size * self.chunks)]
        costs = Costs(
            [stage.forward for stage in all_stages],
            [stage.backward for stage in all_stages],
            [stage.weights for stage in all_stages],
            max(stage.send for stage in all_stages),
        )
        found = simulate(make_schedule(self.schedule, self.pp_size, self.chunks, self.micro_batches), costs)
        return replace(self, waited=found.seconds * found.idle[self.index], bubble=found.bubble)

    @property
    def told(self) -> str:
        """Its stages and their layers, in words."""
        own = (
            f"stage {self.index + 1 + self.pp_size * chunk} (layers {first} to {last})"
            for chunk, (first, last) in enumerate(self.layers)
        )
        return f"{', '.join(own)} of {self.pp_size * self.chunks}"


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
class Ledger:
    """Cost breakdown of a step of one rank.

    parts: by time, the longest first. needed: FLOPs of the mean rank without recomputation. time: of the whole step.
    pipeline: of which the rank has stages, if any.
    """

    parts: list[PartCost]
    needed: float
    time: StepTime
    pipeline: PipelinePart | None = None

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def total(self) -> PartCost:
        """Sums over all parts."""
        figures = (field.name for field in fields(PartCost)[1:])
        return PartCost("all", *(sum(getattr(part, figure) for part in self.parts) for figure in figures))

    def within(self, pipeline: PipelinePart) -> "Ledger":
        """The same with what the rank waits in a pipeline."""
        return replace(self, time=replace(self.time, bubble=pipeline.waited), pipeline=pipeline)

    def share_of_peak(self, hardware: Hardware) -> float:
        """The model's FLOPs over those of the card in bf16 in the time of the step: MFU, whatever computes in fp8."""
        return self.needed / (self.seconds * hardware.device.matrix)


@dataclass(frozen=True)
class SentBytes:
    """Collectives of one kind in one group, of a whole step. group: its purpose. ranks: in it. times: calls. total:
    bytes to other ranks, of all calls. seconds: that they take."""

    group: str
    ranks: int
    kind: str
    times: int
    total: float
    seconds: float


@dataclass(frozen=True)
class Moment:
    """The most that tensors hold in a phase, and where that is."""

    phase: str
    peak: int
    where: str


@dataclass(frozen=True)
class Account:
    """Cost breakdown of one rank's step, memory in bytes. tokens: of all its micro-batches; in a pipeline, the share of
    one rank. layers: how many were run, of how many. moments: by phase. sent: by seconds. mfu: of the card's rate."""

    rank: int
    forwards: int
    tokens: int
    layers: tuple[int, int]
    parameters: int
    memory: PeakMemory
    fit: Fit
    moments: Sequence[Moment]
    sent: Sequence[SentBytes]
    ledger: Ledger
    mfu: float

    def among(self, stages: Mapping[int, StageSeconds], hardware: Hardware) -> "Account":
        """The same in a pipeline where these stages were run."""
        if self.ledger.pipeline is None:
            return self
        account = self.ledger.within(self.ledger.pipeline.among(stages))
        return replace(self, ledger=account, mfu=account.share_of_peak(hardware))

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds and FLOPs."""
        memory = asdict(self.memory) | {"at": [[*place, size] for place, size in self.memory.at.items()]}
        return asdict(self) | {
            "memory": memory,
            "fits": self.fit.is_enough,
            "needed_bytes": self.fit.total,
            "seconds": self.ledger.seconds,
            "tokens_per_second": self.tokens / self.ledger.seconds,
        }


def account_of(
    rehearsed: Rehearsed, config: TrainConfig, hardware: Hardware, world_size: int, gpus_per_node: int, rank: int
) -> Account:
    """The cost breakdown of a step of as many micro-batches as `config` asks for."""
    forwards = config.micro_batches(world_size)
    account = ledger(rehearsed, forwards, hardware, gpus_per_node)
    events, memory = rehearsed.step.events, rehearsed.memory
    layers, here = rehearsed.stack.stand_ins, layers_here(rehearsed.model)
    return Account(
        rank,
        forwards,
        forwards * rehearsed.tokens // config.pp_size,
        (len(set(layers)) if config.pp_size == 1 else len(here), len(layers)),
        rehearsed.counts.total,
        memory,
        Fit.of(memory.kinds, communicators(events, rehearsed.groups), hardware.device.memory, config.offload),
        _moments(memory),
        _sent(rehearsed, forwards, hardware, gpus_per_node),
        account,
        account.share_of_peak(hardware),
    )


def communicators(events: Sequence[Event], groups: Mapping[str, str]) -> list[Communicator]:
    """A rank's communicators with more than one rank. groups: what each process group is called, by torch's name."""
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for event in events:
        if event.collective is not None and len(event.ranks) > 1:
            ranks[event.group].update(event.ranks)
            kinds[event.group].add(event.collective)
    return [Communicator.of(groups[name], len(ranks[name]), kinds[name]) for name in ranks]


def _moments(memory: PeakMemory) -> list[Moment]:
    """Peaks by phase, of whichever micro-batch."""
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
                moments.append(Moment(phase, size, f"layer {layer}" if is_layer else outside))
    return moments


def _sent(rehearsed: Rehearsed, forwards: int, hardware: Hardware, gpus_per_node: int) -> list[SentBytes]:
    often = times_of(rehearsed, forwards)
    totals: defaultdict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for event in rehearsed.step.events:
        if event.collective is None or len(event.ranks) == 1:
            continue
        seconds = seconds_among(event.collective, event.sent, event.ranks, hardware, gpus_per_node)
        total = totals[rehearsed.groups[event.group], len(event.ranks), event.collective]
        for place, more in enumerate((1, event.sent, seconds)):
            total[place] += often[event.micro] * more
    found = (SentBytes(*key, int(times), sent, seconds) for key, (times, sent, seconds) in totals.items())
    return sorted(found, key=lambda sent: -sent.seconds)


def ledger(rehearsed: Rehearsed, micro: int, hardware: Hardware, gpus_per_node: int) -> Ledger:
    """The cost breakdown of a step of `micro` micro-batches, of which a few were run: those after the first are
    alike."""
    events = rehearsed.step.events
    times = times_of(rehearsed, micro)
    parts: dict[str, PartCost] = defaultdict(lambda: PartCost(""))
    for event in events:
        part, often = parts[event.place.part or "other"], times[event.micro]
        part.name = event.place.part or "other"
        part.flops += often * event.flops
        part.recomputed += often * (event.flops - event.needed) * (event.phase != "optimizer step")
        part.sent += often * event.sent
        if event.is_kernel:
            part.moved += often * event.moved
            part.kernels += often
            part.seconds += often * event_seconds(event, hardware)

    clocks = _clocks(events, hardware, gpus_per_node)
    host = hardware.rates.call * sum(times[number] * calls for number, calls in rehearsed.step.calls.items())
    found = Ledger(
        sorted(parts.values(), key=lambda part: -part.seconds),
        sum(times[event.micro] * event.needed / _rows_over_mean(event, rehearsed) for event in events),
        StepTime.of([(times[number], clock) for (number, _), clock in clocks.items()], host),
    )
    pipeline = pipeline_of(rehearsed.model)
    if pipeline is None:
        return found
    stages = _stage_seconds(clocks, events, hardware, gpus_per_node)
    return found.within(PipelinePart.of(pipeline, micro, stages))


def _rows_over_mean(event: Event, rehearsed: Rehearsed) -> float:
    """By how much an event is larger than on the mean rank: what a model needs does not depend on who computes it."""
    return rehearsed.rows_over_mean if event.place.part == "expert GEMMs" else 1.0


def times_of(rehearsed: Rehearsed, micro: int) -> dict[int | None, int]:
    """For how many of a step's `micro` micro-batches each one stands that was run, by its number; None: what is in none
    of them. The one in the middle stands for those that were not run: in a pipeline's first and last ones no other
    micro-batch is on its way."""
    seen = 1 + max(event.micro for event in rehearsed.step.events if event.micro is not None)
    return {None: 1} | dict.fromkeys(range(seen), 1) | {seen // 2: micro - seen + 1}


def _clocks(
    events: Sequence[Event], hardware: Hardware, gpus_per_node: int
) -> dict[tuple[int | None, Action | None], Clock]:
    """The clock at the end of each micro-batch or, in a pipeline, of each action of its schedule."""
    parts: dict[tuple[int | None, Action | None], list[Event]] = {(None, None): []}
    for event in events:
        parts.setdefault((event.micro, event.action), []).append(event)
    return {part: clock_after(found, hardware, gpus_per_node) for part, found in parts.items()}


def _stage_seconds(
    clocks: Mapping[tuple[int | None, Action | None], Clock],
    events: Sequence[Event],
    hardware: Hardware,
    gpus_per_node: int,
) -> dict[int, StageSeconds]:
    """Of the micro-batch in the middle."""
    middle = (1 + max(number for number, _ in clocks if number is not None)) // 2
    seconds = {
        (action.stage, action.kind): clock.now for (n, action), clock in clocks.items() if action and n == middle
    }
    sends: defaultdict[int, float] = defaultdict(float)
    for event in events:
        if event.collective == "send" and event.action is not None and event.action.micro_batch == middle:
            took = seconds_among("send", event.sent, event.ranks, hardware, gpus_per_node)
            sends[event.action.stage] = max(sends[event.action.stage], took)
    return {
        stage: StageSeconds(
            seconds[stage, "forward"], seconds[stage, "backward"], seconds.get((stage, "weights"), 0.0), sends[stage]
        )
        for stage in sorted({stage for stage, _ in seconds})
    }


def event_seconds(event: Event, hardware: Hardware) -> float:
    """Seconds of a kernel."""
    return kernel_seconds(event.flops, event.moved, event.work, hardware)


def clock_after(events: Sequence[Event], hardware: Hardware, gpus_per_node: int) -> Clock:
    """The clock after these events. A layer's kernels wait until its parameters are gathered, until the host has called
    them, and where rows are needed that are still being sent; the end for all."""
    clock = Clock(hardware.rates)
    gathered: list[Transfer] = []
    for event in events:
        clock.call(event.calls * hardware.rates.call)
        clock.launch()
        if event.waits:
            clock.arrive(event.ranks)
        elif event.is_read:
            clock.read()
        elif event.collective is None:
            if "split_with_sizes_copy" in event.name and gathered:
                clock.until(gathered.pop(0))
            seconds = event_seconds(event, hardware)
            is_update = event.phase == "optimizer step"
            clock.kernel(seconds, seconds * (event.flops > 0 and not is_update), seconds * is_update)
        elif event.collective not in SENDS:  # how long a stage waits for another is known by the schedule alone
            seconds = seconds_among(event.collective, event.sent, event.ranks, hardware, gpus_per_node)
            # weight gradients that were left for later are reduced with nothing beside
            is_late = event.action is not None and event.action.kind == "weights"
            if event.travels or (event.is_sharding and not is_late):
                transfer = clock.send(event.ranks, seconds) if event.travels else clock.shard(seconds)
                if event.collective == "all-gather":
                    gathered.append(transfer)
            else:
                (clock.gather if event.gathers_activations else clock.wait)(seconds)
    clock.end()
    return clock
