"""Applies expert parallelism, activation checkpointing and FSDP2 to a finished model on the meta device.

The loss of every rank is its local sum divided by a global count, so gradients are plain sums over ranks: FSDP's
averaging is switched off, and no factor of dp or ep exists anywhere.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moe import decoder_layers, moe_blocks
from moe.dispatch import AllToAllDispatcher
from moe.layer import ExpertMLP
from sharding.mesh import Mesh


def parallelize(model: nn.Module, mesh: Mesh, compute_dtype: torch.dtype, gradient_checkpointing: bool) -> None:
    """Place every parameter of `model` on its mesh, in place. Gradients are reduced in fp32.

    Args:
        model: from `moe.build_model`, on the meta device.
        mesh: the ranks.
        compute_dtype: dtype of parameters and activations in forward and backward.
        gradient_checkpointing: recompute each decoder layer in backward (non-reentrant).
    """
    place_experts(model, mesh)
    if gradient_checkpointing:
        _checkpoint_layers(model)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    shard_dense(model, mesh, precision)
    _sum_gradients(model)


def place_experts(model: nn.Module, mesh: Mesh) -> None:
    """Give each ep rank its block of experts, and every MoE layer the all-to-all that reaches them."""
    for block in moe_blocks(model):
        experts = block.experts
        for name, weight in list(experts.named_parameters()):
            placed = distribute_tensor(weight.detach(), mesh.ep, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(placed))
        if mesh.topology.ep_size > 1:
            block.dispatcher = AllToAllDispatcher(block.shape.num_experts, mesh.ep.get_group())


def shard_dense(model: nn.Module, mesh: Mesh, precision: MixedPrecisionPolicy) -> None:
    """Experts get an FSDP unit of their own over dp; every layer around them, and the root, one over all ranks.

    The outer units are told to ignore the experts' parameters: they are placed already.
    """
    for block in moe_blocks(model):
        fully_shard(block.experts, mesh=mesh.dp, mp_policy=precision)
    expert_parameters = {p for block in moe_blocks(model) for p in block.experts.parameters()}
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.dense, mp_policy=precision, ignored_params=expert_parameters)
    fully_shard(model, mesh=mesh.dense, mp_policy=precision, ignored_params=expert_parameters)


def _checkpoint_layers(model: Any) -> None:
    # preserve_rng_state, torch's default, makes jitter and dropout repeat, and with them the routing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # without it a factor of 1 still goes through ReduceOp.PREMUL_SUM, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)


def materialize(model: Any, device: torch.device) -> None:
    """Allocate this rank's shards (uninitialised) and recompute the buffers that no checkpoint holds."""
    model.to_empty(device=device)
    # to_empty leaves buffers uninitialised and unties shared parameters
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    model.tie_weights()


def is_expert(name: str, model: nn.Module) -> bool:
    """Whether the parameter called `name` belongs to an `ExpertMLP`."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), ExpertMLP)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
