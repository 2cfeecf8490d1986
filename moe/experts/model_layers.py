"""The decoder layers of a model that was built here, and the experts in them."""

from torch import nn

from .layer import DMoE
from .shape import MoEShape


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model, those without experts included."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(isinstance(part, DMoE) for part in module.modules()):
            return module
    raise AssertionError("no list of layers holds experts")


def moe_layers(model: nn.Module) -> list[DMoE]:
    """The experts of the model's MoE layers, first to last."""
    return [module for module in model.modules() if isinstance(module, DMoE)]


def layer_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of names in a decoder layer."""
    layers = set(decoder_layers(model))
    return tuple(f"{path}." for path, module in model.named_modules() if module in layers)


def router_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of names of routers' parameters."""
    return tuple(f"{layer.router}." for layer in moe_layers(model) if layer.router is not None)


def moe_shape(model: nn.Module) -> MoEShape:
    """The sizes of the model's MoE layers: those of the first, as all have equally many experts."""
    return moe_layers(model)[0].shape
