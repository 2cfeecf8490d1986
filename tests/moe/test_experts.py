"""Experts of every kind against transformers' own: with a gate or none, biases, orders of rows, activations."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.moe.experts.activation import Activation
from expertmesh.moe.experts.layout import expert_modules, read_layout
from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.hf_model.build import build_model, dmoe_from, kernel_needs, use_kernel
from expertmesh.moe.kernels.kernel_entries import KERNELS
from expertmesh.moe.linear.low_rank import LowRank
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import skip_if_older
from tests.moe.test_kernels import CPU_KERNELS
from tests.rounding import OTHER_ORDER
from tests.tiny import our_experts, our_rows, relative_error, tiny_config

D, WIDTH, EXPERTS, TOP_K = 16, 24, 4, 2
SIZES: dict[str, Any] = dict(
    hidden_size=D, intermediate_size=WIDTH, num_local_experts=EXPERTS, _experts_implementation="eager"
)
CLAMP = {"swiglu_alpha": 1.702, "swiglu_limit": 0.5}
SWIGLU, BIASES = ["w1", "v1", "w2"], ["w1_bias", "v1_bias", "w2_bias"]


def of_family(family: str, name: str, **settings: Any) -> Any:
    """Experts by the settings that they read. Not every supported release of transformers has every family."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    experts = getattr(module, name)(SimpleNamespace(**SIZES, **settings))
    if not hasattr(experts, "has_gate"):
        skip_if_older(f"does not mark {name}")
    return experts


def mixtral(hidden_act: str = "silu") -> Any:
    return of_family("mixtral", "MixtralExperts", hidden_act=hidden_act)


KINDS: dict[str, tuple[Callable[[], Any], bool, list[str]]] = {
    # the experts, whether they are plain SwiGLU, and their parameters
    "plain": (mixtral, True, SWIGLU),
    "another activation": (partial(mixtral, "gelu"), False, SWIGLU),
    "transposed": (partial(of_family, "aria", "AriaExperts", moe_num_experts=EXPERTS), True, SWIGLU),
    "no gate": (
        partial(of_family, "nemotron_h", "NemotronHExperts", n_routed_experts=EXPERTS, moe_intermediate_size=WIDTH,
                moe_latent_size=None, mlp_hidden_act="relu2"),
        False, ["w1", "w2"],
    ),
    "clamped": (
        partial(of_family, "deepseek_v4", "DeepseekV4Experts", hidden_act="silu", swiglu_limit=0.5), False, SWIGLU,
    ),
    "biases, by turns, transposed, clamped": (
        partial(of_family, "gpt_oss", "GptOssExperts", **CLAMP), False, [*SWIGLU, *BIASES],
    ),
    "biases, transposed, clamped": (
        partial(of_family, "openai_privacy_filter", "OpenAIPrivacyFilterExperts", **CLAMP), False, [*SWIGLU, *BIASES],
    ),
}  # fmt: skip


def random(experts: Any) -> Any:
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return experts


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """11 tokens, of which none chose expert 2."""
    generator = torch.Generator().manual_seed(1)
    x_TD, weights_TK = torch.randn(11, D, generator=generator), torch.rand(11, TOP_K, generator=generator)
    first_T = torch.tensor([0, 1, 3])[torch.randint(0, 3, (11,), generator=generator)]
    second_T = torch.tensor([1, 3, 3, 0])[first_T]
    return x_TD.requires_grad_(), torch.stack([first_T, second_T], dim=1), weights_TK.requires_grad_()


def check(theirs: Any, kernel: str, tolerance: float = OTHER_ORDER) -> None:
    """Output, and the gradients of tokens, weights of choices and every parameter."""
    ours = our_experts(theirs, TOP_K, kernel)
    results = []
    for experts in (ours, theirs):
        x_TD, experts_TK, weights_TK = inputs()
        out_TD = experts(x_TD, experts_TK, weights_TK)
        grad_TD = torch.randn(11, D, generator=torch.Generator().manual_seed(2))
        results.append([out_TD.detach(), *torch.autograd.grad(
            out_TD, (x_TD, weights_TK, *experts.parameters()), grad_TD, allow_unused=True,
        )])  # fmt: skip
    for found, expected in zip(results[0][:3], results[1][:3], strict=True):
        assert relative_error(found, expected) < tolerance
    expected_grads = dict(zip(dict(theirs.named_parameters()), results[1][3:], strict=True))
    for part, found in zip(ours.mlp.layout.parameters, results[0][3:], strict=True):
        assert relative_error(found, our_rows(part, expected_grads[part.place.tensor])) < tolerance, part.name


def experts_of(kind: str, kernel: str = "loop") -> Any:
    """Our experts of a kind, random."""
    return our_experts(random(KINDS[kind][0]()), TOP_K, kernel)


def adapted(experts: Any, rank: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """Plain experts with random adapters."""
    experts.mlp.low_rank = LowRank(rank, 1.0, 0.0)
    for name, (into, out) in {"w1": (D, WIDTH), "v1": (D, WIDTH), "w2": (WIDTH, D)}.items():
        for matrix, size in (("A", (EXPERTS * rank, into)), ("B", (EXPERTS * out, rank))):
            parameter = torch.nn.Parameter(torch.randn(size).to(dtype))
            experts.mlp.register_parameter(f"{name}_lora_{matrix}", parameter)
    return experts


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, kernel: str) -> None:
    check(random(KINDS[kind][0]()), kernel)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_of_a_kind(kind: str) -> None:
    make, is_swiglu, names = KINDS[kind]
    theirs = make()
    ours = our_experts(theirs, TOP_K)
    assert ours.mlp.is_swiglu == is_swiglu
    assert [part.name for part in ours.mlp.layout.parameters] == names == list(dict(ours.mlp.named_parameters()))
    shape = ours.shape
    assert (shape.model_width, shape.expert_width, shape.num_experts, shape.top_k) == (D, WIDTH, EXPERTS, TOP_K)
    assert shape.has_gate == ("v1" in names)
    assert shape.has_bias == ("w1_bias" in names)
    for part in ours.mlp.layout.parameters:
        assert getattr(ours.mlp, part.name).shape == (EXPERTS * part.rows_an_expert, *part.row)
        assert part.row == (() if "bias" in part.name else (D,))
    assert ours.mlp.layout.tensors == {name: tuple(p.shape) for name, p in theirs.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_its_place(kind: str) -> None:
    """Each of the tensors that transformers has stands in our parameters whole, and once."""
    theirs, seen = KINDS[kind][0](), []
    total = sum(parameter.numel() for parameter in theirs.parameters())
    numbers = torch.arange(total).split([parameter.numel() for parameter in theirs.parameters()])
    tensors = {name: n.view(p.shape) for n, (name, p) in zip(numbers, theirs.named_parameters(), strict=True)}
    for part in read_layout(theirs, TOP_K, "here").parameters:
        seen.append(our_rows(part, tensors[part.place.tensor]).flatten())
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(total))


def test_a_gate_of_the_familys_own_sees_its_order_of_rows() -> None:
    gate_RF, up_RF = torch.randn(2, 5, 7)
    for kind, joined in (
        ("biases, by turns, transposed, clamped", torch.stack([gate_RF, up_RF], dim=-1).view(5, 14)),
        ("biases, transposed, clamped", torch.cat([gate_RF, up_RF], dim=1)),
    ):
        experts = KINDS[kind][0]()
        assert torch.equal(Activation(experts)(gate_RF, up_RF), experts._apply_gate(joined))


def test_norm_behind_each_expert() -> None:
    """It is no expert's own weight, and stays the module's."""
    sizes: dict[str, Any] = {"moe_hidden_size": D, "moe_intermediate_size": WIDTH}
    theirs = random(of_family("muse_spark", "MuseSparkExperts", **sizes, hidden_act="silu", post_norm_eps=1e-6))
    ours = our_experts(theirs, TOP_K)
    assert ours.post_expert_norm is not None
    x_TD, experts_TK, weights_TK = inputs()
    found, expected = ours(x_TD, experts_TK, weights_TK), theirs(x_TD, experts_TK, weights_TK)
    assert relative_error(found.detach(), expected.detach()) < OTHER_ORDER
    grads = [torch.autograd.grad(out.square().sum(), (x_TD, weights_TK)) for out in (found, expected)]
    for mine, other in zip(*grads, strict=True):
        assert relative_error(mine, other) < OTHER_ORDER


def test_experts_of_an_unknown_kind_are_refused() -> None:
    experts = mixtral()
    experts.scales = torch.nn.Parameter(torch.ones(EXPERTS))
    with pytest.raises(
        ExpertMeshError, match="here: its experts have the tensors down_proj, gate_up_proj, scales, expected down_proj"
    ):
        dmoe_from(experts, TOP_K, "here")


def test_the_module_gives_up_its_parameters() -> None:
    experts = deepcopy(mixtral())
    ours = dmoe_from(experts, TOP_K, "here")
    assert not list(experts.parameters())
    assert len(list(ours.parameters())) == 3


def test_only_marked_modules_are_experts() -> None:
    block = torch.nn.ModuleDict({"experts": mixtral(), "shared": torch.nn.Linear(2, 2)})
    assert [path for path, _ in expert_modules(block)] == ["experts"]


def test_needs_of_a_model() -> None:
    model = build_model(tiny_config())
    needs = kernel_needs(model, "cpu", torch.bfloat16)
    assert (needs.device_type, needs.dtype, needs.widths, needs.is_swiglu) == ("cpu", torch.bfloat16, ((32, 48),), True)
    assert not kernel_needs(build_model(tiny_config(hidden_act="gelu")), "cpu", torch.float32).is_swiglu
    use_kernel(model, KERNELS.get("torch-grouped"))
    assert {layer.mlp.kernel.name for layer in moe_layers(model)} == {"torch-grouped"}
