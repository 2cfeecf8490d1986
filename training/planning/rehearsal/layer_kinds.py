"""Which decoder layers of a model are alike, and which few of them show all that the others would do.

What a layer does in a step depends on itself and on its neighbours: while it computes, FSDP gathers the parameters of
the next, and frees what it needed for the one before. So a layer stands for all others of its kind whose
neighbours are of the same kinds too.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....moe.experts.model_layers import decoder_layers

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
