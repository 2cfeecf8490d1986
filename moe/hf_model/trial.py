"""Forwards of a model that has no weights yet, with values that show which tokens a result depends on.

Weights of a full-size model would take its complete memory. What they compute does not matter here: a linear layer
gives a token some of its own features, an embedding a few waves of its number, experts their input. What mixes tokens
stays the family's own code, at full width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..experts.model_layers import moe_layers
from ..linear.linear import Linear
from ..transformers_private import without_packages
from ..util.threads import on_one_thread
from .probe import leaving_no_trace

_LARGE = 2**16
"""Parameters with more elements are alike in all dims but the last, which takes no memory."""


@contextmanager
def standing_in_for_weights(model: Any) -> Iterator[None]:
    """Within it, a model on the meta device computes on the CPU, in fp32, with stand-ins for its weights."""
    with (
        on_one_thread(),
        torch.device("cpu"),
        torch.no_grad(),
        leaving_no_trace(model),
        _WithoutWeights(),
        without_packages(),
    ):
        for module in model.modules():
            module.training = False
            module._parameters = {
                name: None if p is None else _values(p.shape) for name, p in module._parameters.items()
            }
            module._buffers = {name: None if x is None else _known(x) for name, x in module._buffers.items()}
            if type(module).forward in (nn.Linear.forward, Linear.forward):
                module.forward = partial(_some_features, module.out_features)
        for layer in moe_layers(model):
            layer.forward = lambda x_TD, experts_TK, weights_TK: x_TD  # type: ignore[method-assign]
        yield


class _WithoutWeights(TorchFunctionMode):
    """Linear layers and embeddings by the shapes of their weights. What is negative is no zero: layers choose tokens by
    scores that are sums of what is positive of each head's, and which of equal ones is chosen turns on how many there
    are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            return _some_features(args[1].shape[0], args[0])
        if function is F.embedding:
            return _waves(*args[:2])
        if function in (F.relu, torch.relu, Tensor.relu):
            return F.softplus(args[0])
        return function(*args, **(kwargs or {}))


def _some_features(out_features: int, x: Tensor) -> Tensor:
    """Features of each token in another order, some with the other sign, as often as it takes."""
    if not x.shape[-1]:
        return x.new_zeros(*x.shape[:-1], out_features)
    place = torch.arange(out_features)
    return x[..., (place * 7 + place // 5) % x.shape[-1]] * (1.0 - 2.0 * ((place * place) % 3 == 1))


def _waves(ids: Tensor, weight: Tensor) -> Tensor:
    return torch.sin((ids.unsqueeze(-1) + 1) * (torch.arange(weight.shape[-1]) * 0.37 + 0.61))


@lru_cache(maxsize=256)
def _values(shape: torch.Size) -> nn.Parameter:
    width = shape[-1] if shape else 1
    number = width if shape.numel() > _LARGE else shape.numel()
    values = torch.sin(torch.arange(number) * 1.7 + 0.4) * 0.3
    # those of norms, and the logarithms of decays, are near 1 and 0
    values = values + 0.6 if len(shape) == 1 else values
    return nn.Parameter(values.view(shape if number == shape.numel() else (width,)).expand(shape), requires_grad=False)


def _known(buffer: Tensor) -> Tensor:
    """A buffer whose values only a checkpoint has is not a number until then."""
    return buffer.nan_to_num(nan=0.5) if buffer.is_floating_point() else buffer


def counts_tokens(dtype: torch.dtype, num_dims: int) -> bool:
    """Whether a tensor that layers give one another holds indices of a sequence's tokens, several per position."""
    return num_dims > 2 and dtype in (torch.int32, torch.int64)
