"""The optimizers that `--optim` names, over parameters of several meshes.

Each has an entry in `training.config.optimizers`, which names its code.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoints.training_state.resuming import ResumableOptimizer
from ...moe.experts.model_layers import decoder_layers, router_prefixes
from ...moe.util.entry_checks import check_fields
from ...moe.util.registry import loaded
from ...sharding.mesh import Mesh
from ...sharding.state import StateTensor, changing_state, trainable_of
from ..config.optimizers import OPTIMIZERS, OptimizerEntry, ParameterShape, first_roots
from ..config.train_config import TrainConfig
from .adamw import AdamW
from .low_bit import AdamW8bit, AdamWBf16
from .matrices import Matrix, dense_matrix, expert_matrices
from .muon import Muon
from .shampoo import Shampoo, inverse_fourth_roots


def register_optimizer(entry: OptimizerEntry) -> None:
    """Let `--optim` name one more optimizer; docs/how-to/extend.md has an example.

    Raises:
        ValueError: its name is taken, or is none (see `Registry.register`); a field is not as its type says, or names
            a setting that there is not.
    """
    what = f"--optim {entry.name}"
    check_fields(what, entry)
    known = [field.name for field in fields(TrainConfig)]
    for name in (*entry.heeds, *entry.dry_run):
        if name not in known:
            raise ValueError(f"{what}: there is no setting {name}")
    OPTIMIZERS.check_other_names(entry, lambda each: each.aliases)
    OPTIMIZERS.register(entry)


def build_optimizer(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    """The optimizer of a sharded model that the configuration names."""
    optimizer: ResumableOptimizer = loaded(config.optimizer_entry.build)(model, config, mesh)
    return optimizer


def occasional(config: TrainConfig) -> Mapping[Callable[..., Any], int]:
    """Those of the optimizer that the configuration names (see `OptimizerEntry`)."""
    return loaded(config.optimizer_entry.occasional)(config)


def state_bytes(parameter: Tensor, config: TrainConfig, matrix_rows: int) -> float:
    """Bytes of state that an optimizer has for each element of a parameter, which may be unsharded or on the meta
    device.

    matrix_rows: the rows of each of its matrices; 0: it is none of `matrix_parts`.
    """
    if not parameter.requires_grad:
        return 0
    shape = ParameterShape(parameter.shape, parameter.element_size(), matrix_rows)
    return config.optimizer_entry.state_bytes(shape, config)


def matrix_rows(model: nn.Module, config: TrainConfig) -> dict[Tensor, int]:
    """Of an optimizer that computes with matrices, the parameters that it takes as such, and the rows of each of their
    matrices; nothing of another."""
    if not config.optimizer_entry.takes_matrices:
        return {}
    parts = (part for several in matrix_parts(model) for part in several)
    return {part.tensor: part.shape[0] if part.expert is None else part.expert.rows_an_expert for part in parts}


def saved_bytes(model: nn.Module, config: TrainConfig) -> int:
    """About the bytes of a training checkpoint of a complete model, which may be on the meta device: all that changes,
    with the optimizer's state of what is trained."""
    rows, saved = matrix_rows(model, config), [part.tensor for part in changing_state(model).values()]
    return int(sum(part.nbytes + part.numel() * state_bytes(part, config, rows.get(part, 0)) for part in saved))


def parameter_groups(parameters: list[Tensor], config: TrainConfig) -> list[dict[str, Any]]:
    """Groups as torch's optimizers take them: one-dimensional parameters have no weight decay. These are the norms and
    biases, which transformers' Trainer leaves out by their names, and in some families attention sinks, decays (A_log)
    and skips (D), to which it gives weight decay."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


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


def _adam_settings(config: TrainConfig) -> dict[str, Any]:
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": config.learning_rate, "betas": betas, "eps": config.adam_epsilon}


def _all_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    return parameter_groups([part.tensor for part in trainable_of(model).values()], config)


def adamw(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    return AdamW(_all_groups(model, config), **_adam_settings(config), fused=True)


def adamw_8bit(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    return AdamW8bit(_all_groups(model, config), **_adam_settings(config))


def adamw_bf16(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    rows: dict[Tensor, tuple[int, range]] = {}
    for name, part in trainable_of(model).items():
        # by its name: its number would change with every parameter that comes before it
        rows[part.tensor] = (crc32(name.encode()), mesh.topology.rows(part.num_rows, part.layout, dist.get_rank()))
    return AdamWBf16(_all_groups(model, config), **_adam_settings(config), rows=rows, seed=config.seed)


def _matrices(model: nn.Module, config: TrainConfig, mesh: Mesh) -> tuple[list[Matrix], list[Matrix], AdamW]:
    """The model's matrices, dense and experts', and an AdamW for the rest."""
    dense, experts = matrix_parts(model)
    taken = {part.tensor for part in (*dense, *experts)}
    others = [part.tensor for part in trainable_of(model).values() if part.tensor not in taken]
    adamw = AdamW(parameter_groups(others, config), **_adam_settings(config), fused=True)
    dense_matrices = [dense_matrix(part, mesh) for part in dense]
    return dense_matrices, [matrix for part in experts for matrix in expert_matrices(part, mesh)], adamw


def muon(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    return Muon(*_matrices(model, config, mesh), mesh, config.learning_rate, config.weight_decay, dtype)


def shampoo(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ResumableOptimizer:
    return Shampoo(
        *_matrices(model, config, mesh),
        mesh,
        **_adam_settings(config),
        weight_decay=config.weight_decay,
        frequency=config.shampoo_frequency,
        start=first_roots(config.shampoo_start, config.shampoo_frequency),
        block_size=config.shampoo_block_size,
    )


def nothing_occasional(config: TrainConfig) -> Mapping[Callable[..., Any], int]:
    """Of an optimizer whose steps are all alike."""
    return {}


def shampoo_occasional(config: TrainConfig) -> Mapping[Callable[..., Any], int]:
    """Of Shampoo, whose preconditioners are made every few steps."""
    return {inverse_fourth_roots: config.shampoo_frequency}
