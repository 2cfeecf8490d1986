"""Gate and up in one GEMM, as experts choose it on a GPU: here on a CPU, where only these tests ask for it. What it
computes is part of the contract of kernels (`kernel_contract.py`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.experts import expert_mlp
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.kernels.weight_gradients import WeightGradients
from expertmesh.moe.linear.low_rank import LowRank
from expertmesh.moe.util.gpu import rehearsing_gpu
from expertmesh.sharding.parallelize.recompute import _ROUTING, _selective_contexts, watch_choices
from tests.interpreter import interpreted
from tests.moe.test_experts import KINDS, TOP_K, WIDTH, D, experts_of
from tests.moe.test_weight_gradients import BF16, Run
from tests.moe.test_weight_gradients import check as check_deferred
from tests.tiny import tiny_block


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: False)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of each grouped GEMM's result."""
    shapes: list[tuple[int, ...]] = []
    grouped_mm = F.grouped_mm

    def record(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = grouped_mm(a, b, offs=offs)
        shapes.append(tuple(out.shape))
        return out

    monkeypatch.setattr(F, "grouped_mm", record)
    return shapes


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """But for another order of sums, in bf16."""
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert grad.dtype == expected[name].dtype
        assert (grad - expected[name]).abs().max() <= 2**-7 * expected[name].abs().max(), name


@pytest.mark.parametrize("frozen", [(), ("v1",), ("w1",), ("w2",), ("w1", "v1")], ids=str)
def test_gradients_are_those_of_two_gemms(
    monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]], frozen: tuple[str, ...]
) -> None:
    experts = experts_of("plain", "torch-grouped")
    for name in frozen:
        getattr(experts.mlp, name).requires_grad_(False)
    two = Run(experts, BF16).do("F1 F2 B1 B2")
    assert len(products) == 2 * 9
    products.clear()
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: False)
    assert_near(Run(experts, BF16).do("F1 F2 B1 B2"), two)
    assert two.keys() == {"tokens 1", "tokens 2", "w1", "v1", "w2"} - set(frozen)
    assert len(products) == 2 * 6
    assert products[0][-1] == 2 * WIDTH


@pytest.mark.usefixtures("as_on_gpu")
def test_left_for_later_they_have_the_same_bits(products: list[tuple[int, ...]]) -> None:
    experts = experts_of("plain", "torch-grouped")
    check_deferred(experts, BF16)
    assert (len(experts.mlp.w1) // WIDTH, 2 * WIDTH, D) in products
    experts.mlp.v1.requires_grad_(False)
    check_deferred(experts, BF16)
    assert experts.mlp.v1.grad is None


@pytest.mark.usefixtures("as_on_gpu")
def test_what_waits() -> None:
    queue = WeightGradients()
    run = Run(experts_of("plain", "torch-grouped"), BF16, queue)
    assert run.do("F1 B1").keys() == {"tokens 1"}
    assert queue.bytes == 2 * run.inputs[1].shape[0] * TOP_K * (2 * D + 3 * WIDTH)
    assert run.do("W1").keys() == {"tokens 1", "w1", "v1", "w2"}
    assert queue.bytes == 0


@pytest.mark.usefixtures("as_on_gpu")
def test_working_weights_that_are_kept() -> None:
    """A second copy is that of both, and none of either."""
    experts = experts_of("plain", "torch-grouped")
    expected = Run(experts, BF16).do("F1 B1 F2 B2")
    assert not experts.mlp.working._kept
    experts.mlp.working.are_kept = True
    torch.testing.assert_close(Run(experts, BF16).do("F1 B1 F2 B2"), expected, rtol=0, atol=0)
    assert experts.mlp.working._kept.keys() == {expert_mlp._JOINED, "w2"}


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("is_kept", [False, True])
def test_selective_checkpointing_keeps_its_result(products: list[tuple[int, ...]], is_kept: bool) -> None:
    contexts = partial(_selective_contexts, _ROUTING)
    runs: list[Callable[..., Tensor]] = [
        lambda layer, x: layer(x),
        partial(checkpoint, use_reentrant=False, context_fn=contexts),
    ]
    found, calls = [], []
    for run in runs:
        layer = tiny_block("torch-grouped")
        layer.gate.to(BF16)
        watch_choices(layer)
        layer.experts.mlp.keeps_products = is_kept
        x_BSD = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0)).to(BF16).requires_grad_()
        products.clear()
        with Forward():
            out_BSD = run(layer, x_BSD)
        out_BSD.square().sum().backward()
        calls.append(products.count((7 * 2, 2 * 48)))
        found.append([x_BSD.grad, *(parameter.grad for parameter in layer.parameters())])
    assert calls == [1, 1 if is_kept else 2]
    torch.testing.assert_close(*found, rtol=0, atol=0)


@interpreted
def test_with_triton_kernels_between_the_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 from bf16 weights, as Triton's interpreter has no bf16."""
    experts = experts_of("plain", "torch-grouped").to(BF16)
    expected = Run(experts).do("F1 B1")
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: False)
    monkeypatch.setattr("expertmesh.moe.kernels.swiglu.takes_triton", lambda tensor: True)
    assert_near(Run(experts).do("F1 B1"), expected)


def test_where_it_is_chosen() -> None:
    """Where weights are copied into another dtype all the same, and both are trained."""

    def are_joined(experts: Any, dtype: torch.dtype = BF16) -> bool:
        joined: bool = experts.mlp._joins_gate_and_up(torch.empty(1, D, dtype=dtype))
        return joined

    def plain(kernel: str = "torch-grouped") -> Any:
        return experts_of("plain", kernel)

    frozen, adapted = plain().requires_grad_(False), plain()
    adapted.mlp.low_rank = LowRank(4, 1.0, 0.0)
    others = [experts_of(kind, "torch-grouped") for kind, (_, is_swiglu, _) in KINDS.items() if not is_swiglu]
    assert others
    assert not are_joined(plain())  # on a CPU nothing changes
    with rehearsing_gpu():
        assert are_joined(plain())
        assert not are_joined(plain(), torch.float32)  # nothing is copied
        assert not any(map(are_joined, (plain().to(BF16), plain("loop"), frozen, adapted, *others)))
