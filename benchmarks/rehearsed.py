"""The planner's memory forecast beside the rehearsal of the whole step, at full size."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING

from sharding.planner.memory import peak
from training import TrainConfig
from training.rehearsal.planning import planned
from training.rehearsal.world import rehearse

MOST_ERROR = 0.03
"""What the forecast is held to, of the rehearsed peak."""

QWEN3 = dict(hidden_size=2048, num_hidden_layers=48, vocab_size=151936, num_experts_per_tok=8)
GPT_OSS = dict(
    hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
    num_experts_per_tok=4, vocab_size=201088,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral 8x7B": ("mixtral", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        num_local_experts=8, vocab_size=32000,
    )),
    "Mixtral 8x22B": ("mixtral", dict(
        hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
        num_local_experts=8, vocab_size=32768,
    )),
    "OLMoE 7B": ("olmoe", dict(
        hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
        num_experts=64, num_experts_per_tok=8, vocab_size=50304,
    )),
    "Qwen3 30B-A3B": ("qwen3_moe", QWEN3 | dict(
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
    )),
    "GPT-OSS 20B": ("gpt_oss", GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32)),
    "GPT-OSS 120B": ("gpt_oss", GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128)),
    "GLM-4.5-Air": ("glm4_moe", dict(
        hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=46,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, attention_bias=True, use_qk_norm=False,
        n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, vocab_size=151552,
    )),
    "DeepSeek-V3": ("deepseek_v3", dict(
        hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61,
        num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
        n_group=8, topk_group=4, first_k_dense_replace=3, vocab_size=129280,
    )),
    "MiniMax-M2": ("minimax_m2", dict(
        hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48, num_key_value_heads=8,
        head_dim=128, num_local_experts=256, num_experts_per_tok=8, vocab_size=200064,
    )),
    "Jamba 52B": ("jamba", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        num_experts=16, num_experts_per_tok=2, vocab_size=65536,
    )),
}  # fmt: skip
"""Family and sizes, as each model's published config.json has them."""


def model_config(name: str) -> Any:
    family, sizes = MODELS[name]
    return CONFIG_MAPPING[family](**sizes)


@dataclass(frozen=True)
class Case:
    """model: a key of MODELS. flags: of train_ep.py."""

    model: str
    world_size: int
    flags: dict[str, Any]

    @property
    def config(self) -> TrainConfig:
        settings: dict[str, Any] = dict(bf16=True, per_device_train_batch_size=1, max_seq_length=4096)
        return TrainConfig(model=self.model, dataset=["-"], **(settings | self.flags))


def cases() -> Iterator[Case]:
    selective, full = dict(gradient_checkpointing="selective"), dict(gradient_checkpointing="full")
    low, bits8 = dict(optim="adamw_bf16"), dict(optim="adamw_torch_8bit")
    lora: dict[str, Any] = dict(adapter="lora")
    for model, world_size, flags in (
        ("Mixtral 8x7B", 8, dict(ep_size=8, **selective, **bits8)),
        ("Mixtral 8x7B", 16, dict(ep_size=1, **full)),
        ("Mixtral 8x7B", 64, dict(ep_size=8, gradient_accumulation_steps=2)),
        ("Mixtral 8x7B", 1024, dict(ep_size=8, dense_shard="hybrid", **selective)),
        ("Mixtral 8x22B", 256, dict(ep_size=8, **selective)),
        ("OLMoE 7B", 8, dict(ep_size=8)),
        ("OLMoE 7B", 64, dict(ep_size=1, **selective)),
        ("Qwen3 30B-A3B", 8, dict(ep_size=8, reshard_after_forward=False, **selective, **bits8)),
        ("Qwen3 30B-A3B", 16, dict(ep_size=8, max_seq_length=16384, **full)),
        ("Qwen3 30B-A3B", 1, dict(**lora, base_dtype="nf4", **selective)),
        ("Qwen3 30B-A3B", 512, dict(ep_size=32, per_device_train_batch_size=2, **full)),
        ("GPT-OSS 20B", 8, dict(ep_size=8, **selective)),
        ("GPT-OSS 120B", 64, dict(ep_size=16, **selective, **low)),
        ("GLM-4.5-Air", 64, dict(ep_size=8, **full)),
        ("GLM-4.5-Air", 8, dict(ep_size=8, **selective, **lora)),
        ("DeepSeek-V3", 512, dict(ep_size=64, **full, **low)),
        ("DeepSeek-V3", 1024, dict(ep_size=32, **selective)),
        ("MiniMax-M2", 128, dict(ep_size=32, **selective)),
        ("Jamba 52B", 32, dict(ep_size=8, max_seq_length=1024, **full)),
        ("Mixtral 8x7B", 8, dict(ep_size=4, freeze=["embeddings", "router"], **selective, **low)),
    ):
        yield Case(model, world_size, flags)


def print_rehearsed() -> None:
    """A row a case, as soon as it is known."""
    print("Most bytes of tensors on rank 0, without what the allocator, the driver and NCCL take; GiB. Times in s.")
    print(f"{'model':<15}{'GPUs':>6}  {'setting':<66}{'rehearsed':>10}{'in':>5}{'planned':>9}{'in':>5}{'off':>8}")
    errors = []
    for case in cases():
        config, tokens = case.config, case.config.max_seq_length
        begun = time.perf_counter()
        run = planned(config, model_config(case.model), case.world_size, is_kept=False, trained=1 - 1 / tokens)
        forecast = peak(run).tensors
        between = time.perf_counter()
        rehearsed = rehearse(config, model_config(case.model), case.world_size).memory.peak
        ended = time.perf_counter()
        errors.append(forecast / rehearsed - 1)
        said = ", ".join(f"{name} {value}" for name, value in case.flags.items())
        said = said.replace("gradient_checkpointing ", "").replace("optim ", "").replace("_size", "")
        print(
            f"{case.model:<15}{case.world_size:>6}  {said:<66}{rehearsed / 2**30:>10.2f}{ended - between:>5.0f}"
            f"{forecast / 2**30:>9.2f}{between - begun:>5.0f}{errors[-1]:>+8.2%}",
            flush=True,
        )
    within = sum(abs(error) <= MOST_ERROR for error in errors)
    print(f"within {MOST_ERROR:.0%}: {within} of {len(errors)}; the worst {max(errors, key=abs):+.2%}\n")
