"""What was measured of a model: plain figures, of which the planner composes steps. `training.rehearsal.measure` makes
them; nothing here, and nothing of the planner, knows an architecture."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from moe import ParameterCounts
from sharding.choices import Checkpointing

Mark = Literal["start", "use experts", "leave experts", "reduce experts"]
"""What comes before a span: nothing, or where FSDP's hooks on the layer's experts are called."""


@dataclass(frozen=True)
class Parameter:
    """A parameter as ranks share it out, whole.

    Attributes:
        rows, row: of how many rows, and numbers of each; ranks hold rows.
        stored, computed: bytes of a number as it is held, and as it is computed with.
        state: bytes of optimizer state a number.
        is_trained: whether it has a gradient.
        is_matrix: whether the optimizer works on it matrix by matrix (Muon); `matrix`: numbers of the largest one.
    """

    rows: int
    row: int
    stored: int
    computed: int
    state: float
    is_trained: bool
    matrix: int = 0


@dataclass(frozen=True)
class LayerParameters:
    """Of one kind of decoder layer: those of its experts, of all ranks, and the others."""

    dense: tuple[Parameter, ...]
    experts: tuple[Parameter, ...]


@dataclass(frozen=True)
class ModelParameters:
    """What a model consists of.

    Attributes:
        kinds: its kinds of decoder layers.
        layers: the kind of each layer, an index of `kinds`.
        root: what is in no decoder layer: embedding, last norm, head; and what a family keeps in fp32.
        buffers: bytes of them, on every rank.
        num_experts, top_k: of its MoE layers.
        counts: of parameters.
    """

    kinds: tuple[LayerParameters, ...]
    layers: tuple[int, ...]
    root: tuple[Parameter, ...]
    buffers: int
    num_experts: int
    top_k: int
    counts: ParameterCounts

    def all(self) -> Iterable[Parameter]:
        """Every parameter of every layer."""
        for kind in self.layers:
            yield from self.kinds[kind].dense
            yield from self.kinds[kind].experts
        yield from self.root


@dataclass(frozen=True)
class Workload:
    """What one rank computes in a forward and backward: all that a layer's figures depend on.

    Attributes:
        micro_batch, seq_length: rows, and tokens of each.
        targets: tokens with a loss.
        rows_received: by the experts of this rank, of whichever rank's tokens.
        experts_gathered: whether FSDP brings the experts' weights, in the dtype that is computed in.
        has_gradients: whether the experts' gradients, where FSDP does not bring them, are there from an earlier one.
        overlap_chunks: parts in which rows travel.
        cp_size: ranks that share each row: this one has a run of `seq_length` / `cp_size` tokens.
        offload_activations: whether layers' inputs go to host memory.
        keeps_casts: whether those experts keep their weights in the dtype that is computed in.
        device: "cuda" for a GPU's ways of computing, "cpu" for a CPU's.
    """

    micro_batch: int
    seq_length: int
    targets: int
    bf16: bool
    checkpointing: Checkpointing
    ep_size: int
    rows_received: int
    overlap_chunks: int
    cp_size: int
    offload_activations: bool
    experts_gathered: bool
    has_gradients: bool
    keeps_casts: bool
    device: Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Stretch:
    """Kernels, and what comes after them.

    Attributes:
        kernels: (FLOPs, bytes read and written, whether it multiplies in fp8, how many alike).
        then: an all-to-all that others run beside ("send"), the wait for the oldest of these ("arrive"), or one that is
            waited for at once ("exchange").
        sent: bytes to others.
        group: of the ranks among which.
    """

    kernels: tuple[tuple[float, int, bool, int], ...]
    then: Literal["", "send", "arrive", "exchange"] = ""
    sent: float = 0.0
    group: Literal["ep", "cp"] = "ep"


@dataclass(frozen=True)
class Span:
    """What is computed between two acts of FSDP.

    Attributes:
        mark: what FSDP does before.
        peak, end: bytes of tensors at the most, and at the end, beside parameters.
        when: what `peak` is the moment of.
        stretches: what is computed, and sent over the ep ranks, in order.
        calls: of operators by the host.
        needed: FLOPs that recomputation is not the reason for.
    """

    mark: Mark
    peak: int
    end: int
    when: str
    stretches: tuple[Stretch, ...]
    calls: int
    needed: float

    @property
    def kernels(self) -> Iterator[tuple[float, int, bool, int]]:
        """Of all stretches."""
        return (kernel for stretch in self.stretches for kernel in stretch.kernels)


@dataclass(frozen=True)
class Measured:
    """Forward and backward of a decoder layer, or of what is around all layers.

    Attributes:
        forward, backward: spans, in order; their bytes count from what is held before them. Those around all layers
            have two each, before and after the layers.
        kept: bytes from forward to backward, without what goes on to the next layer. Around all layers: while the
            layers' forwards run.
        kept_backward: around all layers, while the layers' backwards run.
        carried: of a layer, bytes of what comes from the one before.
    """

    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    kept: int
    kept_backward: int = 0
    carried: int = 0


@dataclass(frozen=True)
class MeasuredModel:
    """kinds: of decoder layers, as in `ModelParameters`. root: what is around them."""

    kinds: tuple[Measured, ...]
    root: Measured


class Measure(Protocol):
    """Gives the figures of one model under a workload; it may have them at hand."""

    parameters: ModelParameters

    def __call__(self, workload: Workload) -> MeasuredModel:
        """
        Raises:
            ExpertMeshError: the model cannot compute this.
        """
        ...
