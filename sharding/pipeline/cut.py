"""Cuts a sharded model into the stages of a pipeline: on every stage the family's own forward runs, complete.

It runs on the same tokens, positions and masks everywhere, so that none of it is rewritten, and nothing has to travel
but what a layer gives. Of the layers,

- those before a stage answer with what was received, if they are the last before it, or else with NaN, which would show
  in the loss if anything used it;
- the last one of a stage ends the forward, by an exception that the model's forward catches.

Modules before the layers whose parameters are elsewhere answer with NaN too. Layers of other stages are on the meta
device, never called, there to be asked for attributes, names and shapes.

Shape suffixes: B sequences, S positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from ...moe.experts.forward import current_forward
from ...moe.experts.model_layers import decoder_layers
from ...moe.util.change_order import begin_change
from ..dataflow import Given, Leaf, Size
from ..stages import Stages


@dataclass(eq=False)
class StageForward:
    """One stage's part of a micro-batch's forward: `Forward.stage` while it runs.

    Attributes:
        stages: of the model.
        number: of the stage.
        size: of the micro-batch.
        device: of the stage.
        received: what the layer before the stage gave; none on the first stage.
        micro_batch: which one of its step.
        gave: what the stage's last layer gave, once it has; None on the last stage.
        has_values: whether what is computed has values: from the stage's first layer on.
    """

    stages: Stages
    number: int
    size: Size
    device: torch.device
    received: Sequence[Tensor] = ()
    micro_batch: int = 0
    gave: list[Tensor] | None = field(default=None, init=False)
    has_values: bool = field(default=False, init=False)
    _blank: dict[Leaf, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.has_values = self.number == 0

    @property
    def layers(self) -> range:
        return self.stages.layers[self.number]

    @property
    def is_last(self) -> bool:
        return self.number == self.stages.number - 1

    def before(self, layer: int) -> Any:
        """What a layer before the stage is said to have given."""
        given = self.stages.survey.given[layer]
        if layer == self.layers.start - 1:
            self._blank.clear()
            return given.tree(self.received)
        return self.blank(given)

    def blank(self, given: Given) -> Any:
        """What is used by nothing; of many layers the same tensor."""
        return given.blank(self.size, self.device, self._blank)

    def end(self, output: Any) -> None:
        """Take what the last layer has given, and end the forward.

        Raises:
            StageEnds: always.
        """
        gave = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        expected = self.stages.survey.given[self.layers.stop - 1].tensors
        self.gave = [leaf.filled(x, self.size) for leaf, x in zip(expected, gave, strict=True)]
        found = [(tuple(leaf.shape), leaf.dtype) for leaf in self.gave]
        awaited = [(leaf.shape(self.size), leaf.dtype) for leaf in expected]
        assert found == awaited, f"layer {self.layers.stop - 1} gave {found}, and the next stage awaits {awaited}"
        raise StageEnds

    def release(self) -> None:
        """Let go of tensors, once the forward is over: what recomputes a layer keeps this, and the graph of what was
        given keeps that."""
        self.received, self.gave = (), None


class StageEnds(Exception):
    """The last layer of a stage has run."""


def cut(model: Any, stages: Stages) -> None:
    """Have a model's calls within a `Forward` that has a stage run that stage alone, in place.

    Such a call gives the tensors that the stage's last layer gave or, on the last stage, what the model gives.

    Args:
        model: sharded, so that what ends a forward lies outside of FSDP's hooks on the layers.
        stages: this rank's.
    """
    begin_change(model, "stages")
    layers = decoder_layers(model)
    for number, layer in enumerate(layers):
        _change_class(layer, _Layer)
        layer.__dict__["_number"] = number
    around: list[nn.Module] = [module for module in model.modules() if any(part is layers for part in module.modules())]
    here = {parameter for name, parameter in model.named_parameters() if stages.is_here(name)}
    for path in stages.survey.given_outside:
        module = model.get_submodule(path)
        if module not in around and here.isdisjoint(module._parameters.values()):
            _change_class(module, _Elsewhere)
            module.__dict__["_path"] = path
    for module in around:
        is_unit = isinstance(module, FSDPModule)
        if module is model or is_unit:
            module.forward = _ending(module.forward)
        if module is not model and is_unit:
            # FSDP's own hook on the module has run before
            module.register_forward_hook(_go_on_ending)


def _change_class(module: nn.Module, mixin: type) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def _running() -> StageForward | None:
    forward = current_forward()
    return None if forward is None else forward.stage


class _Layer:
    """A decoder layer of a model that is cut. Its calls are changed, not its forward: that is what activation
    checkpointing repeats, within which no exception may end it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running, number = _running(), self.__dict__["_number"]
        if running is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if number < running.layers.start:
            return running.before(number)
        running.has_values = True
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if number == running.layers.stop - 1 and not running.is_last:
            running.end(output)
        return output


class _Elsewhere:
    """A module before the layers whose parameters this rank does not hold."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = _running()
        assert running is not None, "a part of a model that other ranks hold was called"
        return running.blank(running.stages.survey.given_outside[self.__dict__["_path"]])


def _ending(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that a stage's end ends, with what the stage gave."""

    @wraps(forward)
    def until_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except StageEnds:
            running = _running()
            assert running is not None
            return running.gave

    return until_end


def _go_on_ending(module: nn.Module, args: Any, output: Any) -> None:
    running = _running()
    if running is not None and running.gave is not None:
        raise StageEnds
