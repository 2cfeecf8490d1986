"""Mixture-of-experts layers as plain maths: transformers' models of any family, with dropless experts in them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "moe":  # `python -m moe` in a checkout: its own modules, whatever is installed
    sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "public"))

from expertmesh.moe.base.lazy import import_on_demand

if TYPE_CHECKING:
    from expertmesh.moe.base.errors import ExpertMeshError
    from expertmesh.moe.experts.expert_mlp import ExpertLayout, ExpertMLP, ExpertParameter
    from expertmesh.moe.experts.layer import DroplessExperts
    from expertmesh.moe.experts.lora import (
        Lora,
        add_adapters,
        is_adapter,
        layers_linear,
        store_frozen,
        to_quantize,
        unquantized,
        use_fp8,
    )
    from expertmesh.moe.experts.router_losses import load_balancing_loss, router_z_loss
    from expertmesh.moe.experts.router_stats import RouterStats
    from expertmesh.moe.experts.shape import MoEShape
    from expertmesh.moe.forward import Forward, Targets, current_forward
    from expertmesh.moe.kernels.expert_kernels import (
        KERNELS,
        LOOP,
        ExpertKernel,
        KernelChoice,
        Needs,
        check_kernel,
        choose_kernel,
    )
    from expertmesh.moe.kernels.fp8_linear import suits_fp8
    from expertmesh.moe.kernels.kernel_names import KERNEL_NAMES, Precision, check_kernel_name
    from expertmesh.moe.megablocks.original import original_dmoe
    from expertmesh.moe.model.build import (
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
    from expertmesh.moe.model.config import check_config, load_config
    from expertmesh.moe.model.counts import Attention, ParameterCounts, active_parameters, seen_pairs, training_flops
    from expertmesh.moe.model.rope import RopeScaling, advised_scaling, check_rope, read_rope_scaling, with_rope_scaling
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
    "Forward",
    "KernelChoice",
    "Lora",
    "MoEShape",
    "Needs",
    "ParameterCounts",
    "Precision",
    "RopeScaling",
    "RouterStats",
    "Targets",
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
    "current_forward",
    "decoder_layers",
    "dropless_experts",
    "is_adapter",
    "kernel_needs",
    "layer_prefixes",
    "layers_linear",
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
    "suits_fp8",
    "take_logits",
    "take_stats",
    "to_quantize",
    "training_flops",
    "unquantized",
    "use_fp8",
    "use_kernel",
    "with_rope_scaling",
    "without_computing",
]
