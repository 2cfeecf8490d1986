"""What routers are found to do with their logits, held against transformers' own code of their families."""

import pytest

from expertmesh.moe.experts.model_layers import moe_layers
from expertmesh.moe.experts.router_stats import RouterKind
from expertmesh.moe.hf_model.build import build_model
from tests.families.configs import tiny_config

SCORES = {
    "mixtral": "softmax",
    "qwen3_moe": "softmax",
    "gpt_oss": "softmax",
    "deepseek_v2": "softmax",
    "deepseek_v3": "sigmoid",
    "glm4_moe": "sigmoid",
    "minimax_m2": "sigmoid",
    "gemma4_text": "given",
    "phimoe": None,
}


@pytest.mark.parametrize("family", SCORES)
def test_scores(family: str) -> None:
    assert {layer.kind.score for layer in moe_layers(build_model(tiny_config(family)))} == {SCORES[family]}


def test_a_router_by_a_table_has_no_scores_that_could_be_seen() -> None:
    kinds = [layer.kind.score for layer in moe_layers(build_model(tiny_config("deepseek_v4")))]
    assert kinds == [None, "sqrtsoftplus", "sqrtsoftplus"]


@pytest.mark.parametrize(("groups", "a_token", "found"), [(4, 1, 4), (1, 1, 1), (2, 2, 1)])
def test_groups(groups: int, a_token: int, found: int) -> None:
    settings = {"n_group": groups, "topk_group": a_token}
    layers = moe_layers(build_model(tiny_config("deepseek_v3", **settings)))
    assert {layer.kind.num_groups for layer in layers} == {found}
    # a config that speaks of groups which its router does not heed
    assert moe_layers(build_model(tiny_config("qwen3_moe", **settings)))[0].kind == RouterKind("softmax", 1)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("minimax_m2", "model.layers.0.mlp.e_score_correction_bias"),
        ("lfm2_moe", "model.layers.1.feed_forward.expert_bias"),
        ("mixtral", None),
        ("gpt_oss", None),  # its bias is trained
    ],
)
def test_correction_biases(family: str, name: str | None) -> None:
    assert moe_layers(build_model(tiny_config(family)))[0].correction_bias == name
