"""Selective checkpointing keeps the output of attention, whichever kernel torch takes: those of GPUs stand in for
themselves, as formulas on a CPU that give what their operators declare."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from expertmesh.moe.experts.forward import Forward
from expertmesh.sharding.parallelize.recompute import _ATTENTION, _ROUTING, _selective_contexts

FUSED = ("cudnn", "flash", "efficient")
"""Those among which torch chooses on CUDA."""


def _name(kind: str) -> str:
    return f"_scaled_dot_product_{kind}_attention"


def test_every_fused_attention_of_torch_is_kept() -> None:
    """By the names that this release registers: an operator that is new, or renamed, is noticed."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if "scaled_dot_product" in name}
    forwards = {name for name in registered if "backward" not in name and "." not in name}
    others = {
        # these call other operators, or belong to devices that are neither CPUs nor CUDA
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_attention_math_for_mps",
        "aten::_scaled_dot_product_fused_attention_overrideable",
    }
    assert forwards - others == {name for name in _ATTENTION if name.startswith("aten::")}
    assert {f"aten::{_name(kind)}" for kind in FUSED} <= _ATTENTION


def _attend(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of causal attention, and the logarithm of each query's sum of exponentials."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp(), lse


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weights, expected = _attend(query, key)
    assert torch.equal(lse, expected), "what forward has saved"
    grad_scores = weights * (grad @ value.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True))
    grad_scores = grad_scores / math.sqrt(query.shape[-1])
    return grad_scores @ key, grad_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad


@contextmanager
def standing_in(kind: str) -> Iterator[Counter[str]]:
    """Within it, that kernel of CUDA's computes on a CPU, and `scaled_dot_product_attention` takes it; how often its
    forward and its backward were called."""
    calls: Counter[str] = Counter()
    random = torch.zeros((), dtype=torch.int64)

    def forward(query: Tensor, key: Tensor, value: Tensor, *given: Any, **settings: Any) -> Any:
        calls["forward"] += 1
        weights, lse = _attend(query, key)
        out = weights @ value
        if kind == "efficient":
            return out, lse, random.clone(), random.clone()
        # sequences of one length each have no tensors of where they begin
        lengths = (None, None, query.shape[2], key.shape[2])
        return out, lse, *lengths, random.clone(), random.clone(), torch.empty(0)

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any, **settings: Any) -> Any:
        calls["backward"] += 1
        # of "efficient" the bias comes before the output
        out, lse = given[1:3] if kind == "efficient" else given[:2]
        found = _gradients(grad, query, key, value, out, lse)
        return (*found, None) if kind == "efficient" else found

    def attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        operator = getattr(torch.ops.aten, _name(kind))
        # a bias, and whether the log-sum-exp is wanted
        given: tuple[Any, ...] = () if kind == "flash" else (None, True)
        out: Tensor = operator(query, key, value, *given, is_causal=True)[0]
        return out

    library = torch.library.Library("aten", "IMPL")
    library.impl(_name(kind), forward, "CPU")
    library.impl(f"{_name(kind)}_backward", backward, "CPU")
    try:
        with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention):
            yield calls
    finally:
        library._destroy()


def _layer(x_BSD: Tensor, weight: Tensor) -> Tensor:
    """Attention of two heads, as transformers calls it."""
    heads = (x_BSD @ weight).unflatten(-1, (2, -1)).transpose(1, 2)
    module = SimpleNamespace(is_causal=True, training=True, num_key_value_groups=1)
    out, _ = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", _attend)(
        module, heads, heads, heads, None, scaling=None, dropout=0.0
    )
    return x_BSD + out.flatten(2)


@pytest.mark.parametrize("kind", FUSED)
def test_attention_is_not_computed_again(kind: str) -> None:
    """And gradients are those without checkpointing, to the bit."""
    torch.manual_seed(0)
    x_BSD, weight = torch.randn(2, 6, 8), nn.Parameter(torch.randn(8, 8))
    run: Callable[..., Any] = partial(
        checkpoint, _layer, use_reentrant=False, context_fn=partial(_selective_contexts, _ROUTING | _ATTENTION)
    )
    found = []
    for layer in (_layer, run):
        inputs = x_BSD.clone().requires_grad_()
        with standing_in(kind) as calls, Forward():
            out = layer(inputs, weight)
            out.square().sum().backward()
        assert calls == {"forward": 1, "backward": 1}
        assert inputs.grad is not None
        assert weight.grad is not None
        found.append((out.detach(), inputs.grad, weight.grad.clone()))
        weight.grad = None
    for plain, kept in zip(*found, strict=True):
        assert torch.equal(plain, kept)
