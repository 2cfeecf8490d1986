"""What a rank does in one forward and backward, in order: what it computes, and what FSDP gathers, frees and reduces
meanwhile, as `sharding.parallelize.parallelize` has it.

The order is that of `torch/distributed/fsdp/_fully_shard` (`_fsdp_state.py`, `_fsdp_param_group.py`): a layer's forward
and backward wait for its parameters, and begin to gather those of the next one; experts that are sharded over dp are a
unit of their own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Literal

from ....sharding.pipeline.balance import cut_stages
from ...config.optimizers import OPTIMIZERS, alike_size
from .measured import Measure, Measured, MeasuredModel, MeasuredSpan, ModelCuts, ModelParameters, Parameter
from .setting import Setting
from .units import Stacks, Unit, stacks_of, unit

Doing = Literal["gather", "use", "let go", "reduce", "compute", "turn", "end"]
"""gather: begin to bring a unit's parameters together. use: wait for that. let go: free them. reduce: free them, and
sum their gradients up over ranks. compute: a span. turn: a forward of its own has ended: the model's, or that of
experts which backward computes again. end: so has backward."""


@dataclass(frozen=True)
class Name:
    """Name of an FSDP unit: the root, a layer, a layer's experts, or one of the regions of tensor parallelism in a
    layer, or around them (-1)."""

    kind: Literal["root", "layer", "experts", "region"]
    layer: int = -1
    region: int = 0


ROOT = Name("root")


@dataclass(frozen=True)
class Act:
    """One action of a rank.

    Attributes:
        unit: what FSDP does it to.
        in_forward: of "use", whether a forward waits, a recomputed one included.
        span: what is computed; measured: of what it is a part; layer: in which layer, None around the layers.
        is_backward: whether it is a part of backward.
    """

    doing: Doing
    unit: Name = ROOT
    in_forward: bool = False
    span: MeasuredSpan | None = None
    measured: Measured | None = None
    layer: int | None = None
    is_backward: bool = False


@dataclass(frozen=True)
class PlannedRun:
    """A model in a setting, with what was measured of it, as one pp index runs it.

    cuts: where the model can be cut, if there is a pipeline. pp_rank: the pp index.
    """

    model: ModelParameters
    measured: MeasuredModel
    setting: Setting
    cuts: ModelCuts | None = None
    pp_rank: int = 0

    @cached_property
    def by_pp_rank(self) -> "list[PlannedRun]":
        """The run of each pp index."""
        return [self._at(pp_rank) for pp_rank in range(self.setting.pp_size)]

    def _at(self, pp_rank: int) -> "PlannedRun":
        other = replace(self, pp_rank=pp_rank)
        # found out once for all of them
        vars(other).update({name: getattr(self, name) for name in ("all_stages", "root_holders", "_kinds")})
        return other

    @cached_property
    def stacks(self) -> list[Stacks]:
        """Those that an optimizer of matrices computes with, of each group's first rank."""
        has_factors = OPTIMIZERS.get(self.setting.optimizer).has_factors
        found = []
        for is_experts, ranks in ((False, self.setting.dense_ranks), (True, self.setting.dp_size)):
            units = [unit for name, unit in self.units.items() if (name.kind == "experts") == is_experts]
            found += stacks_of((block for unit in units for block in unit.blocks), ranks, has_factors)
        return found

    @cached_property
    def alike(self) -> list[tuple[int, int, int]]:
        """Parameters whose parts have one shape on this rank: the elements of a part, the parameters that an optimizer
        which takes these together updates at once, and how many such updates it makes."""
        found = []
        for (elements, _), number in Counter(part for each in self.units.values() for part in each.parts).items():
            size = alike_size(elements, number)
            found.append((elements, size, -(-number // size)))
        return found

    @cached_property
    def all_stages(self) -> tuple[range, ...]:
        """The decoder layers of each stage, of all pp indices.

        Raises:
            ExpertMeshError: the model cannot be cut so.
        """
        s = self.setting
        if s.pp_size == 1:
            return (range(len(self.model.layers)),)
        assert self.cuts is not None
        return _cut_stages(self.cuts, s.pp_size, s.chunks, s.stage_layers)

    @property
    def stages(self) -> range:
        """The stages of this pp index."""
        return range(self.pp_rank, self.setting.pp_size * self.setting.chunks, self.setting.pp_size)

    @cached_property
    def layers(self) -> list[int]:
        """The decoder layers of this pp index."""
        return [layer for stage in self.stages for layer in self.all_stages[stage]]

    @cached_property
    def units(self) -> dict[Name, Unit]:
        """All units of FSDP here, and the experts of each layer, whether they are one or not."""
        s, model = self.setting, self.model
        found = {ROOT: unit(self._root(-1), s.dense_ranks, s.ranks_per_stage // s.dense_ranks)}
        around = sorted({model.root_regions[number] for number in self.root_numbers} - {-1})
        found |= {Name("region", -1, region): self._region(self._root(region)) for region in around}
        for layer in self.layers:
            kind = model.layers[layer]
            dense, experts, *regions = self._kinds[kind]
            found[Name("layer", layer)] = dense
            found |= {Name("region", layer, number): region for number, region in enumerate(regions)}
            if model.kinds[kind].experts:
                found[Name("experts", layer)] = experts
        return found

    @cached_property
    def _kinds(self) -> list[tuple[Unit, ...]]:
        """Of each kind of layer, the unit of what all ranks have alike, that of the experts, and those of what tensor
        parallelism divides."""
        s = self.setting
        replicas = s.ranks_per_stage // s.dense_ranks
        return [
            (
                unit(kind.dense, s.dense_ranks, replicas),
                unit(kind.experts, s.dp_size, 1, s.ep_size, s.offload_experts),
                *map(self._region, kind.regions),
            )
            for kind in self.model.kinds
        ]

    def _region(self, parameters: Iterable[Parameter]) -> Unit:
        """The unit of what tensor parallelism divides in a region."""
        s = self.setting
        return unit(parameters, s.dense_ranks // s.tp_size, s.ranks_per_stage // s.dense_ranks, s.tp_size)

    def _root(self, region: int) -> list[Parameter]:
        """What is in no decoder layer and in this region (-1: in none), of which each stage that uses it has a copy."""
        return [self.model.root[n] for n in self.root_numbers if self.model.root_regions[n] == region]

    @cached_property
    def root_numbers(self) -> tuple[int, ...]:
        """Which of the model's parameters that are in no decoder layer are here."""
        return tuple(number for number, holders in enumerate(self.root_holders) if self.pp_rank in holders)

    @cached_property
    def root_holders(self) -> list[set[int]]:
        """Of each parameter that is in no decoder layer, the pp indices that use it."""
        if self.cuts is None:
            return [{0} for _ in self.model.root]
        stage_of = [stage for stage, layers in enumerate(self.all_stages) for _ in layers]
        stage_of.append(stage_of[-1])
        return [{stage_of[place] % self.setting.pp_size for place in places} for places in self.cuts.root_places]

    def experts(self, layer: int) -> Name | None:
        """The unit of a layer's experts, if there is one."""
        name = Name("experts", layer)
        return name if self.setting.experts_are_gathered and name in self.units else None

    def of_layer(self, layer: int) -> list[Name]:
        """The units in a layer."""
        experts = self.experts(layer)
        regions = self.model.kinds[self.model.layers[layer]].regions
        inner = [Name("region", layer, number) for number in range(len(regions))]
        return [Name("layer", layer), *inner, *([] if experts is None else [experts])]

    def marked(self, span: MeasuredSpan, layer: int) -> Name | None:
        """The unit in a layer, or around them (-1), that FSDP does something to before a span."""
        if span.mark.endswith("region"):
            name = Name("region", layer, span.region)
            return name if name in self.units else None
        return self.experts(layer) if span.mark.endswith("experts") else None

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """Actions of one forward and backward of all stages here. What FSDP has done already is no action."""
        return tuple(chain.from_iterable(chain(*self.acts_of(stage)) for stage in self.stages))

    def acts_of(self, stage: int) -> tuple[list[Act], list[Act]]:
        """The same, of the forward and of the backward of one stage."""
        order = _Order(self, stage)
        return list(order.forward()), list(order.backward())


def planned_run(measure: Measure, setting: Setting) -> PlannedRun:
    """A setting with all that is measured for it.

    Raises:
        ExpertMeshError: the model cannot compute it, or not be cut into stages.
    """
    measured = measure(setting.workload(measure.parameters))
    return PlannedRun(measure.parameters, measured, setting, measure.cuts() if setting.pp_size > 1 else None)


@cache
def _cut_stages(cuts: ModelCuts, pp_size: int, chunks: int, layers: tuple[int, ...] | None) -> tuple[range, ...]:
    return cut_stages(cuts, pp_size, chunks, layers)


class _Order:
    """The actions of one stage. The code around the layers runs on all: its part before them is taken to be as large
    on each, its part after them is the last one's."""

    def __init__(self, run: PlannedRun, stage: int):
        self.run = run
        self.layers = run.all_stages[stage]
        self.is_first, self.is_last = stage == 0, stage == len(run.all_stages) - 1
        self.where: dict[Name, Literal["coming", "there"]] = {}
        # on a CPU nothing is gathered ahead but what FSDP does by itself
        self.is_gpu = run.setting.device == "cuda"
        self.forward_order = [name for layer in self.layers for name in self._ends(layer)]

    def _ends(self, layer: int) -> list[Name]:
        """The units in a layer, in the order in which their forwards end."""
        spans = self.run.measured.kinds[self.run.model.layers[layer]].forward
        left = [self.run.marked(span, layer) for span in spans if span.mark.startswith("leave")]
        return [name for name in left if name is not None] + [Name("layer", layer)]

    def _of_layer(self, layer: int) -> list[Name]:
        """The units in a layer, if the stage has it."""
        return self.run.of_layer(layer) if layer in self.layers else []

    def forward(self) -> Iterator[Act]:
        run = self.run
        kinds, around = run.measured.kinds, run.measured.around
        keeps = not run.setting.reshard_after_forward
        yield from self._use(ROOT, True)
        if self.is_gpu:
            yield from self._gather(self._of_layer(self.layers[0]))
        yield from self._around(around.before)
        for layer in self.layers:
            own = Name("layer", layer)
            yield from self._use(own, True)
            if self.is_gpu:
                yield from self._gather(self._of_layer(layer + 1))
            measured = kinds[run.model.layers[layer]]
            for span in measured.forward:
                inner = run.marked(span, layer)
                if inner is not None and span.mark.startswith("use"):
                    yield from self._use(inner, True)
                elif inner is not None and span.mark.startswith("leave") and not keeps:
                    yield from self._let_go(inner)
                yield Act("compute", span=span, measured=measured, layer=layer)
            if not keeps:
                yield from self._let_go(own)
        if self.is_last:
            yield from self._around(around.after)
        yield Act("turn")

    def backward(self) -> Iterator[Act]:
        around = self.run.measured.around
        yield from self._gather(self._of_layer(self.layers[-1]) if self.is_gpu else self.forward_order[-1:])
        if self.is_last:
            yield from self._around(around.after_backward, is_backward=True)
        for layer in reversed(self.layers):
            yield from self._backward(layer)
        if self.is_first:
            yield from self._around(around.before_backward, is_backward=True)
        # whose input has no gradient, by which FSDP would know earlier
        for name in [ROOT, *(name for name in self.where if name.layer < 0 and name != ROOT)]:
            yield from self._reduce(name)
        yield Act("end")

    def _around(self, spans: Iterable[MeasuredSpan], is_backward: bool = False) -> Iterator[Act]:
        """What is computed around the layers; its parameters stay gathered from forward to backward."""
        for span in spans:
            region = self.run.marked(span, -1)
            if region is not None and span.mark == "use region":
                yield from self._use(region, not is_backward)
            elif region is not None and span.mark == "reduce region":
                yield from self._reduce(region)
            yield Act("compute", span=span, measured=self.run.measured.root, is_backward=is_backward)

    def _backward(self, layer: int) -> Iterator[Act]:
        run = self.run
        own = Name("layer", layer)
        measured = run.measured.kinds[run.model.layers[layer]]
        yield from self._use(own, False)
        yield from self._gather(self._of_layer(layer - 1) if self.is_gpu else self._before(own))
        # a recomputed layer comes to what is in it twice
        uses = Counter(run.marked(span, layer) for span in measured.backward if span.mark.startswith("use"))
        for span in measured.backward:
            inner = run.marked(span, layer)
            if inner is not None and span.mark.startswith("use"):
                uses[inner] -= 1
                yield from self._use(inner, uses[inner] > 0)
                if uses[inner] == 0 and not self.is_gpu:
                    yield from self._gather(self._before(inner))
            elif inner is not None and span.mark.startswith("leave"):
                yield Act("turn")
            elif inner is not None and span.mark.startswith("reduce"):
                yield from self._reduce(inner)
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
