"""Linear layers whose weight is held transposed: which they are, and that they compute what transformers' do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from expertmesh.moe.experts.model_facts import facts_of
from expertmesh.moe.hf_model import build
from expertmesh.moe.hf_model.build import build_model
from expertmesh.moe.hf_model.tensor_plan import regions_of
from expertmesh.moe.linear.linear import Linear, is_transposed, use_fp8
from expertmesh.moe.linear.quantized import Storage, quantize, stored_linear
from expertmesh.sharding.state import state_of
from tests.families.configs import is_older, tiny_config
from tests.tiny import relative_error

O_PROJ, Q_PROJ = "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.q_proj"

OF_PARTS = pytest.param("aria", marks=pytest.mark.skipif(is_older(), reason="its experts are not marked there"))


def transposed(model: Any) -> set[str]:
    return {name for name, part in state_of(model).items() if part.transposed}


@pytest.mark.parametrize(
    ("dtype", "bias", "frozen", "tolerance"),
    [
        (torch.float32, False, "", 1e-6),
        (torch.float32, False, "weight", 1e-6),
        (torch.float32, False, "input", 1e-6),
        (torch.bfloat16, True, "", 5e-3),
    ],
    ids=str,
)
def test_computes_what_a_linear_layer_does(dtype: torch.dtype, bias: bool, frozen: str, tolerance: float) -> None:
    torch.manual_seed(0)
    plain, ours = (nn.Linear(160, 128, bias=bias, dtype=dtype) for _ in range(2))
    transpose(ours)
    ours.weight, ours.bias = nn.Parameter(plain.weight.detach().t().contiguous()), plain.bias
    x, grad = torch.randn(3, 70, 160).to(dtype).requires_grad_(frozen != "input"), torch.randn(3, 70, 128).to(dtype)
    found: list[list[torch.Tensor]] = []
    for layer in (plain, ours):
        layer.weight.requires_grad_(frozen != "weight")
        out = layer(x)
        grads = torch.autograd.grad(out, [each for each in (layer.weight, x) if each.requires_grad], grad)
        found.append([out.detach(), *grads])
    if frozen != "weight":
        found[1][1] = found[1][1].t()
    for mine, expected in zip(found[1], found[0], strict=True):
        assert relative_error(mine, expected) < tolerance


def transpose(layer: Any) -> None:
    layer.__class__, layer.is_transposed = Linear, True
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())


def clamping(kind: str) -> Any:
    """A linear layer of a model in each of its forms, of 64 inputs and 48 outputs."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(64, 48, bias=False)
    if kind == "rowwise":
        transpose(layer)
    elif kind == "fp8 matmuls":
        use_fp8(layer.bfloat16())
    else:
        storage = Storage(kind, 64)  # type: ignore[arg-type]
        codes, scales = quantize(layer.weight.detach(), storage)
        return lambda x: stored_linear(x, codes, scales, storage)
    return layer


@pytest.mark.parametrize("kind", ["rowwise", "fp8 matmuls", "fp8", "nf4"])
def test_results_may_be_changed_in_place(kind: str) -> None:
    """As models clamp queries, keys and values."""
    layer = clamping(kind)
    dtype = torch.bfloat16 if kind == "fp8 matmuls" else torch.float32
    given = torch.randn(3, 211, 64).to(dtype)
    found = []
    for in_place in (False, True):
        x = given.clone().requires_grad_()
        out = layer(x)
        out = out.clamp_(-0.25, 0.25) if in_place else out.clamp(-0.25, 0.25)
        out.square().sum().backward()
        assert x.grad is not None
        found.append((out.detach(), x.grad))
    (out, grad), (our_out, our_grad) = found
    assert torch.equal(our_out, out)
    assert torch.equal(our_grad, grad)
    assert out.abs().max() == 0.25


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", OF_PARTS])
def test_those_of_the_plans_regions(family: str) -> None:
    """They are (in, out), under the names that they have in transformers."""
    model = build_model(tiny_config(family), "eager")
    rowwise = [path for region in regions_of(model) for path in region.rowwise]
    assert any(path.endswith("o_proj") for path in rowwise)
    assert transposed(model) == {f"{path}.weight" for path in rowwise}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            widths = (module.out_features, module.in_features)
            assert module.weight.shape == (widths[::-1] if path in rowwise else widths), path


def test_none_without_a_plan() -> None:
    assert transposed(build_model(tiny_config("gpt_oss"), "eager")) == set()


@pytest.mark.parametrize("family", ["mixtral", OF_PARTS])
def test_a_config_brings_no_plan(family: str) -> None:
    """The class's holds, whatever a config.json said: of a model, or of its text part."""
    config = tiny_config(family)
    expected = transposed(build_model(config, "eager"))
    plans: list[Any] = [{}, 3, {"layers.*.self_attn.q_proj": ["x"]}, {"layers.*.self_attn.q_proj": "rowwise"}]
    text: Any = config.get_text_config()
    for plan in plans:
        text.base_model_tp_plan = plan
        assert transposed(build_model(config, "eager")) == expected


@pytest.mark.parametrize("read", [O_PROJ, Q_PROJ])
def test_not_where_other_code_reads_a_weight(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of which a weight is read elsewhere is none: all of its layers lie as transformers has them."""
    facts = replace(facts_of(build_model(tiny_config("mixtral"))), read_weights=frozenset({read}))
    monkeypatch.setattr(build, "recall", lambda key: facts)
    model = build_model(tiny_config("mixtral"), "eager")
    assert not any(region.path == "model.layers.0.self_attn" for region in regions_of(model))
    assert transposed(model) == {
        f"{O_PROJ.replace('0', str(layer))}.weight" for layer in range(1, model.config.num_hidden_layers)
    }
    assert not is_transposed(model.get_submodule(O_PROJ))


@pytest.mark.parametrize(
    ("changes", "is_divided"),
    [
        ({"q_proj": "packed_colwise"}, False),
        ({"o_proj": "packed_rowwise"}, False),
        # as of a norm over the full width, and of what is cut in full: q is wider here than what o_proj takes
        ({"q_proj": "colwise_gather_output"}, True),
        ({"q_proj": "colwise_gather_output", "width": 128}, False),
        # a family's own code cuts each head's part, as of queries with their gates
        ({"q_proj": "colwise", "width": 128}, True),
    ],
    ids=str,
)
def test_not_where_matrices_lie_side_by_side(
    changes: dict[str, Any], is_divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous rows would be of gate alone, or of up."""
    model = build_model(tiny_config("mixtral"), "eager")
    width = changes.pop("width", 64)
    for path, module in model.named_modules():
        if path.endswith("q_proj"):
            module.out_features = width
    plan: dict[str, str] = {f"layers.*.self_attn.{name}": style for name, style in changes.items()}
    text = model.config.get_text_config()
    monkeypatch.setattr(type(text), "base_model_tp_plan", text.base_model_tp_plan | plan)
    found = [region.path for region in regions_of(model) if region.path.endswith("self_attn")]
    assert len(found) == (model.config.num_hidden_layers if is_divided else 0)
