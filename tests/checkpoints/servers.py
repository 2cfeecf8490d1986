"""What servers look for in a directory of Hugging Face form: names and shapes of tensors, for eight families.

Written down from vLLM (github.com/vllm-project/vllm, `vllm/model_executor/models/`) and llama.cpp
(github.com/ggml-org/llama.cpp, `gguf-py/gguf/tensor_mapping.py`, and the class of the family in `convert_hf_to_gguf.py`
or, newer, `conversion/`), as read in 2026:

- vLLM finds an expert's matrices by "experts.N." and three words: gate_proj, up_proj, down_proj, or, of Mixtral and
  MiniMax-M2, w1, w3, w2 (`make_expert_params_mapping` in each family's file). Attention's q, k and v come apart and are
  joined there ("qkv_proj"), as are gate and up of dense and shared ones ("gate_up_proj").
- llama.cpp knows a tensor by the name without ".weight" or ".bias"; experts' matrices are stacked by number, and all
  of them must be there.
- DeepSeek-V3 and GLM-4: `mlp.gate.e_score_correction_bias`; MiniMax-M2: `block_sparse_moe.e_score_correction_bias`.
- GPT-OSS, quantized: `gate_up_proj_blocks` is viewed as (E, 2F, H / 32 * 16), gate and up in alternate rows;
  `down_proj_blocks` (E, H, F / 32 * 16); scales without the last dim. llama.cpp reads a layer's blocks and, next, its
  scales (`repack_mxfp4`), in the order of the file. In bfloat16 both take (E, H, 2F) and (E, F, H), transposed.
- FP8: vLLM's `layers/quantization/fp8.py` and llama.cpp's `dequant_model` (config.json's quant_method "fp8") take
  NAME.weight_scale_inv beside NAME.weight, ceil(rows / block) x ceil(columns / block).

Letters of shapes: V vocabulary, H hidden, Q and K widths of queries and of keys, D of a head, F of an expert, I of a
dense layer, S of shared experts, E experts, N heads; A, B, C, P, R of DeepSeek's latent attention: ranks of queries and
of keys and values, those with positions, all queries, all keys with values; O the output's input.
"""

from collections.abc import Mapping
from typing import Any

COMMON = {
    "model.embed_tokens.weight": "VH",
    "model.norm.weight": "H",
    "lm_head.weight": "VH",
    "model.layers.*.input_layernorm.weight": "H",
    "model.layers.*.post_attention_layernorm.weight": "H",
}
ATTENTION = {
    "model.layers.*.self_attn.q_proj.weight": "QH",
    "model.layers.*.self_attn.k_proj.weight": "KH",
    "model.layers.*.self_attn.v_proj.weight": "KH",
    "model.layers.*.self_attn.o_proj.weight": "HQ",
}
BIASES = {f"model.layers.*.self_attn.{part}_proj.bias": width for part, width in zip("qkv", "QKK", strict=True)}
NORMS = {"model.layers.*.self_attn.q_norm.weight": "D", "model.layers.*.self_attn.k_norm.weight": "D"}
WIDE_NORMS = {"model.layers.*.self_attn.q_norm.weight": "Q", "model.layers.*.self_attn.k_norm.weight": "K"}
LATENT = {
    "model.layers.*.self_attn.q_a_proj.weight": "AH",
    "model.layers.*.self_attn.q_a_layernorm.weight": "A",
    "model.layers.*.self_attn.q_b_proj.weight": "PA",
    "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": "CH",
    "model.layers.*.self_attn.kv_a_layernorm.weight": "B",
    "model.layers.*.self_attn.kv_b_proj.weight": "RB",
    "model.layers.*.self_attn.o_proj.weight": "HO",
}


def mlp(path: str, width: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, str]:
    gate, up, down = (f"model.layers.*.{path}.{name}.weight" for name in names)
    return {gate: f"{width}H", up: f"{width}H", down: f"H{width}"}


ROUTER = {"model.layers.*.mlp.gate.weight": "EH"}
CORRECTION = {"model.layers.*.mlp.gate.e_score_correction_bias": "E"}
EXPERTS = mlp("mlp.experts.*", "F")
DENSE = mlp("mlp", "I")
SHARED = mlp("mlp.shared_experts", "S")
SPARSE = {
    "model.layers.*.block_sparse_moe.gate.weight": "EH",
    **mlp("block_sparse_moe.experts.*", "F", ("w1", "w3", "w2")),
}

# by family: the class that both register, and its tensors
FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "mixtral": ("MixtralForCausalLM", COMMON | ATTENTION | SPARSE),  # mixtral.py
    "qwen2_moe": (  # qwen2_moe.py
        "Qwen2MoeForCausalLM",
        COMMON
        | ATTENTION
        | BIASES
        | ROUTER
        | EXPERTS
        | DENSE
        | mlp("mlp.shared_expert", "S")
        | {"model.layers.*.mlp.shared_expert_gate.weight": "1H"},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", COMMON | ATTENTION | NORMS | ROUTER | EXPERTS | DENSE),  # qwen3_moe.py
    "deepseek_v3": (  # deepseek_v2.py
        "DeepseekV3ForCausalLM",
        COMMON | LATENT | ROUTER | CORRECTION | EXPERTS | DENSE | SHARED,
    ),
    "gpt_oss": (  # gpt_oss.py
        "GptOssForCausalLM",
        COMMON
        | ATTENTION
        | BIASES
        | {
            "model.layers.*.self_attn.o_proj.bias": "H",
            "model.layers.*.self_attn.sinks": "N",
            "model.layers.*.mlp.router.weight": "EH",
            "model.layers.*.mlp.router.bias": "E",
            "model.layers.*.mlp.experts.gate_up_proj": "EH2F",
            "model.layers.*.mlp.experts.gate_up_proj_bias": "E2F",
            "model.layers.*.mlp.experts.down_proj": "EFH",
            "model.layers.*.mlp.experts.down_proj_bias": "EH",
        },
    ),
    "glm4_moe": (  # glm4_moe.py
        "Glm4MoeForCausalLM",
        COMMON | ATTENTION | ROUTER | CORRECTION | EXPERTS | DENSE | SHARED,
    ),
    "olmoe": ("OlmoeForCausalLM", COMMON | ATTENTION | WIDE_NORMS | ROUTER | EXPERTS),  # olmoe.py
    "minimax_m2": (  # minimax_m2.py
        "MiniMaxM2ForCausalLM",
        COMMON | ATTENTION | WIDE_NORMS | SPARSE | {"model.layers.*.block_sparse_moe.e_score_correction_bias": "E"},
    ),
}

MXFP4: dict[str, dict[str, tuple[str | int, ...]]] = {
    "model.layers.*.mlp.experts.gate_up_proj": {"_blocks": ("E", "2F", "H/32", 16), "_scales": ("E", "2F", "H/32")},
    "model.layers.*.mlp.experts.down_proj": {"_blocks": ("E", "H", "F/32", 16), "_scales": ("E", "H", "F/32")},
}
"""What stands in the place of these tensors of GPT-OSS."""


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The letters, by the names that a config.json has."""

    def first(*names: str) -> int:
        return next((config[name] for name in names if config.get(name) is not None), 0)

    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head = first("head_dim") or hidden // heads
    expert = first("moe_intermediate_size", "intermediate_size")
    latent, turned, plain = first("kv_lora_rank"), first("qk_rope_head_dim"), first("qk_nope_head_dim")
    return {
        "V": config["vocab_size"], "H": hidden, "N": heads, "D": head, "F": expert, "I": config["intermediate_size"],
        "Q": heads * head, "K": config["num_key_value_heads"] * head,
        "E": first("num_experts", "num_local_experts", "n_routed_experts"),
        "S": first("shared_expert_intermediate_size") or expert * first("n_shared_experts"),
        "A": first("q_lora_rank"), "B": latent, "C": latent + turned, "P": heads * (plain + turned),
        "R": heads * (plain + first("v_head_dim")), "O": heads * first("v_head_dim"), "1": 1, "2F": 2 * expert,
        "H/32": hidden // 32, "F/32": expert // 32,
    }  # fmt: skip


def shape_of(letters: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Of letters, each a dim; of "2F" it is one."""
    return tuple(sizes["2F" if letter == "2" else letter] for letter in letters.replace("2F", "2"))
