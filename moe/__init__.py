"""Mixture-of-experts layers as plain maths: transformers' models of any family, with dropless experts in them."""

from typing import TYPE_CHECKING

from moe.lazy import import_on_demand

if TYPE_CHECKING:
    from moe.adapters import Lora, add_adapters, is_adapter, store_frozen, unquantized
    from moe.config import check_config, load_config
    from moe.counts import Attention, ParameterCounts, active_parameters, seen_pairs, training_flops
    from moe.errors import ExpertMeshError
    from moe.experts import ExpertLayout, ExpertMLP, ExpertParameter
    from moe.kernel_names import KERNEL_NAMES, Precision, check_kernel_name
    from moe.kernels import KERNELS, LOOP, ExpertKernel, KernelChoice, Needs, check_kernel, choose_kernel
    from moe.layer import DroplessExperts
    from moe.losses import load_balancing_loss, router_z_loss
    from moe.model import (
        build_model,
        count_parameters,
        decoder_layers,
        dropless_experts,
        kernel_needs,
        layer_prefixes,
        model_class,
        moe_layers,
        moe_shape,
        outdate_working_weights,
        router_prefixes,
        settled_attention,
        take_logits,
        take_stats,
        use_kernel,
        without_computing,
    )
    from moe.original import original_dmoe
    from moe.rope import RopeScaling, advised_scaling, check_rope, read_rope_scaling, with_rope_scaling
    from moe.routing import RouterStats
    from moe.shape import MoEShape
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "KERNELS",
    "KERNEL_NAMES",
    "LOOP",
    "Attention",
    "DroplessExperts",
    "ExpertKernel",
    "ExpertLayout",
    "ExpertMLP",
    "ExpertMeshError",
    "ExpertParameter",
    "KernelChoice",
    "Lora",
    "MoEShape",
    "Needs",
    "ParameterCounts",
    "Precision",
    "RopeScaling",
    "RouterStats",
    "active_parameters",
    "add_adapters",
    "advised_scaling",
    "build_model",
    "check_config",
    "check_kernel",
    "check_kernel_name",
    "check_rope",
    "choose_kernel",
    "count_parameters",
    "decoder_layers",
    "dropless_experts",
    "is_adapter",
    "kernel_needs",
    "layer_prefixes",
    "load_balancing_loss",
    "load_config",
    "model_class",
    "moe_layers",
    "moe_shape",
    "original_dmoe",
    "outdate_working_weights",
    "read_rope_scaling",
    "router_prefixes",
    "router_z_loss",
    "seen_pairs",
    "settled_attention",
    "store_frozen",
    "take_logits",
    "take_stats",
    "training_flops",
    "unquantized",
    "use_kernel",
    "with_rope_scaling",
    "without_computing",
]
