"""What a plan knows of a model before any of its layers is run: which of them are alike, and how large they are."""

from dataclasses import dataclass
from functools import cached_property

from ....moe.hf_model.counts import ParameterCounts
from ....sharding.topology import Topology
from .costs import Sums


@dataclass(frozen=True)
class Held(Sums):
    """Bytes of some parameters, complete.

    stored: as they are held. computed: in the compute dtype. gradient: of those that are trained. state: of the
    optimizer's.
    """

    stored: int = 0
    computed: int = 0
    gradient: int = 0
    state: float = 0.0

    @property
    def lasting(self) -> float:
        """What is there from step to step."""
        return self.stored + self.gradient + self.state


def lasting_on_rank(dense: Held, experts: Held, topology: Topology) -> float:
    """Bytes of what lasts of a stage's parameters on each of its ranks."""
    return dense.lasting / len(topology.group("dense", 0)) + experts.lasting / topology.ranks_per_stage


@dataclass(frozen=True)
class LayerFacts:
    """A kind of decoder layer. dense, experts: its parameters."""

    dense: Held
    experts: Held


@dataclass(frozen=True)
class ModelFacts:
    """What a model consists of.

    Attributes:
        kinds: its kinds of decoder layers. layers: the kind of each layer.
        first, last: what stands before the decoder layers, and after them; what is both is in both.
        is_tied: whether the embedding is the head.
        width: of the model.
        num_experts, top_k: of its MoE layers.
        counts: of parameters.
        kernel: that computes the experts, as it is recorded.
        looped: functions that loop over tokens, and whose kernels compute them (see
            `rehearsal.recurrent_stand_in.computed_by`). by_liger: whether liger-kernel computes norms.
    """

    kinds: tuple[LayerFacts, ...]
    layers: tuple[int, ...]
    first: Held
    last: Held
    is_tied: bool
    width: int
    num_experts: int
    top_k: int
    counts: ParameterCounts
    kernel: str
    looped: tuple[tuple[str, str], ...]
    by_liger: bool

    @cached_property
    def dense(self) -> Held:
        """All that is not in experts."""
        of_layers = sum((self.kinds[kind].dense for kind in self.layers), Held())
        return of_layers + self.first + (Held() if self.is_tied else self.last)

    @property
    def layers_with_experts(self) -> int:
        return sum(1 for kind in self.layers if self.kinds[kind].experts.stored)

    @cached_property
    def experts(self) -> Held:
        return sum((self.kinds[kind].experts for kind in self.layers), Held())


@dataclass(frozen=True)
class Cuts:
    """Where a model can be cut into the stages of a pipeline (see `sharding.pipeline.survey`).

    Attributes:
        name: of its class.
        flops: of a token's forward in each decoder layer, then after the last.
        skips: (from, to) where layer `to` uses what layer `from` gave, other than the one before it.
    """

    name: str
    flops: tuple[float, ...]
    skips: tuple[tuple[int, int], ...]

    @property
    def num_layers(self) -> int:
        return len(self.flops) - 1
