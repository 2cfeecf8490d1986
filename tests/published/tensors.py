"""Names and shapes of tensors of published checkpoints, as their safetensors files have them.

Each model is shortened to a few layers that hold one of every kind. A line is a name and a shape, and a dtype where it
is not BF16; or, behind what their names begin with and a colon, several of these. `{moe}` stands for the numbers of
layers of that kind, `{expert}` for those of all experts; a line that begins with "-" is of what is not trained. F8
stands for codes, in blocks of 128 x 128, with scales beside them.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """changes: of config.json, which make the model short. kinds: numbers of layers, by what lines call them."""

    changes: dict[str, Any]
    kinds: dict[str, tuple[int, ...]]
    lines: str


TENSORS = {
    "mixtral-8x7b": Published(
        {"num_hidden_layers": 2},
        {"all": (0, 1)},
        """
        model.embed_tokens.weight 32000 4096
        model.layers.{all}: input_layernorm.weight 4096, post_attention_layernorm.weight 4096
        model.layers.{all}.self_attn: q_proj.weight 4096 4096, k_proj.weight 1024 4096, v_proj.weight 1024 4096
        model.layers.{all}.self_attn: o_proj.weight 4096 4096
        model.layers.{all}.block_sparse_moe.gate.weight 8 4096
        model.layers.{all}.block_sparse_moe.experts.{expert}: w1.weight 14336 4096, w2.weight 4096 14336
        model.layers.{all}.block_sparse_moe.experts.{expert}: w3.weight 14336 4096
        model.norm.weight 4096
        lm_head.weight 32000 4096
        """,
    ),
    "olmoe-1b-7b": Published(
        {"num_hidden_layers": 1},
        {"all": (0,)},
        """
        model.embed_tokens.weight 50304 2048
        model.layers.{all}: input_layernorm.weight 2048, post_attention_layernorm.weight 2048
        model.layers.{all}.self_attn: q_proj.weight 2048 2048, k_proj.weight 2048 2048, v_proj.weight 2048 2048
        model.layers.{all}.self_attn: o_proj.weight 2048 2048, q_norm.weight 2048, k_norm.weight 2048
        model.layers.{all}.mlp.gate.weight 64 2048
        model.layers.{all}.mlp.experts.{expert}: gate_proj.weight 1024 2048, up_proj.weight 1024 2048
        model.layers.{all}.mlp.experts.{expert}: down_proj.weight 2048 1024
        model.norm.weight 2048
        lm_head.weight 50304 2048
        """,
    ),
    "qwen1.5-moe-a2.7b": Published(
        {"num_hidden_layers": 1},
        {"all": (0,)},
        """
        model.embed_tokens.weight 151936 2048
        model.layers.{all}: input_layernorm.weight 2048, post_attention_layernorm.weight 2048
        model.layers.{all}.self_attn: q_proj.weight 2048 2048, q_proj.bias 2048, k_proj.weight 2048 2048
        model.layers.{all}.self_attn: k_proj.bias 2048, v_proj.weight 2048 2048, v_proj.bias 2048
        model.layers.{all}.self_attn: o_proj.weight 2048 2048
        model.layers.{all}.mlp.gate.weight 60 2048
        model.layers.{all}.mlp.experts.{expert}: gate_proj.weight 1408 2048, up_proj.weight 1408 2048
        model.layers.{all}.mlp.experts.{expert}: down_proj.weight 2048 1408
        model.layers.{all}.mlp.shared_expert: gate_proj.weight 5632 2048, up_proj.weight 5632 2048
        model.layers.{all}.mlp.shared_expert: down_proj.weight 2048 5632
        model.layers.{all}.mlp.shared_expert_gate.weight 1 2048
        model.norm.weight 2048
        lm_head.weight 151936 2048
        """,
    ),
    "deepseek-v3": Published(
        {"num_hidden_layers": 4},
        {"dense": (0, 1, 2), "moe": (3,), "mtp": (4,)},
        """
        model.embed_tokens.weight 129280 7168
        model.layers.{dense,moe}: input_layernorm.weight 7168, post_attention_layernorm.weight 7168
        model.layers.{dense,moe}.self_attn: q_a_proj.weight 1536 7168 F8, q_a_layernorm.weight 1536
        model.layers.{dense,moe}.self_attn: q_b_proj.weight 24576 1536 F8, kv_a_proj_with_mqa.weight 576 7168 F8
        model.layers.{dense,moe}.self_attn: kv_a_layernorm.weight 512, kv_b_proj.weight 32768 512 F8
        model.layers.{dense,moe}.self_attn: o_proj.weight 7168 16384 F8
        model.layers.{dense}.mlp: gate_proj.weight 18432 7168 F8, up_proj.weight 18432 7168 F8
        model.layers.{dense}.mlp: down_proj.weight 7168 18432 F8
        model.layers.{moe}.mlp.gate.weight 256 7168
        model.layers.{moe}.mlp.gate.e_score_correction_bias 256 F32
        model.layers.{moe}.mlp.experts.{expert}: gate_proj.weight 2048 7168 F8, up_proj.weight 2048 7168 F8
        model.layers.{moe}.mlp.experts.{expert}: down_proj.weight 7168 2048 F8
        model.layers.{moe}.mlp.shared_experts: gate_proj.weight 2048 7168 F8, up_proj.weight 2048 7168 F8
        model.layers.{moe}.mlp.shared_experts: down_proj.weight 7168 2048 F8
        model.norm.weight 7168
        lm_head.weight 129280 7168
        - model.layers.{mtp}: embed_tokens.weight 129280 7168, enorm.weight 7168, hnorm.weight 7168
        - model.layers.{mtp}: eh_proj.weight 7168 14336, input_layernorm.weight 7168
        - model.layers.{mtp}.self_attn.o_proj.weight 7168 16384 F8
        - model.layers.{mtp}.mlp.gate.weight 256 7168
        - model.layers.{mtp}.mlp.gate.e_score_correction_bias 256 F32
        - model.layers.{mtp}.mlp.experts.{expert}.down_proj.weight 7168 2048 F8
        - model.layers.{mtp}.mlp.shared_experts.up_proj.weight 2048 7168 F8
        - model.layers.{mtp}.shared_head: norm.weight 7168, head.weight 129280 7168
        """,
    ),
    "glm-4.5-air": Published(
        {"num_hidden_layers": 2},
        {"dense": (0,), "moe": (1,), "mtp": (2,)},
        """
        model.embed_tokens.weight 151552 4096
        model.layers.{dense,moe}: input_layernorm.weight 4096, post_attention_layernorm.weight 4096
        model.layers.{dense,moe}.self_attn: q_proj.weight 12288 4096, q_proj.bias 12288, k_proj.weight 1024 4096
        model.layers.{dense,moe}.self_attn: k_proj.bias 1024, v_proj.weight 1024 4096, v_proj.bias 1024
        model.layers.{dense,moe}.self_attn: o_proj.weight 4096 12288
        model.layers.{dense}.mlp: gate_proj.weight 10944 4096, up_proj.weight 10944 4096, down_proj.weight 4096 10944
        model.layers.{moe}.mlp.gate.weight 128 4096
        model.layers.{moe}.mlp.gate.e_score_correction_bias 128 F32
        model.layers.{moe}.mlp.experts.{expert}: gate_proj.weight 1408 4096, up_proj.weight 1408 4096
        model.layers.{moe}.mlp.experts.{expert}: down_proj.weight 4096 1408
        model.layers.{moe}.mlp.shared_experts: gate_proj.weight 1408 4096, up_proj.weight 1408 4096
        model.layers.{moe}.mlp.shared_experts: down_proj.weight 4096 1408
        model.norm.weight 4096
        lm_head.weight 151552 4096
        - model.layers.{mtp}: embed_tokens.weight 151552 4096, enorm.weight 4096, hnorm.weight 4096
        - model.layers.{mtp}: eh_proj.weight 4096 8192
        - model.layers.{mtp}.self_attn.q_proj.bias 12288
        - model.layers.{mtp}.mlp.gate.e_score_correction_bias 128 F32
        - model.layers.{mtp}.mlp.experts.{expert}.gate_proj.weight 1408 4096
        - model.layers.{mtp}.shared_head: norm.weight 4096, head.weight 151552 4096
        """,
    ),
    "qwen3-next-80b": Published(
        {"num_hidden_layers": 4},
        {"linear": (0, 1, 2), "full": (3,)},
        """
        model.embed_tokens.weight 151936 2048
        model.layers.{linear,full}: input_layernorm.weight 2048, post_attention_layernorm.weight 2048
        model.layers.{linear}.linear_attn: A_log 32, conv1d.weight 8192 1 4, dt_bias 32, in_proj_ba.weight 64 2048
        model.layers.{linear}.linear_attn: in_proj_qkvz.weight 12288 2048, norm.weight 128, out_proj.weight 2048 4096
        model.layers.{full}.self_attn: q_proj.weight 8192 2048, k_proj.weight 512 2048, v_proj.weight 512 2048
        model.layers.{full}.self_attn: o_proj.weight 2048 4096, q_norm.weight 256, k_norm.weight 256
        model.layers.{linear,full}.mlp.gate.weight 512 2048
        model.layers.{linear,full}.mlp.experts.{expert}: gate_proj.weight 512 2048, up_proj.weight 512 2048
        model.layers.{linear,full}.mlp.experts.{expert}: down_proj.weight 2048 512
        model.layers.{linear,full}.mlp.shared_expert: gate_proj.weight 512 2048, up_proj.weight 512 2048
        model.layers.{linear,full}.mlp.shared_expert: down_proj.weight 2048 512
        model.layers.{linear,full}.mlp.shared_expert_gate.weight 1 2048
        model.norm.weight 2048
        lm_head.weight 151936 2048
        - mtp: fc.weight 2048 4096, pre_fc_norm_embedding.weight 2048, pre_fc_norm_hidden.weight 2048, norm.weight 2048
        - mtp.layers.0.input_layernorm.weight 2048
        - mtp.layers.0.self_attn.q_proj.weight 8192 2048
        - mtp.layers.0.mlp.gate.weight 512 2048
        - mtp.layers.0.mlp.experts.{expert}.gate_proj.weight 512 2048
        """,
    ),
    "qwen3.5-35b-a3b": Published(
        {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        {"linear": (0, 1, 2), "full": (3,), "vision": tuple(range(27))},
        """
        model.language_model.embed_tokens.weight 248320 2048
        model.language_model.layers.{linear,full}: input_layernorm.weight 2048, post_attention_layernorm.weight 2048
        model.language_model.layers.{linear}.linear_attn: A_log 32 F32, conv1d.weight 8192 1 4, dt_bias 32
        model.language_model.layers.{linear}.linear_attn: in_proj_a.weight 32 2048, in_proj_b.weight 32 2048
        model.language_model.layers.{linear}.linear_attn: in_proj_qkv.weight 8192 2048, in_proj_z.weight 4096 2048
        model.language_model.layers.{linear}.linear_attn: norm.weight 128 F32, out_proj.weight 2048 4096
        model.language_model.layers.{full}.self_attn: q_proj.weight 8192 2048, k_proj.weight 512 2048
        model.language_model.layers.{full}.self_attn: v_proj.weight 512 2048, o_proj.weight 2048 4096
        model.language_model.layers.{full}.self_attn: q_norm.weight 256, k_norm.weight 256
        model.language_model.layers.{linear,full}.mlp.gate.weight 256 2048
        model.language_model.layers.{linear,full}.mlp.experts: gate_up_proj 256 1024 2048, down_proj 256 2048 512
        model.language_model.layers.{linear,full}.mlp.shared_expert: gate_proj.weight 512 2048, up_proj.weight 512 2048
        model.language_model.layers.{linear,full}.mlp.shared_expert: down_proj.weight 2048 512
        model.language_model.layers.{linear,full}.mlp.shared_expert_gate.weight 1 2048
        model.language_model.norm.weight 2048
        lm_head.weight 248320 2048
        - model.visual.patch_embed: proj.weight 1152 3 2 16 16, proj.bias 1152
        - model.visual.pos_embed.weight 2304 1152
        - model.visual.blocks.{vision}: norm1.weight 1152, norm1.bias 1152
        - model.visual.blocks.{vision}.attn: qkv.weight 3456 1152, qkv.bias 3456, proj.weight 1152 1152
        - model.visual.blocks.{vision}.mlp: linear_fc1.weight 4304 1152, linear_fc2.weight 1152 4304
        - model.visual.merger: norm.weight 1152, linear_fc1.weight 4608 4608, linear_fc2.weight 2048 4608
        - mtp: fc.weight 2048 4096, pre_fc_norm_embedding.weight 2048, pre_fc_norm_hidden.weight 2048, norm.weight 2048
        - mtp.layers.0.self_attn.q_proj.weight 8192 2048
        """,
    ),
    "gpt-oss-20b": Published(
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {"all": (0, 1)},
        """
        model.embed_tokens.weight 201088 2880
        model.layers.{all}: input_layernorm.weight 2880, post_attention_layernorm.weight 2880
        model.layers.{all}.self_attn: q_proj.weight 4096 2880, q_proj.bias 4096, k_proj.weight 512 2880
        model.layers.{all}.self_attn: k_proj.bias 512, v_proj.weight 512 2880, v_proj.bias 512, o_proj.weight 2880 4096
        model.layers.{all}.self_attn: o_proj.bias 2880, sinks 64
        model.layers.{all}.mlp: router.weight 32 2880, router.bias 32
        model.layers.{all}.mlp.experts: gate_up_proj_blocks 32 5760 90 16 U8, gate_up_proj_scales 32 5760 90 U8
        model.layers.{all}.mlp.experts: gate_up_proj_bias 32 5760, down_proj_blocks 32 2880 90 16 U8
        model.layers.{all}.mlp.experts: down_proj_scales 32 2880 90 U8, down_proj_bias 32 2880
        model.norm.weight 2880
        lm_head.weight 201088 2880
        """,
    ),
    "gemma-4-26b-a4b": Published(
        {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
        {"sliding": tuple(range(5)), "full": (5,), "vision": tuple(range(27))},
        """
        model.language_model.embed_tokens.weight 262144 2816
        model.language_model.layers.{sliding,full}: input_layernorm.weight 2816, post_attention_layernorm.weight 2816
        model.language_model.layers.{sliding,full}: pre_feedforward_layernorm.weight 2816
        model.language_model.layers.{sliding,full}: pre_feedforward_layernorm_2.weight 2816
        model.language_model.layers.{sliding,full}: post_feedforward_layernorm.weight 2816
        model.language_model.layers.{sliding,full}: post_feedforward_layernorm_1.weight 2816
        model.language_model.layers.{sliding,full}: post_feedforward_layernorm_2.weight 2816, layer_scalar 1
        model.language_model.layers.{sliding}.self_attn: q_proj.weight 4096 2816, k_proj.weight 2048 2816
        model.language_model.layers.{sliding}.self_attn: v_proj.weight 2048 2816, o_proj.weight 2816 4096
        model.language_model.layers.{sliding}.self_attn: q_norm.weight 256, k_norm.weight 256
        model.language_model.layers.{full}.self_attn: q_proj.weight 8192 2816, k_proj.weight 1024 2816
        model.language_model.layers.{full}.self_attn: o_proj.weight 2816 8192, q_norm.weight 512, k_norm.weight 512
        model.language_model.layers.{sliding,full}.mlp: gate_proj.weight 2112 2816, up_proj.weight 2112 2816
        model.language_model.layers.{sliding,full}.mlp: down_proj.weight 2816 2112
        model.language_model.layers.{sliding,full}.router: proj.weight 128 2816, scale 2816, per_expert_scale 128
        model.language_model.layers.{sliding,full}.experts: gate_up_proj 128 1408 2816, down_proj 128 2816 704
        model.language_model.norm.weight 2816
        - model.embed_vision.embedding_projection.weight 2816 1152
        - model.vision_tower.patch_embedder: input_proj.weight 1152 768, position_embedding_table 2 10240 1152
        - model.vision_tower: std_bias 1152, std_scale 1152
        - model.vision_tower.encoder.layers.{vision}: input_layernorm.weight 1152, post_attention_layernorm.weight 1152
        - model.vision_tower.encoder.layers.{vision}: pre_feedforward_layernorm.weight 1152
        - model.vision_tower.encoder.layers.{vision}: post_feedforward_layernorm.weight 1152
        - model.vision_tower.encoder.layers.{vision}.self_attn.q_proj.linear.weight 1152 1152
        - model.vision_tower.encoder.layers.{vision}.self_attn.k_proj.linear.weight 1152 1152
        - model.vision_tower.encoder.layers.{vision}.self_attn.v_proj.linear.weight 1152 1152
        - model.vision_tower.encoder.layers.{vision}.self_attn.o_proj.linear.weight 1152 1152
        - model.vision_tower.encoder.layers.{vision}.self_attn: q_norm.weight 72, k_norm.weight 72
        - model.vision_tower.encoder.layers.{vision}.mlp.gate_proj.linear.weight 4304 1152
        - model.vision_tower.encoder.layers.{vision}.mlp.up_proj.linear.weight 4304 1152
        - model.vision_tower.encoder.layers.{vision}.mlp.down_proj.linear.weight 1152 4304
        """,
    ),
    "granite-4.0-h-tiny": Published(
        {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
        {"mamba": (0,), "attention": (1,)},
        """
        model.embed_tokens.weight 100352 1536
        model.layers.{mamba,attention}: input_layernorm.weight 1536, post_attention_layernorm.weight 1536
        model.layers.{mamba}.mamba: A_log 48, D 48, dt_bias 48, conv1d.weight 3328 1 4, conv1d.bias 3328
        model.layers.{mamba}.mamba: in_proj.weight 6448 1536, norm.weight 3072, out_proj.weight 1536 3072
        model.layers.{attention}.self_attn: q_proj.weight 1536 1536, k_proj.weight 512 1536, v_proj.weight 512 1536
        model.layers.{attention}.self_attn: o_proj.weight 1536 1536
        model.layers.{mamba,attention}.block_sparse_moe.router.layer.weight 64 1536
        model.layers.{mamba,attention}.block_sparse_moe: input_linear.weight 64 1024 1536
        model.layers.{mamba,attention}.block_sparse_moe: output_linear.weight 64 1536 512
        model.layers.{mamba,attention}.shared_mlp: input_linear.weight 2048 1536, output_linear.weight 1536 1024
        model.norm.weight 1536
        """,
    ),
    "jamba-v0.1": Published(
        {"num_hidden_layers": 6},
        {"dense": (0, 2, 4), "moe": (1, 3, 5), "mamba": (0, 1, 2, 3, 5), "attention": (4,)},
        """
        model.embed_tokens.weight 65536 4096
        model.layers.{dense,moe}: input_layernorm.weight 4096, pre_ff_layernorm.weight 4096
        model.layers.{mamba}.mamba: A_log 8192 16, D 8192, conv1d.weight 8192 1 4, conv1d.bias 8192
        model.layers.{mamba}.mamba: in_proj.weight 16384 4096, x_proj.weight 288 8192, dt_proj.weight 8192 256
        model.layers.{mamba}.mamba: dt_proj.bias 8192, out_proj.weight 4096 8192, dt_layernorm.weight 256
        model.layers.{mamba}.mamba: b_layernorm.weight 16, c_layernorm.weight 16
        model.layers.{attention}.self_attn: q_proj.weight 4096 4096, k_proj.weight 1024 4096, v_proj.weight 1024 4096
        model.layers.{attention}.self_attn: o_proj.weight 4096 4096
        model.layers.{dense}.feed_forward: gate_proj.weight 14336 4096, up_proj.weight 14336 4096
        model.layers.{dense}.feed_forward: down_proj.weight 4096 14336
        model.layers.{moe}.feed_forward.router.weight 16 4096
        model.layers.{moe}.feed_forward.experts.{expert}: gate_proj.weight 14336 4096, up_proj.weight 14336 4096
        model.layers.{moe}.feed_forward.experts.{expert}: down_proj.weight 4096 14336
        model.final_layernorm.weight 4096
        lm_head.weight 65536 4096
        """,
    ),
    "nemotron-3-nano": Published(
        {"num_hidden_layers": 3, "hybrid_override_pattern": "ME*"},
        {"mamba": (0,), "moe": (1,), "attention": (2,)},
        """
        backbone.embeddings.weight 131072 2688
        backbone.layers.{mamba,moe,attention}.norm.weight 2688
        backbone.layers.{mamba}.mixer: A_log 64, D 64, dt_bias 64, conv1d.weight 6144 1 4, conv1d.bias 6144
        backbone.layers.{mamba}.mixer: in_proj.weight 10304 2688, norm.weight 4096, out_proj.weight 2688 4096
        backbone.layers.{moe}.mixer.gate.weight 128 2688
        backbone.layers.{moe}.mixer.gate.e_score_correction_bias 128 F32
        backbone.layers.{moe}.mixer.experts.{expert}: up_proj.weight 1856 2688, down_proj.weight 2688 1856
        backbone.layers.{moe}.mixer.shared_experts: up_proj.weight 3712 2688, down_proj.weight 2688 3712
        backbone.layers.{attention}.mixer: q_proj.weight 4096 2688, k_proj.weight 256 2688, v_proj.weight 256 2688
        backbone.layers.{attention}.mixer: o_proj.weight 2688 4096
        backbone.norm_f.weight 2688
        lm_head.weight 131072 2688
        """,
    ),
    "hunyuan-a13b": Published(
        {"num_hidden_layers": 1},
        {"all": (0,)},
        """
        model.embed_tokens.weight 128167 4096
        model.layers.{all}: input_layernorm.weight 4096, post_attention_layernorm.weight 4096
        model.layers.{all}.self_attn: q_proj.weight 4096 4096, k_proj.weight 1024 4096, v_proj.weight 1024 4096
        model.layers.{all}.self_attn: o_proj.weight 4096 4096, query_layernorm.weight 128, key_layernorm.weight 128
        model.layers.{all}.mlp.gate.wg.weight 64 4096 F32
        model.layers.{all}.mlp.experts.{expert}: gate_proj.weight 3072 4096, up_proj.weight 3072 4096
        model.layers.{all}.mlp.experts.{expert}: down_proj.weight 4096 3072
        model.layers.{all}.mlp.shared_mlp: gate_proj.weight 3072 4096, up_proj.weight 3072 4096
        model.layers.{all}.mlp.shared_mlp: down_proj.weight 4096 3072
        model.norm.weight 4096
        """,
    ),
}
