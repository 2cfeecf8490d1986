"""Another value than the default for each setting, and what must be beside it."""

from dataclasses import Field
from typing import Any, get_args

from expertmesh.training.config.train_config import TrainConfig

BESIDE: dict[str, dict[str, Any]] = {
    **{key: {"pp_size": 2} for key in ("pipeline_layers", "pipeline_chunks", "pipeline_schedule")},
    **{key: {"eval_ratio": 0.1} for key in ("early_stopping_patience", "load_best_model_at_end")},
    **{key: {"bf16": True} for key in ("expert_precision", "dense_precision")},
    **{key: {"adapter": "lora"} for key in ("init_adapter", "base_dtype", "offload_experts")},
    **{key: {"optim": "shampoo"} for key in ("shampoo_frequency", "shampoo_block_size", "shampoo_start")},
    "offload_activations": {"gradient_checkpointing": "full"},
    "elastic": {"resume": "auto"},
    "train_new_tokens": {"add_tokens": ["t"], "adapter": "lora"},
    "streaming": {"max_steps": 5},
    "train_vision": {"images": True},
    "metric_for_best_model": {"eval_generate": ["q"]},
}
"""Without which a setting is refused."""
VALUES: dict[str, Any] = {
    "rope_scaling": "yarn:2", "prompt_template": "{prompt}", "pipeline_layers": "1,1", "lr_scheduler_type": "cosine",
    "max_shard_size": "1GB", "expert_kernel": "loop", "dispatch": "rank", "profile": ["5"], "profile_ranks": ["1"],
    "allow_changed": ["data"], "debug_ranks": [1], "lr_scheduler_kwargs": "{}", "max_steps": 5, "shampoo_start": 2,
    "pipeline_chunks": 2, "adam_beta1": 0.5, "adam_beta2": 0.5, "router_warn_load": 3.0, "router_aux_loss_coef": 0.5,
    "global_batch_size": 64, "ranks_per_node": 2, "optim": "muon", "task": "dpo",
    "dataset_num_proc": 2, "save_total_limit": 2,
    "gradient_accumulation_steps": 2, "teacher_weight": 0.5, "template_date": "2026-01-02",
    "train_vision": ["tower"], "eval_score": "calls",
}  # fmt: skip
"""Of what does not take any text, number or switch."""


def other(setting: Field[Any], config: TrainConfig) -> Any:
    """Another value than the default."""
    if setting.name in VALUES:
        return VALUES[setting.name]
    value = getattr(config, setting.name)
    choices = [choice for each in get_args(setting.type) for choice in get_args(each) or [each]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.25
    if isinstance(value, list):
        return ["another"]
    return next((choice for choice in choices if choice not in (value, type(None))), "another")
