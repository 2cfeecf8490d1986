"""Linear layers by which a package's kernel multiplies in their place, given their weights: mamba-ssm's, in training,
by the last layer of a Mamba-2 mixer. A layer that does more than multiply is called after the kernel."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..experts.model_facts import facts_of
from ..linear.linear import is_transposed, only_multiplies
from ..transformers_private import kernel_name_of, projecting_functions

_layers: WeakSet[nn.Module] = WeakSet()
"""Such layers of all models."""
_exchanged: set[Callable[..., Any]] = set()
"""What stands in transformers' files."""


def call_layers(model: nn.Module) -> None:
    """Have such layers called that, by then, have an adapter or hooks, are quantized, or multiply in fp8; in place, and
    in transformers' files, where the package is installed."""
    handed = facts_of(model).handed
    _layers.update(model.get_submodule(path) for path in handed)
    for file, functions in projecting_functions(model.modules() if handed else ()).items():
        for name, function in functions.items():
            kernel = kernel_name_of(function)
            if function not in _exchanged and (kernel is None or kernel.is_installed):
                setattr(file, name, _calling(function))
                _exchanged.add(vars(file)[name])


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable
    @wraps(function)
    def call(
        *args: Any, outproj_weight: Tensor | None = None, outproj_bias: Tensor | None = None, **kwargs: Any
    ) -> Any:
        layer = next((layer for layer in _layers if layer.weight is outproj_weight), None)
        if layer is None or _only_multiplies(layer):
            return function(*args, outproj_weight=outproj_weight, outproj_bias=outproj_bias, **kwargs)
        out = function(*args, **kwargs)
        return out if out is None else layer(out)

    return call


def _only_multiplies(layer: nn.Module) -> bool:
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return only_multiplies(layer) and not is_transposed(layer) and not has_hooks
