"""The numbers of a config.json: those of real models are taken, and each impossible one is refused by name."""

from typing import Any

import pytest

from expertmesh.moe.hf_model.config import check_config
from expertmesh.moe.hf_model.families import causal_families
from expertmesh.moe.util.errors import ExpertMeshError
from tests.families.configs import tiny_config
from tests.tiny import tiny_config as tiny_mixtral_config

MIXTRAL: dict[str, Any] = tiny_mixtral_config().to_dict()


def test_model_type() -> None:
    assert check_config(MIXTRAL, "here") == "mixtral"
    for wrong in (None, 3, "", ["mixtral"], "a/b", "x" * 101, "../mixtral"):
        with pytest.raises(ExpertMeshError, match=r"here: model_type is .*; it must be the name of a family of models"):
            check_config({**MIXTRAL, "model_type": wrong}, "here")
    with pytest.raises(ExpertMeshError, match="here: model_type is None"):
        check_config({}, "here")


def test_every_family_has_numbers_within_bounds() -> None:
    """Also its default config, which is that of a real model."""
    for family in causal_families():
        config = tiny_config(family)
        for each in (config, type(config)()):
            assert check_config(each.to_dict(), "here") == config.model_type


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_hidden_layers", 0, "from 1 to 1,024"),
        ("num_hidden_layers", 1025, "from 1 to 1,024"),
        ("n_layer", 10**9, "from 1 to 1,024"),
        ("first_k_dense_layers", -2, "from -1 to 1,024"),
        ("num_local_experts", -1, "from 0 to 4,096"),
        ("n_routed_experts", 4097, "from 0 to 4,096"),
        ("num_experts", -8, "from 0 to 4,096"),
        ("n_shared_experts", -1, "from 0 to 4,096"),
        ("num_experts_per_tok", -1, "from 0 to 4,096"),
        ("moe_topk", 5000, "from 0 to 4,096"),
        ("n_group", -1, "from 0 to 4,096"),
        ("num_attention_heads", 0, "from 1 to 4,096"),
        ("num_key_value_heads", 5000, "from 1 to 4,096"),
        ("index_n_heads", -1, "from 0 to 4,096"),
        ("vocab_size", 0, "from 1 to 16,777,216"),
        ("hidden_size", -32, "from 1 to 1,048,576"),
        ("d_model", 0, "from 1 to 1,048,576"),
        ("moe_intermediate_size", 2**40, "from -1 to 1,048,576"),
        ("head_dim", -16, "from -1 to 1,048,576"),
        ("q_lora_rank", -2, "from -1 to 1,048,576"),
        ("max_position_embeddings", 0, "from 1 to 2,147,483,648"),
        ("attention_dropout", 1.5, "a number from 0 to 1"),
        ("attention_dropout", float("nan"), "a number from 0 to 1"),
        ("router_jitter_noise", -0.1, "a number from 0 to 1"),
        ("rms_norm_eps", -1e-6, "a number from 0 to 1"),
        ("router_aux_loss_coef", 1e9, "a number from 0 to 1e"),
        ("rope_theta", float("nan"), "that is more than any model has"),
        ("routed_scaling_factor", 1e308, "that is more than any model has"),
        ("routed_scaling_factor", -1e39, "that is more than any model has"),
        ("time_step_limit", float("nan"), "that is more than any model has"),
        ("eos_token_id", 2**41, "that is more than any model has"),
        ("anything", 10**400, "that is more than any model has"),
    ],
)
def test_impossible_numbers(name: str, value: Any, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=f"^here: {name} is .*{said}"):
        check_config({**MIXTRAL, name: value}, "here")


def test_a_huge_number_is_told_in_short() -> None:
    with pytest.raises(ExpertMeshError, match=r"^here: hidden_size is 10\^400; it must be an integer"):
        check_config({**MIXTRAL, "hidden_size": 10**400}, "here")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"text_config": {"hidden_size": 0}}, r"text_config\.hidden_size"),
        ({"text_config": {"deeper": {"num_hidden_layers": -1}}}, r"text_config\.deeper\.num_hidden_layers"),
        ({"hidden_size": [32, 0]}, r"hidden_size\[1\]"),
        ({"layers": [{"head_dim": 16}, {"head_dim": -16}]}, r"layers\[1\]\.head_dim"),
        ({"head_dim": [[4], [-2]]}, r"head_dim\[1\]\[0\]"),
    ],
)
def test_numbers_in_lists_and_tables(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ExpertMeshError, match=f"^here: {path} is "):
        check_config({**MIXTRAL, **changes}, "here")


@pytest.mark.parametrize("value", [None, 0, 1.0, 7, -1, 1e37, float("inf"), "text", [], {"a": [1.5, "b", None]}])
def test_what_is_not_counted_may_be_anything_finite_or_infinite(value: Any) -> None:
    assert check_config({**MIXTRAL, "some_setting": value, "head_dim": None}, "here") == "mixtral"


@pytest.mark.parametrize(
    "setting",
    [
        {"rope_scaling": {"type": "yarn", "mscale_all_dim": 0.707}},  # DeepSeek-V2
        {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}},  # DeepSeek-V3
        {"time_step_limit": [0.0, 1e308]},  # Nemotron 3
        {"sliding_window_size": -1},
        {"ngram_vocab_size": None},
    ],
)
def test_a_name_alone_makes_no_count(setting: dict[str, Any]) -> None:
    assert check_config({**MIXTRAL, **setting}, "here") == "mixtral"


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_tokens(window: int) -> None:
    """But where no layer has windows: transformers itself writes 0 there."""
    for config, path in (
        ({**MIXTRAL, "sliding_window": window}, "sliding_window"),
        ({"model_type": "x", "text_config": {"sliding_window": window}}, "text_config.sliding_window"),
        ({**MIXTRAL, "sliding_window": window, "layer_types": ["sliding_attention"]}, "sliding_window"),
    ):
        with pytest.raises(ExpertMeshError, match=f"here: {path} is {window}; it must be 1 or more tokens"):
            check_config(config, "here")
    for changes in ({"use_sliding_window": False}, {"layer_types": ["full_attention"]}):
        assert check_config({**MIXTRAL, "sliding_window": window, **changes}, "here") == "mixtral"


def test_experts_of_all_layers_together() -> None:
    assert check_config({**MIXTRAL, "num_local_experts": 512, "num_hidden_layers": 256}, "here") == "mixtral"
    with pytest.raises(ExpertMeshError, match="here: 4096 experts in each of 1000 layers exceed 131,072"):
        check_config({**MIXTRAL, "num_local_experts": 4096, "num_hidden_layers": 1000}, "here")
