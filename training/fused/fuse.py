"""Norms and rotary positions by our own kernels on a GPU, in place of transformers' code, which reads and writes full
tensors for each of its operators."""

from collections.abc import Hashable
from typing import Any

from torch import nn

from .fused_norm import Norm, fuse_norm
from .fused_rotary import fuse_rotary


def fuse_layers(model: Any) -> list[str]:
    """Have the model's RMS norms and rotary positions computed by Triton's kernels, in place; names of parameters and
    classes of modules stay. For models on a GPU: elsewhere all is computed as before, to the bit.

    What none of our formulas fits stays as it is, and so does what is compiled (`compile_layers`).

    Returns:
        Names of the modules, and of the functions of Python modules, that are.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    compiled = {p for module in modules.values() if module._compiled_call_impl is not None for p in module.modules()}
    known: dict[Hashable, Norm | None] = {}
    norms = [name for name, module in modules.items() if module not in compiled and fuse_norm(module, known)]
    return norms + fuse_rotary({type(module).__module__ for module in modules.values()})
