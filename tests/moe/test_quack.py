"""The expert kernel `quack`, of a stand-in for its package: by the contract of all, in layers, and what refuses it."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.experts import expert_mlp
from expertmesh.moe.experts.forward import Forward
from expertmesh.moe.kernels import quack
from expertmesh.moe.kernels.expert_kernels import choose_kernel
from expertmesh.moe.kernels.kernel_entries import QUACK_ENTRY
from expertmesh.moe.kernels.kernel_registry import KernelNeeds
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.recompute import _ROUTING, _selective_contexts, watch_choices
from tests.gpus import SetCapability
from tests.moe import quack_stand_in
from tests.moe.kernel_contract import COUNTS, check_kernel, rows_of
from tests.moe.test_experts import D, experts_of
from tests.moe.test_weight_gradients import BF16, Run
from tests.moe.test_weight_gradients import check as check_deferred
from tests.tiny import relative_error, tiny_block

FORWARD, BACKWARD = ["gemm_gated", "gemm"], ["gemm_dgated", "gemm", "gemm", "gemm"]
"""What computes experts whose gate and up are one tensor."""


@pytest.fixture
def package() -> Iterator[ModuleType]:
    with quack_stand_in.installed():
        yield quack_stand_in


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_contract(counts: list[int]) -> None:
    check_kernel(QUACK_ENTRY, counts)
    check_kernel(QUACK_ENTRY, counts, BF16, 8e-3)


def joined_inputs(rows: int) -> list[Tensor]:
    sizes = (rows, D), (2, 2 * 24, D), (2 * 24, D)
    return [torch.randn(size, dtype=BF16).requires_grad_() for size in sizes]


def test_the_activation_is_in_the_gemms(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("swiglu_forward", "swiglu_joined_backward"):
        monkeypatch.delattr(f"expertmesh.moe.kernels.grouped.{name}")
    monkeypatch.delattr(quack, "swiglu_forward")
    rows, *weights = joined_inputs(5)
    out = quack.quack_joined(rows, rows_of([2, 3]), *weights)
    assert package.called == FORWARD
    out.sum().backward()
    assert package.called == FORWARD + BACKWARD


@pytest.fixture
def as_on_gpu(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_mlp, "computes_on_cpu", lambda tensor: False)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", ""])
def test_a_layer_is_that_of_the_default_kernel(package: Any, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rounding, of a layer whose weights are joined in bf16. Gradients left for later have the same bits."""
    monkeypatch.setattr(expert_mlp.ExpertMLP, "_weighs", lambda self, rows_RD: gathers)
    found, expected = (Run(experts_of("plain", kernel), BF16).do("F1 B1") for kernel in ("quack", "torch-grouped"))
    assert package.called == FORWARD + BACKWARD
    # tokens by gate and up, gradients by w2, and both for their weights' gradients
    assert len(package.gathers) == 4 * gathers
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert relative_error(gradient, expected[name]) < 2**-7, name
    check_deferred(experts_of("plain", "quack"), BF16)


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_weighed", [False, True], ids=["", "weighed"])
def test_selective_checkpointing_keeps_gate_and_up(
    package: Any, is_kept: bool, is_weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are weighed nobody reads the results of a recomputation."""
    monkeypatch.setattr(expert_mlp.ExpertMLP, "_weighs", lambda self, rows_RD: is_weighed)
    contexts = partial(_selective_contexts, _ROUTING)
    found = []
    for run in (lambda layer, x: layer(x), partial(checkpoint, use_reentrant=False, context_fn=contexts)):
        layer = tiny_block("quack")
        layer.gate.to(BF16)
        watch_choices(layer)
        layer.experts.mlp.keeps_products = is_kept
        x_BSD = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0)).to(BF16).requires_grad_()
        package.called.clear()
        with Forward():
            out_BSD = run(layer, x_BSD)
        out_BSD.square().sum().backward()
        assert x_BSD.grad is not None
        found.append([x_BSD.grad, *(parameter.grad for parameter in layer.parameters())])
    again = ([] if is_kept else ["gemm_gated"]) + ([] if is_weighed else ["gemm"])
    assert package.called == FORWARD + again + BACKWARD
    for mine, plain in zip(*found, strict=True):
        # an activation of what was kept is one of rounded numbers, and so are the gradients that come of it
        assert relative_error(mine, plain) <= (2**-6 if is_kept and not is_weighed else 0)


def test_plans_of_row_counts_are_forgotten(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "MOST_PLANS", 3)
    product, weight = QUACK_ENTRY.code.product, torch.randn(1, 8, 8)
    assert product is not None
    kept = []
    for rows in range(1, 7):
        product(torch.randn(rows, 8), rows_of([rows]), weight)
        kept.append(len(package.plans))
    assert kept == [1, 2, 3, 4, 1, 2]
    assert package.forgotten == ["linear_act_mod", "dgated_mod"]


def test_as_many_rows_as_32_bits_count_are_refused() -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device="meta")

    experts, weight = rows_of([2**20], "meta"), empty(1024, 2048)
    for call in (
        lambda: quack.quack(empty(2**20, 2048), experts, weight, weight, weight),
        lambda: quack.quack_joined(empty(2**20, 1024), experts, empty(1, 2048, 1024), weight),
        lambda: quack.quack_product(empty(2**20, 16), experts, empty(1, 2048, 16)),
    ):
        with pytest.raises(ExpertMeshError, match=r"quack takes fewer than 2\^31 elements; 1048576 tokens"):
            call()


def needs(device: str = "cuda", dtype: torch.dtype = BF16, width: int = 24) -> KernelNeeds:
    return KernelNeeds(device, dtype, ((16, 24), (16, width)))


@pytest.mark.usefixtures("package")
def test_it_is_taken_where_it_is_asked_for(set_capability: SetCapability) -> None:
    for capability in ((10, 3), (9, 0)):
        set_capability(capability)
        choice = choose_kernel("quack", needs())
        assert (choice.name, choice.why) == ("quack", "asked for; no GPU has run it in our tests")
    beside_fp8 = choose_kernel("quack", KernelNeeds("cuda", BF16, ((32, 48),)), "fp8")
    assert beside_fp8.kernel.code.low_rank is QUACK_ENTRY.code.low_rank


def test_it_is_not_taken_otherwise(set_capability: SetCapability, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its package looked for."""
    monkeypatch.delattr(quack, "_check_package")
    monkeypatch.setattr(quack, "installed_version", lambda package: "0.6.5")
    set_capability((9, 0))
    choice = choose_kernel("auto", needs())
    assert (choice.name, choice.lost) == ("torch-grouped", "")


@pytest.mark.parametrize(
    ("wanted", "capability", "version", "said"),
    [
        (needs("cpu"), (9, 0), "0.6.5", "quack needs a GPU; this run is on cpu; use loop"),
        (needs(dtype=torch.float32), (9, 0), "0.6.5", r"in bf16; this run computes in torch\.float32; add --bf16"),
        (needs(width=20), (9, 0), "0.6.5", "multiples of 8; this model has 16 and 20; use loop"),
        (needs(), (8, 0), "0.6.5", r"9 \(Hopper\) or 10 \(Blackwell\); this one has 8\.0; use torch-grouped"),
        (needs(), (12, 0), "0.6.5", r"this one has 12\.0"),
        (needs(), (9, 0), "", r"needs quack-kernels 0\.6\.5, not installed here; run pip install 'quack-kernels>=0\.6"),
        (needs(), (9, 0), "0.6.4", r"needs quack-kernels 0\.6\.5, this is 0\.6\.4; run pip install"),
    ],
)  # fmt: skip
def test_refused(
    set_capability: SetCapability, package: Any, monkeypatch: pytest.MonkeyPatch, wanted: KernelNeeds,
    capability: tuple[int, int], version: str, said: str,
) -> None:  # fmt: skip
    set_capability(capability)
    monkeypatch.setattr(quack, "installed_version", lambda package: version)
    with pytest.raises(ExpertMeshError, match=said):
        choose_kernel("quack", wanted)


@pytest.mark.parametrize(
    ("module", "changed", "said"),
    [
        (quack.MODULE, None, "quack-kernels 0.6.5: cannot be imported: ModuleNotFoundError: .*; use torch-grouped"),
        (quack.MODULE, {"gemm": None}, r"gemm_interface\.gemm does not take what it is given"),
        (quack.MODULE, {"gemm_dgated": quack_stand_in.gemm}, "gemm_dgated does not take what it is given"),
        ("quack.gemm", {"_gemm_plan_cache": None}, r"quack\.gemm has no _gemm_plan_cache"),
    ],
)  # fmt: skip
def test_another_package_is_refused(
    set_capability: SetCapability, package: Any, monkeypatch: pytest.MonkeyPatch, module: str,
    changed: dict[str, Any] | None, said: str,
) -> None:  # fmt: skip
    set_capability((9, 0))
    known = {name: value for name, value in (vars(sys.modules[module]) | (changed or {})).items() if value is not None}
    monkeypatch.setitem(sys.modules, module, None if changed is None else SimpleNamespace(**known))
    with pytest.raises(ExpertMeshError, match=said):
        choose_kernel("quack", needs())
