"""All that a dry run tells of one rank, in figures."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ....sharding.stages import layers_here
from ...config.train_config import TrainConfig
from ..memory import Communicator, Fit
from ..planner.cost import seconds_among
from ..planner.hardware import Hardware
from .cost_breakdown import Ledger, ledger, times_of
from .peaks import PeakMemory
from .recorder import Event
from .stages import StageSeconds
from .world import Rehearsed


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
