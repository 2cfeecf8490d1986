"""A run's flags as the planner sees them."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ...config.train_config import TrainConfig
from ..imbalance import imbalance_of
from ..planner.setting import Setting
from ..planner.step_order import PlannedRun, planned_run
from .cached import CachedMeasure


def setting_of(
    config: TrainConfig, world_size: int, device: Literal["cuda", "cpu"] = "cuda", **changes: Any
) -> Setting:
    """The setting of a `train_ep.py` run with these flags on so many ranks.

    Args:
        changes: of the setting, what no flag says.
    """
    setting = Setting(
        world_size,
        config.ep_size,
        config.dense_shard,
        micro_batch=config.per_device_train_batch_size * config.sequences_per_row,
        seq_length=config.max_seq_length,
        accumulation=config.micro_batches(world_size),
        checkpointing=config.gradient_checkpointing,
        bf16=config.bf16,
        tf32=config.tf32,
        optimizer=config.optim,
        reshard_after_forward=config.reshard_after_forward,
        overlap_chunks=config.overlap_chunks,
        cp_size=config.cp_size,
        tp_size=config.tp_size,
        keep_expert_products=config.keep_expert_products,
        # host memory is the device's own on a CPU
        offload=config.offload and device == "cuda",
        offload_activations=config.offload_activations and device == "cuda",
        offload_experts=config.offload_experts,
        device=device,
        pp_size=config.pp_size,
        chunks=config.pipeline_chunks,
        schedule=config.schedule_name,
        stage_layers=None if config.layers_of_stages is None else tuple(config.layers_of_stages),
        dispatch=config.dispatch,
        ranks_per_node=config.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", Setting.ranks_per_node)),
        sums_in_fp32=config.dispatch_sums == "float32",
        keep_expert_copies=config.keep_expert_copies,
    )
    return replace(setting, **changes)


def config_of(setting: Setting, config: TrainConfig) -> TrainConfig:
    """The run that has this setting, with all else as `config` has it: `setting_of` the other way round."""
    changes: dict[str, Any] = {
        "ep_size": setting.ep_size,
        "cp_size": setting.cp_size,
        "tp_size": setting.tp_size,
        "pp_size": setting.pp_size,
        "dense_shard": setting.dense_shard,
        "per_device_train_batch_size": setting.micro_batch // config.sequences_per_row,
        "gradient_checkpointing": setting.checkpointing,
        "keep_expert_products": setting.keep_expert_products,
        "offload_activations": setting.offload_activations,
        "overlap_chunks": setting.overlap_chunks,
    }
    if config.global_batch_size is None:
        changes["gradient_accumulation_steps"] = setting.accumulation
    if setting.pp_size > 1:
        layers = None if setting.stage_layers is None else ",".join(map(str, setting.stage_layers))
        changes |= {"pipeline_schedule": setting.schedule, "pipeline_chunks": setting.chunks}
        changes |= {"pipeline_layers": layers}
    return replace(config, **changes)


def planned(
    config: TrainConfig,
    model_config: Any,
    world_size: int,
    device: Literal["cuda", "cpu"] = "cuda",
    is_kept: bool = True,
    imbalance: float | None = 1.0,
    said: Mapping[str, Any] | None = None,
    **changes: Any,
) -> PlannedRun:
    """A run, with what was measured of its model.

    Args:
        is_kept: whether what is measured goes to the user's cache directory.
        imbalance: of the setting; None: what natural routing has.
        said: the model's config.json, where that says all of it.

    Raises:
        ExpertMeshError: the model cannot be built, or not compute this.
    """
    measure = CachedMeasure(config, said or model_config.to_dict(), lambda: model_config, device, is_kept)
    busiest = imbalance_of(imbalance, measure.parameters.num_experts)
    setting = setting_of(config, world_size, device, imbalance=busiest, **changes)
    run = planned_run(measure, setting)
    measure.save()
    return run
