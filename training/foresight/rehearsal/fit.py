"""Whether a rank fits its card: what its tensors hold at most, and what else takes memory there, each by a stated
assumption. Bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertmesh.training.foresight.planner.peak_memory import CONTEXT, FRAGMENTATION, PEER, RING
from expertmesh.training.foresight.rehearsal.peaks import MemoryKind, PeakMemory
from expertmesh.training.foresight.rehearsal.recorder import SENDS, Event

LASTING: frozenset[MemoryKind] = frozenset({"parameters", "frozen parameters", "gradients", "optimizer state"})
"""Kinds that are there from step to step, or for the whole of one; with --offload, in host memory."""


@dataclass(frozen=True)
class Communicator:
    """A process group in which a rank has collectives on the card. name: what it is for. size: of its buffers."""

    name: str
    ranks: int
    size: float


@dataclass(frozen=True)
class Fit:
    """tensors: what they hold at most, in `memory`'s peak. host: of what --offload keeps in host memory. communicators:
    NCCL's. fragmentation, context: beside these. card: what there is."""

    tensors: float
    host: float
    communicators: Sequence[Communicator]
    fragmentation: float
    context: float
    card: float

    @property
    def nccl(self) -> float:
        return sum(communicator.size for communicator in self.communicators)

    @property
    def total(self) -> float:
        return self.tensors + self.nccl + self.fragmentation + self.context

    @property
    def is_enough(self) -> bool:
        return self.total <= self.card


def fit(memory: PeakMemory, events: Sequence[Event], groups: Mapping[str, str], card: float, offload: bool) -> Fit:
    """Whether a rank whose step has these `events` fits its card. groups: the purpose of each process group, by its
    name."""
    lasting = sum(size for kind, size in memory.kinds.items() if kind in LASTING)
    tensors = memory.peak - lasting if offload else memory.peak
    return Fit(
        tensors,
        lasting if offload else 0.0,
        communicators(events, groups),
        FRAGMENTATION * (memory.peak - lasting),
        CONTEXT,
        card,
    )


def communicators(events: Sequence[Event], groups: Mapping[str, str]) -> list[Communicator]:
    """A rank's communicators with more than one rank."""
    kinds: dict[tuple[str, int], set[str]] = {}
    neighbours: dict[str, set[int]] = {}
    for event in events:
        if event.collective in SENDS:
            neighbours.setdefault(event.group, set()).update(event.ranks)
        elif event.collective is not None and len(event.ranks) > 1:
            kinds.setdefault((event.group, len(event.ranks)), set()).add(event.collective)
    found = [
        Communicator(
            groups[name],
            ranks,
            (PEER * (ranks - 1) if "all-to-all" in found else 0) + (RING if found - {"all-to-all"} else 0),
        )
        for (name, ranks), found in kinds.items()
    ]
    # whose first collective is an all-reduce (see `make_pipeline_groups`)
    return found + [
        Communicator(groups[name], len(ranks), RING + PEER * (len(ranks) - 1)) for name, ranks in neighbours.items()
    ]
