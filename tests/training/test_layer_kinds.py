"""Which layers are of one kind is found in the model itself."""

from typing import Any

import pytest
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3NextConfig

from expertmesh.moe.hf_model.build import build_model
from expertmesh.training.planning.rehearsal.layer_kinds import kinds_of_layers

SIZES: dict[str, Any] = dict(
    vocab_size=100, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2
)


def uniform() -> Any:
    return MixtralConfig(**SIZES, intermediate_size=64, num_hidden_layers=7, num_local_experts=8)


def dense_first() -> Any:
    return DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=8,
        first_k_dense_replace=2,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


def alternating() -> Any:
    return GptOssConfig(
        **SIZES, intermediate_size=64, num_hidden_layers=8, head_dim=16, num_local_experts=8, sliding_window=16
    )


def hybrid() -> Any:
    return Qwen3NextConfig(
        **SIZES,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=8,
        layer_types=["linear_attention", "full_attention"] * 4,
        head_dim=16,
        num_experts=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )


@pytest.mark.slow
def test_kinds_are_found_in_the_model_itself() -> None:
    assert kinds_of_layers(build_model(uniform(), "sdpa")) == [0] * 7
    assert kinds_of_layers(build_model(dense_first(), "sdpa")) == [0] * 2 + [1] * 6
    assert kinds_of_layers(build_model(alternating(), "eager")) == [0, 1] * 4
    assert kinds_of_layers(build_model(hybrid(), "sdpa")) == [0, 1] * 4


def test_layers_that_gradients_do_not_go_through_are_of_another_kind() -> None:
    model = build_model(uniform(), "sdpa")
    model.get_input_embeddings().weight.requires_grad_(False)
    assert kinds_of_layers(model) == [0] + [1] * 6
