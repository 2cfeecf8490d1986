"""Rows' weights, applied to what an expert computes between its matmuls, as on a GPU. What kernels make of them is
part of their contract (`kernel_contract.py`)."""

import importlib
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.dispatch.permute import WeightsToRows
from expertmesh.moe.experts import expert_mlp
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.kernels.weighing import WeighRows, plain_weighed, plain_weighed_backward
from expertmesh.sharding.parallelize.recompute import _ROUTING, _selective_contexts, watch_choices
from tests.interpreter import interpreted
from tests.moe.kernel_contract import Calls
from tests.moe.test_experts import CPU_KERNELS, KINDS, adapted, check, experts_of, random
from tests.moe.test_weight_gradients import Run
from tests.rounding import OTHER_ORDER, assert_near
from tests.tiny import relative_error, tiny_block


def test_plain_weighing_is_what_autograd_says() -> None:
    torch.manual_seed(0)
    grad, hidden = torch.randn(2, 5, 8)
    inputs = hidden.requires_grad_(), torch.rand(5, requires_grad=True)
    found, expected = WeighRows.apply(*inputs), hidden * inputs[1].unsqueeze(1)
    assert_near(found, expected)
    assert_near(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@interpreted
@pytest.mark.parametrize("rows", [0, 1, 21])
def test_fused_weighing_equals_plain(rows: int) -> None:
    check_weighing(rows, torch.float32, "cpu", OTHER_ORDER)


def check_weighing(rows: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    torch.manual_seed(0)
    fused: Any = importlib.import_module("expertmesh.moe.kernels.weighing_triton")
    for width in (104, 1024, 2500):
        hidden, grad = (3 * torch.randn(2, rows, width, device=device)).to(dtype)
        weights = torch.rand(rows, device=device)
        assert relative_error(fused.fused_weighed(hidden, weights), plain_weighed(hidden, weights)) < tolerance
        found = fused.fused_weighed_backward(grad, hidden, weights)
        for mine, plain in zip(found, plain_weighed_backward(grad, hidden, weights), strict=True):
            assert mine.dtype == plain.dtype
            assert relative_error(mine, plain) < tolerance


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: False)


def gradients(layer: Any, is_checkpointed: bool) -> tuple[list[Tensor | None], int]:
    """Of tokens and weights; and how many matmuls they took."""
    watch_choices(layer)
    contexts = partial(_selective_contexts, _ROUTING)
    run = partial(checkpoint, layer, use_reentrant=False, context_fn=contexts) if is_checkpointed else layer
    x_BSD = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Calls() as calls:
        with Forward():
            out_BSD = run(x_BSD)
        out_BSD.square().sum().backward()
    return [x_BSD.grad, *(parameter.grad for parameter in layer.parameters())], calls.count["aten::_grouped_mm"]


@pytest.mark.usefixtures("as_on_gpu")
def test_a_recomputation_multiplies_by_no_last_matrix() -> None:
    alone, calls = gradients(tiny_block("torch-grouped"), is_checkpointed=False)
    assert calls == 3 + 6
    found, calls = gradients(tiny_block("torch-grouped"), is_checkpointed=True)
    assert calls == 3 + 2 + 6
    torch.testing.assert_close(found, alone, rtol=0, atol=0)


def test_on_a_cpu_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its results are those with weighed results, but for rounding."""
    expected, calls = gradients(tiny_block("torch-grouped"), is_checkpointed=True)
    assert calls == 3 + 3 + 6
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: False)
    for mine, other in zip(gradients(tiny_block("torch-grouped"), is_checkpointed=True)[0], expected, strict=True):
        assert_near(mine, other)


@pytest.fixture
def weighing(as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Is called where rows are weighed."""
    weigh = mock.Mock(side_effect=WeightsToRows.forward)
    monkeypatch.setattr(WeightsToRows, "forward", weigh)
    return weigh


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(weighing: mock.Mock, kind: str, kernel: str) -> None:
    """All kinds, of which those with biases weigh results; so does `loop`, which computes plain experts at once."""
    check(random(KINDS[kind][0]()), kernel)
    assert weighing.called == ("biases" not in kind and not (kernel == "loop" and KINDS[kind][1]))


def test_with_adapters(weighing: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = adapted(experts_of("plain"))
    found = Run(experts).do("F1 B1")
    assert weighing.called
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: True)
    expected = Run(experts).do("F1 B1")
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_near(gradient, expected[name])


def test_a_norm_gets_results_without_weights(weighing: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of("plain", "torch-grouped")
    experts.post_expert_norm = nn.Tanh()
    found = Run(experts).do("F1 B1")
    assert not weighing.called
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: True)
    torch.testing.assert_close(found, Run(experts).do("F1 B1"), rtol=0, atol=0)
