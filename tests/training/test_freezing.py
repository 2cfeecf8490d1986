"""What --freeze names, in models of many families."""

import re

import pytest

from expertmesh.moe.hf_model.build import build_model, count_parameters
from expertmesh.moe.hf_model.counts import training_flops
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.model_setup.freezing import freeze, groups_of
from tests.families.configs import tiny_config

# of each group: parameters that must be in it, in the shape of patterns, and ones that must not
GROUPS = {
    "mixtral": {
        "experts": (r"experts\.mlp\.(w1|v1|w2)$", r"gate\.weight"),
        "router": (r"mlp\.gate\.weight$", r"experts"),
        "attention": (r"self_attn\.[qkvo]_proj\.weight$", r"layernorm|mlp"),
        "embeddings": (r"embed_tokens\.weight$", r"lm_head"),
        "norms": (r"(layer)?norm\.weight$", r"proj"),
    },
    "deepseek_v3": {
        "shared-experts": (r"mlp\.shared_experts\.(gate|up|down)_proj\.weight$", r"experts\.mlp\.w"),
        "attention": (r"self_attn\.(q_a|q_b|kv_b|o)_proj\.weight|self_attn\.kv_a_proj_with_mqa", r"post_attention"),
        "router": (r"mlp\.gate\.weight$", r"layers\.0\.|gate_proj"),
    },
    "qwen3_next": {
        "shared-experts": (r"shared_expert\.(gate|up|down)_proj|shared_expert_gate", r"mlp\.gate\."),
        "attention": (r"linear_attn\.(in_proj|out_proj|conv1d|A_log)|self_attn\.q_proj", r"mlp"),
    },
    "nemotron_h": {"attention": (r"mixer\.[qkvo]_proj", r"conv1d|experts|up_proj")},
    "granitemoehybrid": {"shared-experts": (r"shared_mlp\.(input|output)_linear", r"block_sparse_moe")},
    "gpt_oss": {"router": (r"mlp\.router\.(weight|bias)$", r"experts"), "attention": (r"self_attn\.sinks", r"norm")},
}


@pytest.mark.parametrize("family", GROUPS)
def test_groups(family: str) -> None:
    groups = groups_of(build_model(tiny_config(family)))
    for group, (within, without) in GROUPS[family].items():
        names = list(groups[group])
        for pattern in within.split("|") if "(" not in within else [within]:
            assert any(re.search(pattern, name) for name in names), (group, pattern)
        assert not any(re.search(without, name) for name in names), (group, names)


def test_every_matrix_of_these_is_in_a_group() -> None:
    """But for dense layers' and the head."""
    for family in ("mixtral", "qwen2_moe", "olmoe", "gpt_oss", "glm4_moe"):
        model = build_model(tiny_config(family))
        grouped = {name for names in groups_of(model).values() for name in names}
        others = {name for name, _ in model.named_parameters()} - grouped
        assert all(re.search(r"lm_head|layers\.\d+\.mlp\.(gate|up|down)_proj", name) for name in others), others


def test_share_is_told() -> None:
    model = build_model(tiny_config("mixtral"))
    counts = count_parameters(model)
    frozen = freeze(model, ["experts"])
    assert (frozen.frozen, frozen.total) == (counts.experts, counts.total)
    assert frozen.line().startswith("frozen: experts: ")
    assert f"({counts.experts / counts.total:.1%})" in frozen.line()


def test_flops_of_frozen_parameters() -> None:
    """One of three products less for each; the head's at targets only, the embedding's none."""
    config = tiny_config("mixtral")
    whole = training_flops(count_parameters(build_model(config)), config, 100, 40, [0])

    def saved(*entries: str) -> float:
        model = build_model(config)
        freeze(model, list(entries))
        return whole - training_flops(count_parameters(model), config, 100, 40, [0])

    counts = count_parameters(build_model(config))
    assert saved("experts") == pytest.approx(2 * 100 * counts.experts * 2 / 8)
    assert saved("lm_head") == pytest.approx(2 * 40 * counts.head)
    assert saved("embeddings") == 0
    assert saved(r"^model\.layers") == pytest.approx(2 * 100 * (counts.active - counts.head - counts.embedding - 32))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (["shared-experts"], "this model has none; it has experts, router, attention, embeddings, norms"),
        (["rooter"], "--freeze rooter: no parameter matches it; did you mean router"),
        (["q_prj"], "no parameter matches it"),
        (["layers.(0"], r"neither a group \(experts, .*\) nor a regular expression"),
        (["."], "--freeze . leaves nothing to train"),
        (["experts", "router", "attention", "embeddings", "norms", "lm_head"], "leaves nothing to train"),
    ],
)
def test_mistakes(entries: list[str], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        freeze(build_model(tiny_config("mixtral")), entries)
