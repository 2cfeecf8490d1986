"""The optimizers that `--optim` names, over parameters of several meshes."""

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoints.training_state.resuming import ResumableOptimizer
from ...moe.experts.model_layers import decoder_layers, router_prefixes
from ...sharding.mesh import Mesh
from ...sharding.state import StateTensor, trainable_of
from ..config.train_config import TrainConfig
from . import muon, shampoo
from .low_bit import AdamW8bit, AdamWBf16, block_size
from .matrices import UpdateKernel, block_shapes, dense_matrix, expert_matrices
from .muon import Muon
from .shampoo import Shampoo, factor_bytes


class AdamW(torch.optim.AdamW, ResumableOptimizer):
    """torch's."""


def build_optimizer(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    """The optimizer of a sharded model; as in transformers' Trainer, norms and biases (the one-dimensional parameters)
    have no weight decay."""
    if config.optim in ("muon", "shampoo"):
        return _of_matrices(model, config, mesh)
    groups = _groups([part.tensor for part in trainable_of(model).values()], config)
    settings: dict[str, Any] = _adam_settings(config)
    if config.optim == "adamw_torch_8bit":
        return AdamW8bit(groups, **settings)
    if config.optim == "adamw_bf16":
        rows: dict[Tensor, tuple[int, range]] = {}
        for name, part in trainable_of(model).items():
            # by its name: its number would change with every parameter that comes before it
            rows[part.tensor] = (crc32(name.encode()), mesh.topology.rows(part.num_rows, part.layout, dist.get_rank()))
        return AdamWBf16(groups, **settings, rows=rows, seed=config.seed)
    return AdamW(groups, **settings, fused=True)


def state_bytes(parameter: Tensor, config: TrainConfig, matrix_rows: int) -> float:
    """Bytes of state that an optimizer has for each element of a parameter, which may be unsharded or on the meta
    device.

    matrix_rows: the rows of each of its matrices; 0: it is none of `matrix_parts`.
    """
    optim = config.optim
    if not parameter.requires_grad:
        return 0
    if optim == "muon":
        return 4 if matrix_rows else 8
    if optim == "shampoo" and matrix_rows:
        return 8 + factor_bytes((matrix_rows, parameter.shape[1]), config.shampoo_block_size)
    if optim == "adamw_torch_8bit" and (block := block_size(parameter.shape)) is not None:
        return 2 + 8 / block
    return 2 * parameter.element_size() if optim == "adamw_bf16" else 8


def update_kernels(
    shape: tuple[int, int], config: TrainConfig
) -> list[tuple[tuple[int, int], int, list[UpdateKernel]]]:
    """What Muon or Shampoo computes of a matrix of this shape in a step, on its owner, beside what moves memory alone:
    the shape of each kind of its blocks, how many there are, and the kernels of one."""
    if config.optim == "muon":
        return [(shape, 1, muon.update_kernels(shape))]
    blocks = block_shapes(shape, config.shampoo_block_size).items()
    return [(block, number, shampoo.update_kernels(block, config.shampoo_frequency)) for block, number in blocks]


def _groups(parameters: list[Tensor], config: TrainConfig) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _adam_settings(config: TrainConfig) -> dict[str, Any]:
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": config.learning_rate, "betas": betas, "eps": config.adam_epsilon}


def matrix_parts(model: nn.Module) -> tuple[list[StateTensor], list[StateTensor]]:
    """(dense, experts): what Muon and Shampoo take, the rest being AdamW's. The experts' matrices, and the weights of
    the decoder layers' linear modules: no biases, convolutions, tables or decays, whatever their shape; nor the
    routers, whose rows are experts' scores, and gates of a single row, which are vectors.

    A projection that a family has fused of several (queries with their gate, keys with values) is one matrix here, as
    nothing in its module says where one ends.
    """
    state = trainable_of(model)
    experts = [part for part in state.values() if part.expert is not None and part.expert.row]
    routers = router_prefixes(model)
    linear = {
        module.weight
        for layer in decoder_layers(model)
        for module in layer.modules()
        if isinstance(module, nn.Linear) and min(module.weight.shape) > 1
    }
    dense = [part for name, part in state.items() if part.tensor in linear and not name.startswith(routers)]
    return dense, experts


def _of_matrices(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    """Muon or Shampoo for matrices, AdamW for the rest."""
    dense, experts = matrix_parts(model)
    taken = {part.tensor for part in (*dense, *experts)}
    others = [part.tensor for part in trainable_of(model).values() if part.tensor not in taken]
    settings = _adam_settings(config)
    adamw = AdamW(_groups(others, config), **settings, fused=True)
    dense_matrices = [dense_matrix(part, mesh) for part in dense]
    matrices = [matrix for part in experts for matrix in expert_matrices(part, mesh)]
    decay = config.weight_decay
    if config.optim == "muon":
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        return Muon(dense_matrices, matrices, adamw, mesh, config.learning_rate, decay, dtype)
    return Shampoo(
        dense_matrices,
        matrices,
        adamw,
        mesh,
        **settings,
        weight_decay=decay,
        frequency=config.shampoo_frequency,
        start=config.first_roots,
        block_size=config.shampoo_block_size,
    )
