"""What a rank's memory consists of, in bytes: terms of its tensors, and what lies beside them on a GPU, each by stated
assumptions. Forecasts and dry runs have both in common."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import Literal

CONTEXT = 0.5 * 2**30
"""Assumed: CUDA's context with the kernels of torch and cuBLAS's workspace, on an H100."""

RING = 128 * 2**20
"""Assumed: NCCL's buffers of a communicator that gathers, scatters or sums: 16 channels, of 4 MiB to either side."""

PEER = 4 * 2**20
"""Assumed: NCCL's buffers for every other rank of a communicator that exchanges rows: 2 channels, of 1 MiB each way."""

FRAGMENTATION = 0.1
"""Assumed: what torch's allocator cannot use again, as a share of what comes and goes within a step."""

NEAR = 0.9
"""From this share of the memory on, a forecast that fits is close, and comes with a warning. Plans cut pipelines so
that it does not come to that."""

MemoryTerm = Literal["parameters", "frozen", "gradients", "optimizer", "activations", "gathered", "working"]
"""Fields of `Memory` that are of tensors."""
LASTING: tuple[MemoryTerm, ...] = ("parameters", "frozen", "gradients", "optimizer")
"""What is there whatever the batch, from step to step: with --offload in host memory."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at one moment.

    Attributes:
        parameters, gradients, optimizer: of this rank's shards. In a forecast all parameters, and buffers; in a dry run
            those that are trained.
        frozen: parameters that are not, in a dry run.
        activations: what autograd keeps from forward to backward.
        gathered: parameters gathered for a layer, gradients not yet reduced, all-gather and reduce-scatter buffers; and
            weights in the compute dtype of experts that are not gathered, where they are kept until backward.
        working: what is there only while something is computed: a layer, the loss, the update.
        slack: what the allocator, the driver and NCCL take on top (see `Fit`).
    """

    parameters: float = 0
    frozen: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    gathered: float = 0
    working: float = 0
    slack: float = 0

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    @property
    def lasting(self) -> float:
        terms = self.terms()
        return sum(terms[term] for term in LASTING)

    def terms(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Communicator:
    """A process group in which a rank has collectives on the GPU. name: what it is for. size: of NCCL's buffers."""

    name: str
    ranks: int
    size: float

    @staticmethod
    def of(name: str, ranks: int, kinds: Set[str]) -> "Communicator":
        """kinds: of its collectives. A rank's neighbours in a pipeline, which send and receive, also sum once (see
        `make_pipeline_groups`)."""
        peers = ranks - 1 if kinds & {"all-to-all", "send", "receive"} else 0
        return Communicator(name, ranks, PEER * peers + (RING if kinds - {"all-to-all"} else 0))


@dataclass(frozen=True)
class Fit:
    """Whether a rank fits its GPU.

    tensors: what they hold at most. host: of what is kept in host memory. communicators: NCCL's. fragmentation,
    context: beside these. card: what there is.
    """

    tensors: float
    host: float
    communicators: Sequence[Communicator]
    fragmentation: float
    context: float
    card: float

    @property
    def total(self) -> float:
        return self.tensors + sum(each.size for each in self.communicators) + self.fragmentation + self.context

    @property
    def is_enough(self) -> bool:
        return self.total <= self.card
