"""What was measured of a model: plain figures, of which the planner composes steps.
`training.planning.rehearsal.measure` makes them; nothing here, and nothing of the planner, knows an architecture."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from ....moe.dispatch.dispatcher_entries import PLAIN_ENTRY
from ....moe.hf_model.counts import ParameterCounts
from ....sharding.parallelize.choices import Checkpointing
from ....sharding.pipeline.balance import crossing
from ....sharding.topology import Axis, Topology
from ...model_setup.rates import Work

Mark = Literal["start", "use experts", "leave experts", "reduce experts", "use region", "leave region", "reduce region"]
"""What comes before a span: nothing, or where FSDP's hooks on the layer's experts are called, or on a region of tensor
parallelism (see `training.tensor_parallel`)."""


@dataclass(frozen=True)
class BlockUpdate:
    """What an optimizer of matrices computes in a step of blocks of one shape, on the rank that has the block.

    Attributes:
        shape: rows and columns.
        number: of such blocks: in each matrix of a parameter or, in a unit, over all ranks that share it.
        kernels: of one block: FLOPs, class and size, and how often in a step, on average.
        runs: of such blocks' rows, in a unit: how many a rank has (see `training.optim.matrices.Run`).
    """

    shape: tuple[int, int]
    number: int
    kernels: tuple[tuple[float, Work, float], ...]
    runs: int = 0


@dataclass(frozen=True)
class Parameter:
    """A parameter before it is sharded.

    Attributes:
        rows, row: how many dim-0 rows, and elements of each; ranks hold rows.
        stored, computed: bytes per element as stored, and in the compute dtype.
        state: bytes of optimizer state per element.
        is_trained: whether it has a gradient.
        matrix: elements of each matrix that an optimizer of matrices (Muon, Shampoo) takes; 0: it takes none.
        blocks: of each of these matrices.
    """

    rows: int
    row: int
    stored: int
    computed: int
    state: float
    is_trained: bool
    matrix: int = 0
    blocks: tuple[BlockUpdate, ...] = ()


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one kind of decoder layer: those of its experts, of all ranks; those that tensor parallelism
    divides, by regions; and the others."""

    dense: tuple[Parameter, ...]
    experts: tuple[Parameter, ...]
    regions: tuple[tuple[Parameter, ...], ...] = ()

    @property
    def all(self) -> Iterator[Parameter]:
        yield from self.dense
        yield from self.experts
        for region in self.regions:
            yield from region


@dataclass(frozen=True)
class ModelParameters:
    """What a model consists of.

    Attributes:
        kinds: its kinds of decoder layers.
        layers: the kind of each layer, an index of `kinds`.
        root: what is in no decoder layer: embedding, last norm, head; and what a family keeps in fp32. root_names: of
            these parameters. root_regions: of each, which of the regions around the layers it is divided in; -1: none.
        buffers: bytes of them, on every rank.
        num_experts, top_k: of its MoE layers.
        counts: of parameters.
        looped: functions that loop over tokens, and whose kernels compute them (see
            `rehearsal.recurrent_stand_in.computed_by`). by_liger: whether liger-kernel computes norms.
    """

    kinds: tuple[LayerParameters, ...]
    layers: tuple[int, ...]
    root: tuple[Parameter, ...]
    buffers: int
    num_experts: int
    top_k: int
    counts: ParameterCounts
    root_names: tuple[str, ...]
    root_regions: tuple[int, ...]
    looped: tuple[tuple[str, str], ...] = ()
    by_liger: bool = False

    def all(self) -> Iterable[Parameter]:
        """Every parameter of every layer."""
        for kind in self.layers:
            yield from self.kinds[kind].all
        yield from self.root


@dataclass(frozen=True)
class ModelCuts:
    """Where a model can be cut into the stages of a pipeline (see `sharding.pipeline.survey`).

    Attributes:
        name: of its class.
        flops: of a token's forward in each decoder layer, then after the last.
        skips: (from, to) where layer `to` uses what layer `from` gave, other than the one before it.
        root_places: where each of `ModelParameters.root` is used: in which layers, or after the last.
    """

    name: str
    flops: tuple[float, ...]
    skips: frozenset[tuple[int, int]]
    root_places: tuple[tuple[int, ...], ...]

    @property
    def num_layers(self) -> int:
        return len(self.flops) - 1

    def uncuttable(self, cut: int) -> tuple[int, int] | None:
        """The (from, to) that forbids to end a stage with layer `cut`; None if it can be the last one of its stage."""
        return crossing(self.skips, cut)


LayerExchange = Literal["all-to-all", "all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Workload:
    """What one rank computes for a micro-batch: all that a layer's figures depend on.

    Attributes:
        micro_batch, seq_length: sequences, and tokens of each.
        targets: tokens with a loss.
        rows_received: by the experts of this rank, of whichever rank's tokens.
        experts_gathered: whether FSDP gathers the experts' weights, in the compute dtype.
        has_gradients: whether the experts' gradients, where FSDP does not reduce them, are there from an earlier one.
        overlap_chunks: chunks of the overlapped all-to-alls.
        cp_size, tp_size: ranks of a context-parallel and of a tensor-parallel group: this one has a chunk of
            `seq_length` / (`cp_size` * `tp_size`) tokens.
        offload_activations: whether layers' inputs go to host memory.
        keeps_casts: whether those experts keep their weights in the compute dtype.
        device: "cuda" for a GPU's ways of computing, "cpu" for a CPU's.
        dispatch: how tokens travel to their experts (see `moe.dispatch.dispatcher_entries`).
        ranks_per_node: of an ep group, where that is once to each node; else 1.
        sums_in_fp32: whether sums travel so; else as tokens do.
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
    dispatch: str = PLAIN_ENTRY.name
    ranks_per_node: int = 1
    sums_in_fp32: bool = False
    tp_size: int = 1

    @property
    def length(self) -> int:
        """Tokens of each sequence on this rank."""
        return self.seq_length // (self.cp_size * self.tp_size)

    def ranks(self, axis: Axis) -> int:
        """The size of a group in which layers exchange what they compute with."""
        world_size = self.ep_size * self.cp_size * self.tp_size
        topology = Topology(world_size, self.ep_size, cp_size=self.cp_size, tp_size=self.tp_size)
        return len(topology.group(axis, 0, self.ranks_per_node))


@dataclass(frozen=True)
class MeasuredRange:
    """Kernels, and what comes after them.

    Attributes:
        kernels: (FLOPs, bytes read and written, class and size, how many alike).
        then: an all-to-all that other kernels overlap ("send"), the wait for the oldest of these ("arrive"), or a
            collective that is waited for at once ("exchange").
        exchange: which collective.
        sent: bytes to others.
        group: the axis of the ranks that take part.
        is_read: whether the host waits for what has come.
    """

    kernels: tuple[tuple[float, int, Work, int], ...]
    then: Literal["", "send", "arrive", "exchange"] = ""
    sent: float = 0.0
    group: Axis = "ep"
    is_read: bool = False
    exchange: LayerExchange = "all-to-all"


@dataclass(frozen=True)
class MeasuredSpan:
    """What is computed between two actions of FSDP.

    Attributes:
        mark: what FSDP does before; region: to which one, if to one.
        peak, end: bytes of tensors at the most, and at the end, beside parameters.
        when: what `peak` is the moment of.
        stretches: what is computed, and sent over the ep ranks, in order.
        calls: operators called by the host.
        needed: FLOPs without recomputation.
    """

    mark: Mark
    peak: int
    end: int
    when: str
    stretches: tuple[MeasuredRange, ...]
    calls: int
    needed: float
    region: int = 0

    @property
    def kernels(self) -> Iterator[tuple[float, int, Work, int]]:
        """Kernels of all stretches."""
        return (kernel for stretch in self.stretches for kernel in stretch.kernels)


@dataclass(frozen=True)
class Measured:
    """Forward and backward of a decoder layer, or of what is around all layers.

    Attributes:
        forward, backward: spans, in order; their bytes count from what is held before them.
        kept: bytes from forward to backward, without what goes on to the next layer. Around all layers: while the
            layers' forwards run.
        kept_backward: around all layers, while the layers' backwards run.
        carried: of a layer, bytes of what comes from the one before.
        in_common: of a layer, bytes that a tensor-parallel group gathers once for all layers, such as rotary positions.
        kept_casts: of a layer, the part of `kept` that is experts' weights in the compute dtype.
    """

    forward: tuple[MeasuredSpan, ...]
    backward: tuple[MeasuredSpan, ...]
    kept: int
    kept_backward: int = 0
    carried: int = 0
    in_common: int = 0
    kept_casts: int = 0


@dataclass(frozen=True)
class MeasuredModel:
    """kinds: of decoder layers, as in `ModelParameters`. root: what is around them."""

    kinds: tuple[Measured, ...]
    root: Measured

    @cached_property
    def around(self) -> "AroundLayers":
        """The spans of what is around the layers, by where they come."""
        found = []
        for spans in (self.root.forward, self.root.backward):
            starts = [number for number, span in enumerate(spans) if span.mark == "start"]
            assert len(starts) == 2, spans
            found += [spans[: starts[1]], spans[starts[1] :]]
        return AroundLayers(*found)

    @property
    def in_common(self) -> int:
        """Bytes that are gathered once for all layers."""
        return max(kind.in_common for kind in self.kinds)


@dataclass(frozen=True)
class AroundLayers:
    """before, after: spans before and after the layers' forwards. after_backward, before_backward: those of their
    backwards, of which the former come first."""

    before: tuple[MeasuredSpan, ...]
    after: tuple[MeasuredSpan, ...]
    after_backward: tuple[MeasuredSpan, ...]
    before_backward: tuple[MeasuredSpan, ...]


class Measure(Protocol):
    """Gives the figures of one model under a workload; it may have them at hand."""

    parameters: ModelParameters

    def __call__(self, workload: Workload) -> MeasuredModel:
        """
        Raises:
            ExpertMeshError: the model cannot compute this.
        """
        ...

    def cuts(self) -> ModelCuts:
        """Where the model can be cut into stages.

        Raises:
            ExpertMeshError: nowhere.
        """
        ...
