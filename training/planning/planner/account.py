"""The cost breakdown of one rank's step: what a dry run has shown, in figures, and what these say of all layers where a
few were run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, get_args

from ..memory import CONTEXT, FRAGMENTATION, Communicator, Fit, Memory, MemoryTerm
from .clock import StepTime
from .costs import Sums

KINDS: tuple[MemoryTerm, ...] = get_args(MemoryTerm)


@dataclass(frozen=True)
class Moment:
    """A moment of a step.

    phase, micro, part: see `Event`. action: kind and stage of the pipeline's, if there is one. layer: that the step has
    come to. name: of the operator.
    """

    phase: str
    micro: int | None
    action: tuple[str, int] | None
    layer: int | None
    part: str
    name: str

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        return f"{self.phase}{layer}, {self.part}"


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank's tensors, in any step after the first.

    peak: the most bytes. when: where the step was then. kinds: the peak by kind. parameters: of these, all that the
    model holds; trained: those of them that are trained. state: the optimizer's.
    """

    peak: int
    when: str
    kinds: Memory
    parameters: int
    trained: int
    state: int


@dataclass(frozen=True)
class PartCost(Sums):
    """Cost of one part of a step.

    flops: computed; recomputed: of these, by activation checkpointing. moved: bytes read and written on the device.
    kernels: launched. seconds: at the card's rates, without collectives.
    """

    flops: float = 0.0
    recomputed: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    sent: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class SentBytes:
    """Collectives of one kind in one group, of a whole step. group: its purpose. ranks: in it. times: calls. total:
    bytes to other ranks, of all calls. between: those of them that leave the node."""

    group: str
    ranks: int
    kind: str
    times: int
    total: float
    between: float


@dataclass(frozen=True)
class LayerCosts(Sums):
    """What a decoder layer takes of a micro-batch, which is not the first of its step.

    forward, backward: seconds, with what its kernels wait for. weights: of `backward`, what a schedule may leave for
    later. kept: bytes from forward to backward. queued: bytes that its experts' products read and write, of which
    weight gradients are computed.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    kept: float = 0.0
    queued: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def held(self, in_flight: int, waiting: int) -> float:
        """Bytes of so many micro-batches on the way, and of so many that wait for their weight gradients."""
        return in_flight * self.kept + waiting * self.queued


@dataclass(frozen=True)
class Figures:
    """What a dry run shows of a rank's step. Each figure is a straight line in the repeats of a run of layers (see
    `rehearsal.short`).

    Attributes:
        layers: that the rank has. parameter_bytes, trained_bytes, state: of the rank;
            in_host: of what it holds, bytes in host memory.
        held: at each moment, bytes by kind, in the order of `KINDS`.
        sent: calls, bytes, and bytes that leave the node; by the group's purpose, its ranks and the kind of collective.
        parts: by name.
        time: of the step; actions: of a pipeline, seconds by name (see `action_name`), of a mean micro-batch.
        needed: FLOPs of the mean rank without recomputation.
        host_waits: how often the host waits for the device, in the micro-batches that were run. update_operators: that
            it calls outside of forwards and backwards.
    """

    layers: int
    parameter_bytes: int
    trained_bytes: int
    state: int
    in_host: int
    held: Mapping[Moment, tuple[int, ...]]
    sent: Mapping[tuple[str, int, str], tuple[int, float, float]]
    parts: Mapping[str, PartCost]
    time: StepTime
    actions: Mapping[str, float]
    needed: float
    host_waits: int
    update_operators: int

    @property
    def peak(self) -> PeakMemory:
        when, kinds = max(self.held.items(), key=lambda item: sum(item[1]))
        memory = Memory(**dict(zip(KINDS, kinds, strict=True)))
        return PeakMemory(sum(kinds), str(when), memory, self.parameter_bytes, self.trained_bytes, self.state)


def action_name(kind: str, stage: int) -> str:
    """Of what a rank of a pipeline computes without a pause."""
    return f"{kind} of stage {stage}"


def on_line(base: Any, more: Sequence[tuple[Any, int]]) -> Any:
    """The figures of the complete model, or a part of them.

    Args:
        base: those of the shortest one. more: those of models that each have a repeat more of another run, with how
            many more the complete one has. Moments that one of them lacks are left out.
    """
    if isinstance(base, str):
        return base
    if isinstance(base, int | float):
        return base + sum((other - base) * times for other, times in more)
    if isinstance(base, Mapping):
        keys = [key for key in base if all(key in other for other, _ in more)]
        return {key: on_line(base[key], [(other[key], times) for other, times in more]) for key in keys}
    if isinstance(base, tuple):
        return tuple(on_line(each, [(other[n], times) for other, times in more]) for n, each in enumerate(base))
    assert is_dataclass(base), base
    assert not isinstance(base, type), base
    return type(base)(
        *(
            on_line(getattr(base, field.name), [(getattr(other, field.name), times) for other, times in more])
            for field in fields(base)
        )
    )


@dataclass(frozen=True)
class PhasePeak:
    """The most that tensors hold in a phase, and where that is."""

    phase: str
    peak: int
    where: str


@dataclass(frozen=True)
class Account:
    """Cost breakdown of one rank's step, memory in bytes.

    Attributes:
        forwards: micro-batches of a step.
        layers: how many this rank has, of how many. run: how many of them were run. stages: of a pipeline, in words.
        at: the most bytes by phase, micro-batch and layer, of layers near an end of those that are alike. moments: the
            most by phase. sent: the most bytes first.
        parts: the one that takes longest first.
        actions, needed, host_waits, update_operators: see `Figures`.
        layer_costs: of each kind of layer, by its number; "before", "after" and "root" of what is around
            them (see `rehearsal.seconds`). None of a pipeline.
    """

    rank: int
    forwards: int
    layers: tuple[int, int]
    run: int
    stages: str
    parameters: int
    memory: PeakMemory
    in_host: float
    communicators: Sequence[Communicator]
    at: Sequence[tuple[str, int | None, int | None, int]]
    moments: Sequence[PhasePeak]
    sent: Sequence[SentBytes]
    parts: Mapping[str, PartCost]
    time: StepTime
    actions: Mapping[str, float]
    needed: float
    host_waits: int
    update_operators: int
    layer_costs: Mapping[str, LayerCosts]

    def fit(self, card: float) -> Fit:
        """Whether it fits a card of so many bytes."""
        kinds = self.memory.kinds
        fragmentation = FRAGMENTATION * (kinds.total - kinds.lasting)
        return Fit(kinds.total - self.in_host, self.in_host, self.communicators, fragmentation, CONTEXT, card)

    def on_card(self, card: float) -> Memory:
        """The peak without what is in host memory, of which frozen parameters come first, and with what lies beside
        tensors."""
        fit, kinds, left, on_gpu = self.fit(card), self.memory.kinds, self.in_host, {}
        for term in ("frozen", "parameters", "gradients", "optimizer"):
            taken = min(left, getattr(kinds, term))
            on_gpu[term], left = getattr(kinds, term) - taken, left - taken
        return replace(kinds, **on_gpu, slack=fit.total - fit.tensors)

    @property
    def total(self) -> PartCost:
        """Sums over all parts."""
        return sum(self.parts.values(), PartCost())

    def as_json(self, card: float) -> dict[str, Any]:
        """Bytes, seconds and FLOPs."""
        fit, values = self.fit(card), asdict(self)
        parts = [{"name": name, **cost} for name, cost in values.pop("parts").items()]
        time = values["time"] | {"total": self.time.total}
        return values | {
            "time": time,
            "parts": parts,
            "fit": asdict(fit),
            "fits": fit.is_enough,
            "needed_bytes": fit.total,
        }


def at_layers(held: Mapping[Moment, tuple[int, ...]]) -> list[tuple[str, int | None, int | None, int]]:
    """The most bytes by phase, micro-batch and layer."""
    found: defaultdict[tuple[str, int | None, int | None], int] = defaultdict(int)
    for moment, kinds in held.items():
        key = moment.phase, moment.micro, moment.layer
        found[key] = max(found[key], sum(kinds))
    return [(*key, most) for key, most in found.items()]


def peaks_of_phases(held: Mapping[Moment, tuple[int, ...]], in_host: int) -> list[PhasePeak]:
    """Peaks by phase, of whichever micro-batch, without what is in host memory all the time."""
    found: list[PhasePeak] = []
    for phase in ("forward", "recomputation", "backward", "optimizer step"):
        in_layers: defaultdict[int | None, int] = defaultdict(int)
        for moment, kinds in held.items():
            if moment.phase == phase:
                in_layers[moment.layer] = max(in_layers[moment.layer], sum(kinds))
        for is_layer in (True, False):
            sizes = {layer: size for layer, size in in_layers.items() if (layer is not None) == is_layer}
            if sizes:
                layer, size = max(sizes.items(), key=lambda item: item[1])
                outside = "clipping, update" if phase == "optimizer step" else "outside of the layers"
                found.append(PhasePeak(phase, size - in_host, f"layer {layer}" if is_layer else outside))
    return found
