"""config.json of published models as it stands on the hub: taken, and made into the model that was published."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.model_layers import decoder_layers, moe_layers, moe_shape
from expertmesh.moe.experts.router_stats import UNKNOWN, RouterKind
from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import is_older
from tests.published.models import CONFIGS, MODELS, REFUSED, Figure, Part


def parameters_of(model: Any, part: Part) -> int:
    if part == "embedding":
        return int(model.get_input_embeddings().weight.numel())
    return int(model.get_output_embeddings().weight.numel())


def of_prediction_layers(model: Any) -> int:
    """Layers for multi-token prediction: a decoder layer, norms of both that it is given, and a projection of them."""
    text = model.config.get_text_config()
    layer = sum(p.numel() for p in decoder_layers(model)[-1].parameters())
    width: int = text.hidden_size
    return int(text.num_nextn_predict_layers * (layer + 2 * width + 2 * width**2))


def as_published(parameters: int, model: Any, figure: Figure) -> bool:
    """Whether so many parameters are written so, rounded or cut off."""
    parameters -= sum(parameters_of(model, part) for part in figure.without)
    parameters += of_prediction_layers(model) if figure.with_mtp else 0
    written = Decimal(figure.billions)
    unit = Decimal(1).scaleb(int(written.as_tuple().exponent))
    return written - unit / 2 <= Decimal(parameters) / 10**9 < written + unit


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", MODELS)
def test_a_published_config_makes_the_published_model(name: str) -> None:
    model, published = open_source(CONFIGS / name).build(), MODELS[name]
    counts, shape = count_parameters(model), moe_shape(model)
    assert as_published(counts.total, model, published.total), counts.total
    assert as_published(counts.active, model, published.active), counts.active
    assert (shape.top_k, shape.num_experts) == (published.top_k, published.num_experts)
    by_score = {RouterKind(published.score, published.num_groups)}
    found = {layer.kind for layer in moe_layers(model)}
    if is_older():  # some of its routers are linear layers, and other modules make weights of their logits
        found = found - {UNKNOWN} or by_score
    assert found == (by_score | {UNKNOWN} if published.has_table and not is_older() else by_score)


@pytest.mark.release
def test_what_transformers_has_under_another_type_says_so(tmp_path: Path) -> None:
    """Kimi-K2: what the message advises makes the model of its card, 1 trillion parameters and 32 billion active."""
    source = open_source(CONFIGS / "kimi-k2")
    with pytest.raises(ExpertMeshError) as raised:
        source.build()
    (said,) = str(raised.value).splitlines()
    assert "kimi-k2/config.json: transformers" in said
    assert "has no models of type kimi_k2" in said
    assert said.endswith("""write "model_type": "deepseek_v3" in a copy of this config.json""")
    raw = json.loads((CONFIGS / "kimi-k2/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "deepseek_v3"}))
    model = open_source(tmp_path).build()
    counts, shape = count_parameters(model), moe_shape(model)
    assert as_published(counts.total, model, Figure("1.0E+3"))
    assert as_published(counts.active, model, Figure("32"))
    assert (shape.top_k, shape.num_experts) == (8, 384)
    assert {layer.kind for layer in moe_layers(model)} == {RouterKind("sigmoid")}


def test_experts_that_transformers_does_not_mark_are_no_missing_experts() -> None:
    with pytest.raises(ExpertMeshError) as raised:
        open_source(CONFIGS / "llama-4-scout").build()
    (said,) = str(raised.value).splitlines()
    assert "llama-4-scout/config.json: Llama4ForCausalLM has mixture-of-experts layers, but transformers" in said
    assert "Llama4TextExperts at model.layers.0.feed_forward.experts" in said
    assert "`python -m expertmesh.moe families`" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"model_type": "nothing", "architectures": None}, "has no models of type nothing; a later release"),
        ({"model_type": "nothing", "auto_map": {}}, r"a model's own code \(auto_map\) is never run"),
        ({"hidden_size": 4096.0}, "'hidden_size' expected int, got float"),
        ({"num_local_experts": 2.5}, "'num_local_experts' expected int, got float"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' expected int, got bool"),
        ({"vocab_size": "32000"}, "'vocab_size' expected int, got str"),
        ({"vocab_size": None}, "'vocab_size' expected int, got NoneType"),
    ],
)
def test_types_are_those_that_the_config_class_declares(setting: dict[str, Any], said: str, tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "mixtral-8x7b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["OwnForCausalLM"], **setting}))
    with pytest.raises(ExpertMeshError, match=said) as raised:
        _ = open_source(tmp_path).config
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(raised.value)


def test_each_config_has_figures() -> None:
    assert sorted([*MODELS, *REFUSED]) == sorted(path.name for path in CONFIGS.iterdir())
