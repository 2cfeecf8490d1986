"""The dropless mixture-of-experts layer as plain maths: families, router, dispatch, experts, kernels."""

from typing import TYPE_CHECKING

from moe.lazy import import_on_demand

if TYPE_CHECKING:
    from moe.counts import ParameterCounts, active_parameters, training_flops
    from moe.errors import ExpertMeshError
    from moe.families import FAMILIES, Family, check_config, family_of
    from moe.kernel_names import KERNEL_NAMES, check_kernel_name
    from moe.kernels import KERNELS, KernelChoice, check_kernel, choose_kernel
    from moe.layer import DroplessMoE, ExpertMLP
    from moe.losses import load_balancing_loss, router_z_loss
    from moe.original import original_dmoe
    from moe.router import Router, RouterStats
    from moe.shape import MoEShape
    from moe.swap import build_model, count_parameters, decoder_layers, moe_blocks, take_stats
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "FAMILIES",
    "KERNELS",
    "KERNEL_NAMES",
    "DroplessMoE",
    "ExpertMLP",
    "ExpertMeshError",
    "Family",
    "KernelChoice",
    "MoEShape",
    "ParameterCounts",
    "Router",
    "RouterStats",
    "active_parameters",
    "build_model",
    "check_config",
    "check_kernel",
    "check_kernel_name",
    "choose_kernel",
    "count_parameters",
    "decoder_layers",
    "family_of",
    "load_balancing_loss",
    "moe_blocks",
    "original_dmoe",
    "router_z_loss",
    "take_stats",
    "training_flops",
]
