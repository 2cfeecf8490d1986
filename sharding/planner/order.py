"""What a rank does in one forward and backward, in order: what it computes, and what FSDP gathers, lets go and reduces
meanwhile, as `sharding.parallelize` has it.

The order is that of `torch/distributed/fsdp/_fully_shard` (`_fsdp_state.py`, `_fsdp_param_group.py`): a layer's forward
and backward wait for its parameters, and begin to gather those of the next one; experts that are shared out over dp are
a unit of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sharding.planner.measured import Measured, MeasuredModel, ModelParameters, Span
from sharding.planner.setting import Setting
from sharding.planner.units import Unit, unit

Doing = Literal["gather", "use", "let go", "reduce", "compute", "turn", "end"]
"""gather: begin to bring a unit's parameters together. use: wait for that. let go: free them. reduce: free them, and
sum their gradients up over ranks. compute: a span. turn: a forward of its own has ended: the model's, or that of
experts which backward computes again. end: so has backward."""


@dataclass(frozen=True)
class Name:
    """Of a unit: the root, a layer or a layer's experts."""

    kind: Literal["root", "layer", "experts"]
    layer: int = -1


ROOT = Name("root")


@dataclass(frozen=True)
class Act:
    """One of the things that a rank does.

    Attributes:
        unit: what FSDP does it to.
        in_forward: of "use", whether a forward waits, be it one that is computed again.
        span: what is computed; measured: of what it is a part; layer: of which, None around the layers.
        is_backward: whether it is a part of backward.
    """

    doing: Doing
    unit: Name = ROOT
    in_forward: bool = False
    span: Span | None = None
    measured: Measured | None = None
    layer: int | None = None
    is_backward: bool = False


@dataclass(frozen=True)
class Run:
    """A model in a setting, with what was measured of it."""

    model: ModelParameters
    measured: MeasuredModel
    setting: Setting

    @cached_property
    def units(self) -> dict[Name, Unit]:
        """All units of FSDP, and the experts of each layer, whether they are one or not."""
        s, model = self.setting, self.model
        replicas = s.world_size // s.dense_ranks
        dense = [unit(kind.dense, s.dense_ranks, replicas) for kind in model.kinds]
        experts = [unit(kind.experts, s.dp_size, 1, s.ep_size) for kind in model.kinds]
        found = {ROOT: unit(model.root, s.dense_ranks, replicas)}
        for layer, kind in enumerate(model.layers):
            found[Name("layer", layer)] = dense[kind]
            if model.kinds[kind].experts:
                found[Name("experts", layer)] = experts[kind]
        return found

    def experts(self, layer: int) -> Name | None:
        """The unit of a layer's experts, if there is one."""
        name = Name("experts", layer)
        return name if self.setting.experts_are_gathered and name in self.units else None

    def of_layer(self, layer: int) -> list[Name]:
        """The units in a layer, if there is such a layer."""
        if not 0 <= layer < len(self.model.layers):
            return []
        experts = self.experts(layer)
        return [Name("layer", layer), *([] if experts is None else [experts])]

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """Those of one forward and backward. What FSDP has done already is no act."""
        return tuple(_Order(self).acts())


class _Order:
    def __init__(self, run: Run):
        self.run = run
        self.where: dict[Name, Literal["coming", "there"]] = {}
        # on a CPU nothing is gathered ahead but what FSDP does by itself
        self.is_gpu = run.setting.device == "cuda"
        self.forward_order = [name for layer in range(len(run.model.layers)) for name in reversed(run.of_layer(layer))]

    def acts(self) -> Iterator[Act]:
        run, num_layers = self.run, len(self.run.model.layers)
        root, kinds = run.measured.root, run.measured.kinds
        keeps = not run.setting.reshard_after_forward
        yield from self._use(ROOT, True)
        if self.is_gpu:
            yield from self._gather(run.of_layer(0))
        yield Act("compute", span=root.forward[0], measured=root)
        for layer in range(num_layers):
            own, experts = Name("layer", layer), run.experts(layer)
            yield from self._use(own, True)
            if self.is_gpu:
                yield from self._gather(run.of_layer(layer + 1))
            measured = kinds[run.model.layers[layer]]
            for span in measured.forward:
                if experts is not None and span.mark == "use experts":
                    yield from self._use(experts, True)
                elif experts is not None and span.mark == "leave experts" and not keeps:
                    yield from self._let_go(experts)
                yield Act("compute", span=span, measured=measured, layer=layer)
            if not keeps:
                yield from self._let_go(own)
        yield Act("compute", span=root.forward[1], measured=root)
        yield Act("turn")
        yield from self._gather(run.of_layer(num_layers - 1) if self.is_gpu else self.forward_order[-1:])
        yield Act("compute", span=root.backward[0], measured=root, is_backward=True)
        for layer in reversed(range(num_layers)):
            yield from self._backward(layer)
        yield Act("compute", span=root.backward[1], measured=root, is_backward=True)
        yield from self._reduce(ROOT)
        yield Act("end")

    def _backward(self, layer: int) -> Iterator[Act]:
        run = self.run
        own, experts = Name("layer", layer), run.experts(layer)
        measured = run.measured.kinds[run.model.layers[layer]]
        yield from self._use(own, False)
        yield from self._gather(run.of_layer(layer - 1) if self.is_gpu else self._before(own))
        # a layer that is computed again comes to its experts twice
        uses = sum(span.mark == "use experts" for span in measured.backward)
        for span in measured.backward:
            if experts is not None and span.mark == "use experts":
                uses -= 1
                yield from self._use(experts, uses > 0)
                if uses == 0 and not self.is_gpu:
                    yield from self._gather(self._before(experts))
            elif experts is not None and span.mark == "leave experts":
                yield Act("turn")
            elif experts is not None and span.mark == "reduce experts":
                yield from self._reduce(experts)
            yield Act("compute", span=span, measured=measured, layer=layer, is_backward=True)
        yield from self._reduce(own)

    def _before(self, name: Name) -> list[Name]:
        """What was used before a unit in forward."""
        index = self.forward_order.index(name)
        return self.forward_order[max(index - 1, 0) : index]

    def _gather(self, names: list[Name]) -> Iterator[Act]:
        for name in names:
            if name not in self.where:
                self.where[name] = "coming"
                yield Act("gather", name)

    def _use(self, name: Name, in_forward: bool) -> Iterator[Act]:
        yield from self._gather([name])
        if self.where[name] == "coming":
            self.where[name] = "there"
            yield Act("use", name, in_forward)

    def _let_go(self, name: Name) -> Iterator[Act]:
        del self.where[name]
        yield Act("let go", name)

    def _reduce(self, name: Name) -> Iterator[Act]:
        del self.where[name]
        yield Act("reduce", name)
