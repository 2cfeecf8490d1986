"""Cost breakdown of a recorded step by part: FLOPs, bytes moved, and time at a card's rates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ....sharding.pipeline.pipeline import pipeline_of
from ....sharding.pipeline.schedule import Action
from ..planner.clock import Clock, StepTime, Transfer
from ..planner.cost import kernel_seconds, seconds_among
from ..planner.hardware import Hardware
from .recorder import SENDS, Event
from .stages import PipelinePart, StageSeconds
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
