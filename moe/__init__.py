"""The dropless mixture-of-experts layer as plain maths: families, router, dispatch, experts, kernels."""

from moe.counts import ParameterCounts, active_parameters, count_parameters, training_flops
from moe.errors import ExpertMeshError
from moe.families import FAMILIES, Family, check_config, family_of
from moe.kernels import KERNELS, KernelChoice, check_kernel, check_kernel_name, choose_kernel
from moe.layer import DroplessMoE, ExpertMLP, MoEShape
from moe.losses import load_balancing_loss, router_z_loss
from moe.original import original_dmoe
from moe.router import Router, RouterStats
from moe.swap import build_model, decoder_layers, moe_blocks, take_stats

__all__ = [
    "FAMILIES",
    "KERNELS",
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
