"""Which decoder layers of a model are alike, found in the model itself: the planner measures one of each kind."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....moe.experts.model_layers import decoder_layers
from ....moe.hf_model.family_exceptions import HANDS_ON, TAKES
from ....moe.hf_model.images import images_of, trains_images

_Facts = dict[tuple[Hashable, ...], Any]


def kinds_of_layers(model: Any) -> list[int]:
    """The kind of each decoder layer, as a number: layers of one kind have modules, parameters, buffers and plain
    attributes alike, and entries in the config's lists that have one for each layer; gradients go through them alike,
    and image features are added to all of their results or to none.

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
    if not any(value for of_layer in facts for key, value in of_layer.items() if key[-1] == TAKES):
        # what nobody takes changes nothing that is computed
        facts = [{key: value for key, value in of_layer.items() if key[-1] != HANDS_ON} for of_layer in facts]
    for name, values in _lists(model.config.get_text_config(), len(layers)):
        for of_layer, value in zip(facts, values, strict=True):
            of_layer["config", name] = _plain(value, "")
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    has_gradient = any(p.requires_grad for p in model.parameters() if p not in in_layers and _is_below(model, p))
    has_gradient = has_gradient or trains_images(model)
    images = images_of(model)
    for number, (layer, of_layer) in enumerate(zip(layers, facts, strict=True)):
        of_layer["layer", "image features"] = images is not None and number < images.num_deep
        of_layer["layer", "gradient of the input"] = has_gradient
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
