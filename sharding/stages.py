"""Which layers stand on which stage of a pipeline, and which pp index holds which parameter.

A pp index p of P holds the stages p, p + P, p + 2P, ...: as many as there are chunks. Layers follow one another over
the stages; what comes before the first layer is the first stage's, what comes after the last one the last stage's.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..moe.experts.layer import DMoE
from ..moe.experts.model_layers import decoder_layers, moe_layers
from .dataflow import Survey


@dataclass(frozen=True)
class Stages:
    """How a model is cut into stages, as one rank sees it.

    Attributes:
        survey: of the model.
        layers: of each stage, the numbers of its decoder layers.
        pp_size: pp indices.
        index: this rank's; None where the model is on no rank yet, and all of it is here.
    """

    survey: Survey
    layers: tuple[range, ...]
    pp_size: int
    index: int | None = None

    @property
    def number(self) -> int:
        """Of stages."""
        return len(self.layers)

    @property
    def here(self) -> list[int]:
        """This rank's stages, first to last."""
        return [stage for stage in range(self.number) if self.index in (None, stage % self.pp_size)]

    def stage_of(self, place: int) -> int:
        """The stage of a layer; the last one for what comes after the last layer."""
        return next((stage for stage, layers in enumerate(self.layers) if place in layers), self.number - 1)

    def places(self, name: str) -> frozenset[int]:
        """Where a parameter is used, as a `Survey` has it."""
        uses = self.survey.uses.get(name, frozenset())
        prefix = f"{self.survey.layers}."
        if name.startswith(prefix):
            return uses | {int(name.removeprefix(prefix).partition(".")[0])}
        if self.survey.repeats_beginning and 0 in uses:
            return frozenset(range(self.survey.num_layers + 1))
        return uses or frozenset({0})

    def pp_ranks(self, name: str) -> tuple[int, ...]:
        """The pp indices that hold a parameter, by its name in the model: those where it is used, each a copy."""
        return tuple(sorted({self.stage_of(place) % self.pp_size for place in self.places(name)}))

    def first_stage(self, name: str) -> int:
        """The first stage that uses a parameter."""
        return self.stage_of(min(self.places(name)))

    def is_here(self, name: str) -> bool:
        """Whether this rank has a part in holding a parameter."""
        return self.index is None or self.index in self.pp_ranks(name)

    def layers_here(self) -> list[int]:
        """The numbers of this rank's decoder layers."""
        return [layer for stage in self.here for layer in self.layers[stage]]


def stages_of(model: Any) -> Stages | None:
    """How a model is cut, as its `stages` say; None where it is not."""
    stages: Stages | None = getattr(model, "stages", None)
    return stages


def layers_here(model: Any) -> list[nn.Module]:
    """The decoder layers that this rank has parts of, first to last."""
    layers, stages = decoder_layers(model), stages_of(model)
    return list(layers) if stages is None else [layers[number] for number in stages.layers_here()]


def layers_by_stage(model: Any) -> list[list[nn.Module]]:
    """The same, of each of this rank's stages."""
    layers, stages = decoder_layers(model), stages_of(model)
    if stages is None:
        return [list(layers)]
    return [[layers[number] for number in stages.layers[stage]] for stage in stages.here]


def experts_here(model: Any) -> list[DMoE]:
    """The experts of these layers."""
    return [experts for layer in layers_here(model) for experts in moe_layers(layer)]
