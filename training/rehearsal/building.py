"""A model as a run builds it, before it is sharded, on the meta device."""

from typing import Any, Literal

import torch

from moe import (
    ExpertMeshError,
    build_model,
    check_rope,
    choose_kernel,
    kernel_needs,
    use_kernel,
    with_rope_scaling,
)
from moe.kernels import ExpertKernel
from sharding import set_parameter_dtype
from training.adapters import adapt
from training.attention import check_packing, choose_attention
from training.config import TrainConfig
from training.freezing import freeze
from training.fused import fuse_layers
from training.head import attach_loss_head
from training.shared_attention import share_rows


def build_rehearsed(config: TrainConfig, model_config: Any, device_type: Literal["cuda", "cpu"]) -> Any:
    """What `train_ep.py` would build for these flags, with the kernels of a GPU or of a CPU.

    Raises:
        ExpertMeshError: the model cannot be built, or not trained with these flags.
    """
    model_config = with_rope_scaling(model_config, config.rope)
    model = build_model(model_config, choose_attention(config.attn_implementation, config.packing, model_config))
    if config.rope is not None:
        check_rope(model, config.rope)
    if config.adapter != "none":
        adapt(model, config)
    elif config.freeze:
        freeze(model, config.freeze)
    if config.packing:
        check_packing(model)
    if config.cp_size > 1:
        share_rows(model, config.cp_size, config.packing)
    use_kernel(model, _kernel(model, config, device_type))
    if device_type == "cuda":
        fuse_layers(model)
    # liger-kernel's is Triton of another's, which keeps as little
    attach_loss_head(model, "full" if config.cross_entropy == "full" else "chunked")
    if config.optim == "adamw_bf16":
        set_parameter_dtype(model, torch.bfloat16)
        if config.adapter == "none" and model_config.dtype != torch.bfloat16:
            # as a checkpoint of that dtype has them (see `checkpoints.load.hold_exactly`)
            set_parameter_dtype(model, torch.float32, frozen_alone=True)
    elif config.holds_base_in_bf16:
        set_parameter_dtype(model, torch.bfloat16, frozen_alone=True)
    return model


def _kernel(model: Any, config: TrainConfig, device_type: str) -> ExpertKernel:
    """For "auto" on a GPU what it takes there from Hopper on, as this process cannot ask it."""
    needs = kernel_needs(model, "cpu", torch.bfloat16 if config.bf16 else torch.float32)
    if config.expert_kernel == "auto" and config.bf16 and device_type == "cuda":
        try:
            return choose_kernel("torch-grouped", needs, config.expert_precision).kernel
        except ExpertMeshError:  # their widths do not suit it
            pass
    return choose_kernel(config.expert_kernel, needs, config.expert_precision).kernel
