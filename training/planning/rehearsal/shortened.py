"""Runs a few layers of a model in place of all: finds which are alike, marks what each does, skips the others, and
extends what the few have done in a step to all layers: in order, with all changes of memory.

What a layer does in a step depends on itself and on its neighbours: while it computes, FSDP gathers the parameters of
the next, and frees what it needed for the one before. So a layer stands for all others of its kind whose neighbours are
of the same kinds too. Where one stood aside, there what its stand-in has done is put in; and what layers have made and
what is in no layer frees, goes once for each of them.

All layers are there, with their parameters, gradients and optimizer state, so that what goes over all parameters, or
over the statistics of all routers, is what it is in the full model.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....moe.experts.forward import current_forward
from ....moe.experts.model_layers import decoder_layers, moe_layers
from ....moe.experts.router_stats import RouterStats
from ....moe.torch_private import FSDPState, _current_autograd_node
from ....sharding.parallelize.parallelize import prefetch_layers
from ....sharding.parallelize.unreached import Unreached, is_reducing
from ....sharding.stages import stages_of
from ....sharding.state import local_tensor
from .live_memory import LiveTensors
from .recorder import Change, Event, Maker, Mark, Recorder

REACH = 2
"""Neighbours on either side that must be of the same kinds: no buffer of FSDP's is kept for longer."""

_Facts = dict[Hashable, Any]


def kinds_of_layers(model: Any) -> list[int]:
    """The kind of each decoder layer, as a number: layers of one kind have modules, parameters, buffers and plain
    attributes alike, and entries in the config's lists that have one for each layer; and gradients go through them
    alike.

    Args:
        model: from `build_model`, with adapters and what is frozen, not parallelized yet.
    """
    layers = list(decoder_layers(model))
    (path,) = (path for path, module in model.named_modules() if module is decoder_layers(model))
    facts = [_facts(layer, f"{path}.{number}.") for number, layer in enumerate(layers)]
    for key in {key for of_layer in facts for key in of_layer}:
        # a layer's own number in the stack
        if all(of_layer.get(key, number) == number for number, of_layer in enumerate(facts)):
            for of_layer in facts:
                of_layer.pop(key, None)
    for name, values in _lists(model.config.get_text_config(), len(layers)):
        for of_layer, value in zip(facts, values, strict=True):
            of_layer["config", name] = _plain(value, "")
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    has_gradient = any(p.requires_grad for p in model.parameters() if p not in in_layers and _is_below(model, p))
    for layer, of_layer in zip(layers, facts, strict=True):
        of_layer["gradient of the input"] = has_gradient
        has_gradient = has_gradient or any(p.requires_grad for p in layer.parameters())
    numbers: dict[frozenset[Any], int] = {}
    return [numbers.setdefault(frozenset(of_layer.items()), len(numbers)) for of_layer in facts]


def _is_below(model: Any, parameter: nn.Parameter) -> bool:
    """Whether a parameter is of the embeddings; what else lies outside of the layers comes after them."""
    return any(parameter is weight for weight in model.get_input_embeddings().parameters())


def _facts(layer: nn.Module, prefix: str) -> _Facts:
    """What a layer's modules are made of; `prefix` is the layer's path, which names of things in it begin with."""
    facts: _Facts = {}
    own = vars(nn.Module())
    for path, module in layer.named_modules():
        facts[path, "class"] = type(module)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            facts[path, "tensor", name] = (tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, value in vars(module).items():
            if name not in own:
                facts[path, "attribute", name] = _plain(value, prefix)
    return facts


def _plain(value: Any, prefix: str) -> Any:
    """The part of a value that determines what is computed: for an object that is no plain data, its class."""
    if isinstance(value, str):
        return value.replace(prefix, "") if prefix else value
    if value is None or isinstance(value, bool | int | float | torch.dtype):
        return value
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), tuple(_plain(entry, prefix) for entry in value))
    if isinstance(value, dict):
        return tuple((_plain(key, prefix), _plain(entry, prefix)) for key, entry in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        # not by the object's own way of being read, which a config refuses for what differs by layer
        held = (object.__getattribute__(value, entry.name) for entry in fields(value))
        return (type(value), tuple(_plain(entry, prefix) for entry in held))
    return getattr(value, "__qualname__", type(value))


def _lists(config: Any, length: int) -> Iterator[tuple[str, Sequence[Any]]]:
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == length:
            yield name, value


@dataclass(frozen=True)
class Stack:
    """A model's decoder layers, of which some are run.

    kinds: of each layer. stand_ins: for each layer, the number of the one that is run in its place; its own, if it is
    run itself.
    """

    kinds: tuple[Hashable, ...]
    stand_ins: tuple[int, ...]

    def is_rehearsed(self, layer: int) -> bool:
        return self.stand_ins[layer] == layer

    def times(self, layer: int | None) -> int:
        """How many layers one that is run stands for, itself included; 1 for what is in no layer."""
        return 1 if layer is None else self.stand_ins.count(layer)

    def rehearsed_before(self, layer: int) -> int:
        """The first layer that is run and of the same kind, whatever its neighbours."""
        return next(n for n, kind in enumerate(self.kinds) if kind == self.kinds[layer] and self.is_rehearsed(n))


def whole_stack(kinds: Sequence[Hashable]) -> Stack:
    """A stack of which all layers are run."""
    return Stack(tuple(kinds), tuple(range(len(kinds))))


def shortened_stack(kinds: Sequence[Hashable]) -> Stack:
    """A stack of which as few layers are run as show all that the others would do.

    Stretches of layers are cut out of the stack as long as every layer that remains keeps neighbours of the kinds that
    it had, and for every one that goes there remains one like it, and before it one of its kind.
    """
    kept = list(range(len(kinds)))
    while (cut := _longest_cut([kinds[number] for number in kept])) is not None:
        del kept[cut]
    around = _windows(kinds)
    first: dict[Hashable, int] = {}
    for number in kept:
        first.setdefault(around[number], number)
    remaining = set(kept)
    stand_ins = (number if number in remaining else first[around[number]] for number in range(len(kinds)))
    return Stack(tuple(kinds), tuple(stand_ins))


def _windows(kinds: Sequence[Hashable]) -> list[Hashable]:
    """Each layer's kind, between those of its neighbours; None beyond the stack's ends."""
    ends = [None] * REACH
    padded = [*ends, *kinds, *ends]
    return [tuple(padded[number : number + 2 * REACH + 1]) for number in range(len(kinds))]


def _longest_cut(kinds: Sequence[Hashable]) -> slice | None:
    around = _windows(kinds)
    for length in range(len(kinds) - 2, 0, -1):
        for start in range(len(kinds) - 1 - length, 0, -1):
            stop = start + length
            remaining = [*kinds[:start], *kinds[stop:]]
            if (
                _windows(remaining) == [*around[:start], *around[stop:]]
                and set(around[start:stop]) <= {*around[:start], *around[stop:]}
                and set(kinds[start:stop]) <= set(kinds[:start])
            ):
                return slice(start, stop)
    return None


class Shortened:
    """Shortens a parallelized model with as many decoder layers as `stack`. Within it, forwards and backwards tell
    `recorder` which layer they come to, skipped ones included."""

    def __init__(self, model: Any, stack: Stack, recorder: Recorder, live: LiveTensors):
        self.layers: list[Any] = list(decoder_layers(model))
        self.stack = stack
        stages = stages_of(model)
        self.lasts = {len(self.layers) - 1} if stages is None else {layers[-1] for layers in stages.layers}
        self.recorder = recorder
        self.live = live
        self._output: Any = None
        rehearsed = [layer for number, layer in enumerate(self.layers) if stack.is_rehearsed(number)]
        if len(rehearsed) < len(self.layers):
            prefetch_layers(model, rehearsed)
        for number, layer in enumerate(self.layers):
            if stack.is_rehearsed(number):
                self._have_marked(layer, number)
            else:
                self._have_stand_aside(layer, number)

    def __enter__(self) -> "Shortened":
        finish = FSDPState._root_post_backward_final_callback

        def marked(state: FSDPState) -> None:
            self.recorder.mark(None)
            finish(state)

        fill, skipped = Unreached.fill, self._of_skipped_layers()

        def filled(unreached: Unreached, group: Any) -> None:
            # a unit of all layers, say of routers in fp32: the gradients that their backwards would have left
            with self.recorder.paused():
                for own in group.fsdp_params if is_reducing(group) else ():
                    if own.sharded_param in skipped and own.unsharded_param.grad is None:
                        own.unsharded_param.grad = torch.empty_like(own.unsharded_param)
            fill(unreached, group)

        self._replaced = ExitStack()
        self._replaced.enter_context(mock.patch.object(FSDPState, "_root_post_backward_final_callback", marked))
        self._replaced.enter_context(mock.patch.object(Unreached, "fill", filled))
        return self

    def __exit__(self, *error: Any) -> None:
        self._replaced.close()

    def _of_skipped_layers(self) -> set[nn.Parameter]:
        skipped = (layer for number, layer in enumerate(self.layers) if not self.stack.is_rehearsed(number))
        return {parameter for layer in skipped for parameter in layer.parameters() if parameter.requires_grad}

    def add_gradients(self) -> None:
        """Give the parameters of skipped layers gradients, as those have them that ran in their place. To be called
        after the step's last backward."""
        with self.live.paused(), self.recorder.paused():
            for layer, number in zip(self.layers, self.stack.stand_ins, strict=True):
                # FSDP's are parts of one tensor
                storages: dict[int, Tensor] = {}
                for parameter, ran in zip(layer.parameters(), self.layers[number].parameters(), strict=True):
                    if parameter.grad is None and ran.grad is not None:
                        parameter.grad = _like(ran.grad, storages)

    def _have_marked(self, layer: nn.Module, number: int) -> None:
        is_last = number in self.lasts
        is_followed = is_last or self.stack.is_rehearsed(number + 1)

        def begin(module: nn.Module, args: Any) -> None:
            # not what is recomputed, within a backward that is marked already
            if _is_forward():
                self._output = None
                self.recorder.mark(number)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if _is_forward():
                self._output = None if is_followed else output
                result = output if isinstance(output, Tensor) else output[0]
                if result.requires_grad:
                    # it comes before FSDP's own hook, by which backward begins to gather parameters
                    result.register_hook(lambda gradient: self.recorder.mark(number))

        def go_on(module: nn.Module, args: Any, output: Any) -> None:
            if _is_forward():
                self.recorder.mark(None)

        layer.register_forward_pre_hook(begin, prepend=True)
        layer.register_forward_hook(end, prepend=True)
        if is_last:
            layer.register_forward_hook(go_on)

    def _have_stand_aside(self, layer: Any, number: int) -> None:
        """Skip a layer: its call returns what the layer before has returned, and none of its hooks run."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.recorder.mark(number)
            like = self.layers[self.stack.rehearsed_before(number)]
            with self.live.paused(), self.recorder.paused():
                forward = current_forward()
                assert forward is not None
                for experts, ran in zip(moe_layers(module), moe_layers(like), strict=True):
                    forward.stats[experts] = _statistics(forward.stats[ran])
            return self._output

        kind = type(layer)
        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _statistics(like: RouterStats) -> RouterStats:
    counts_E, rows = torch.empty_like(like.counts_E), like.rows_computed
    return RouterStats(counts_E, _figure(like.prob_sum_E), _figure(like.z_sum), _figure(like.entropy_sum), rows)


def _figure(like: Tensor | None) -> Tensor | None:
    if like is None or not like.requires_grad:
        return None if like is None else torch.empty_like(like)
    begin = torch.empty((), requires_grad=True)
    figure: Tensor = _Figure.apply(begin, torch.empty_like(like, requires_grad=False))
    return figure


def _is_forward() -> bool:
    return _current_autograd_node() is None


def _like(gradient: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """A gradient without values, like another. storages: those made so far, by that of the tensor that each is like."""
    local = local_tensor(gradient)
    storage = local.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = local.new_empty(storage.nbytes() // local.element_size())
    part = storages[storage._cdata].as_strided(local.shape, local.stride(), local.storage_offset())
    if not isinstance(gradient, DTensor):
        return part
    mesh, placements = gradient.device_mesh, gradient.placements
    shape, stride = gradient.shape, gradient.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


class _Figure(torch.autograd.Function):
    """The statistics that a router would have left. The losses stack those of all layers: the gradient of each is a
    part of one tensor, which goes when the last one has used it."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, figure: Tensor) -> Tensor:
        return figure

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


Entry = Event | Change


@dataclass(frozen=True)
class WholeStep:
    """A step of all layers.

    log: events, and changes of memory before each. calls: operators by micro-batch; None: in the update.
    """

    log: list[Entry]
    calls: dict[int | None, int]

    @property
    def events(self) -> list[Event]:
        return [entry for entry in self.log if isinstance(entry, Event)]


@dataclass
class _Stretch:
    """The log from one mark to the next."""

    mark: Mark
    entries: list[Entry]
    num_calls: int = 0


def whole_step(recorder: Recorder, stack: Stack) -> WholeStep:
    """The step of all layers, from what `recorder` has seen in a model shortened to `stack`."""
    stretches = _stretches(recorder)
    of_layer: dict[tuple[str, int | None, int], _Stretch] = {}
    for stretch in stretches:
        if (layer := stretch.mark.layer) is not None and stack.is_rehearsed(layer):
            key = (stretch.mark.phase, stretch.mark.micro, layer)
            assert key not in of_layer, key
            of_layer[key] = stretch
    log: list[Entry] = []
    calls: Counter[int | None] = Counter()
    for stretch in stretches:
        phase, micro, layer = stretch.mark.phase, stretch.mark.micro, stretch.mark.layer
        if layer is None:
            log.extend(_outside(stretch, stack, recorder.makers))
            calls[micro] += stretch.num_calls
            continue
        # layers that stand aside have no backward that would say where it begins
        following = _standing_aside_before(layer, stack) if phase == "backward" else ()
        for number in (layer, *following):
            stand_in = of_layer.get((phase, micro, stack.stand_ins[number]))
            if stand_in is not None:
                log.extend(_of_layer(stand_in, number))
                calls[micro] += stand_in.num_calls
    return WholeStep(log, calls)


def _stretches(recorder: Recorder) -> list[_Stretch]:
    stretches = [_Stretch(Mark("forward", None, None, 0), [])]
    for entry in recorder.log:
        if isinstance(entry, Mark):
            stretches[-1].num_calls = entry.num_calls - stretches[-1].mark.num_calls
            stretches.append(_Stretch(entry, []))
        else:
            stretches[-1].entries.append(entry)
    stretches[-1].num_calls = recorder.num_calls - stretches[-1].mark.num_calls
    return stretches


def _standing_aside_before(layer: int, stack: Stack) -> Iterator[int]:
    """Layers between a layer and the one before it that is run, backwards."""
    number = layer - 1
    while number >= 0 and not stack.is_rehearsed(number):
        yield number
        number -= 1


def _outside(stretch: _Stretch, stack: Stack, makers: dict[int, Maker]) -> Iterator[Entry]:
    for entry in stretch.entries:
        if isinstance(entry, Change) and entry.is_gone and (maker := makers.get(entry.storage)) is not None:
            yield replace(entry, more=entry.more * stack.times(maker.marked))
        else:
            yield entry


def _of_layer(stretch: _Stretch, number: int) -> Iterator[Entry]:
    assert stretch.mark.layer is not None
    further = number - stretch.mark.layer
    for entry in stretch.entries:
        if isinstance(entry, Change) or entry.place.layer is None or further == 0:
            yield entry
        else:
            yield replace(entry, place=replace(entry.place, layer=entry.place.layer + further))
