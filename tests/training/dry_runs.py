"""Runs of tiny models that tests dry-run."""

from typing import Any

from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.costs import Cluster
from expertmesh.training.planning.planner.hardware import preset

H100 = preset("H100", "infiniband-ndr")
CLUSTER = Cluster(H100, 8, H100.device.memory)


def flags_of(**flags: Any) -> TrainConfig:
    settings: dict[str, Any] = dict(bf16=True, per_device_train_batch_size=1, max_seq_length=256)
    return TrainConfig(model="-", dataset=["-"], **(settings | flags))


PIPELINE: dict[str, Any] = {"ep_size": 2, "pp_size": 2, "gradient_accumulation_steps": 4}
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mixtral": ("mixtral", 16, {"ep_size": 8, "gradient_checkpointing": "selective"}),
    "not checkpointed": ("mixtral", 8, {"ep_size": 4, "gradient_accumulation_steps": 3}),
    "kept casts": ("mixtral", 8, {"ep_size": 8, "reshard_after_forward": False}),
    "casts kept alone": (
        "mixtral",
        8,
        {"ep_size": 8, "keep_expert_copies": True, "gradient_checkpointing": "full", "gradient_accumulation_steps": 2},
    ),
    "hybrid": ("mixtral", 16, {"ep_size": 4, "dense_shard": "hybrid", "optim": "adamw_bf16"}),
    "alone": ("mixtral", 1, {}),
    "1,024 ranks": ("qwen3_moe", 1024, {"ep_size": 8, "gradient_checkpointing": "selective"}),
    "shared experts, dense first layers, MLA": ("deepseek_v3", 64, {"ep_size": 4, "gradient_checkpointing": "full"}),
    "biases, windows, sinks": ("gpt_oss", 16, {"ep_size": 8, "gradient_checkpointing": "selective"}),
    "DeltaNet": ("qwen3_next", 16, {"ep_size": 2}),
    "Mamba": ("jamba", 16, {"ep_size": 2, "gradient_checkpointing": "full", "max_seq_length": 32}),
    "grouped products in fp32": ("mixtral", 8, {"ep_size": 4, "bf16": False, "expert_kernel": "torch-grouped"}),
    "LoRA": ("mixtral", 8, {"ep_size": 4, "adapter": "lora"}),
    "LoRA beside nf4": ("qwen3_moe", 8, {"ep_size": 8, "adapter": "lora", "base_dtype": "nf4"}),
    "shared rows": ("qwen3_moe", 8, {"ep_size": 4, "cp_size": 2, "gradient_checkpointing": "selective"}),
    "heads and dense layers divided": (
        "qwen3_moe",
        8,
        {"ep_size": 4, "tp_size": 2, "gradient_checkpointing": "selective"},
    ),
    "divided in replicas": ("mixtral", 16, {"ep_size": 4, "tp_size": 2, "dense_shard": "hybrid"}),
    "divided, and shared rows": (
        "mixtral",
        8,
        {"ep_size": 8, "tp_size": 2, "cp_size": 2, "gradient_checkpointing": "full", "loss_parallel": False},
    ),
    "sinks in fp32, divided": ("hy_v4", 4, {"ep_size": 2, "tp_size": 2}),
    "inputs in host memory": (
        "mixtral",
        16,
        {"ep_size": 8, "gradient_checkpointing": "full", "offload_activations": True},
    ),
    "in host memory": ("mixtral", 4, {"ep_size": 2, "offload": True, "gradient_checkpointing": "full"}),
    "frozen experts in host memory": (
        "mixtral",
        8,
        {"ep_size": 4, "adapter": "lora", "offload_experts": True, "gradient_checkpointing": "full"},
    ),
    "frozen": ("glm4_moe", 16, {"ep_size": 4, "freeze": ["embeddings", "router"]}),
    "8-bit state": ("mixtral", 8, {"ep_size": 8, "optim": "adamw_torch_8bit"}),
    "products kept of two layers": (
        "mixtral",
        8,
        {"ep_size": 8, "keep_expert_products": 2, "gradient_checkpointing": "selective"},
    ),
    "rows in two parts, fp8": ("mixtral", 8, {"ep_size": 2, "overlap_chunks": 2, "expert_precision": "fp8"}),
    "packing": ("deepseek_v3", 8, {"ep_size": 4, "packing": True}),
    "preferences": ("mixtral", 8, {"ep_size": 4, "task": "dpo"}),
    "1f1b": ("mixtral", 8, PIPELINE),
    "interleaved": ("mixtral", 8, PIPELINE | {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}),
    "zero-bubble": ("mixtral", 8, PIPELINE | {"pipeline_schedule": "zero-bubble"}),
}
"""Family, ranks and settings of runs that between them have all that a step is made of."""
