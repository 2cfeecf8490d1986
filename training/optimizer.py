"""AdamW over parameters of several meshes, and the learning rate schedule."""

import math
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from moe import ExpertMeshError
from training.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW; as in transformers' Trainer, norms (the one-dimensional parameters) have no weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainConfig, num_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """transformers' schedule over `num_steps`; a warm-up below 1 is a share of them.

    Raises:
        ExpertMeshError: the schedule does not take this learning rate or warm-up.
    """
    warmup = config.warmup_steps
    num_warmup = int(warmup) if warmup >= 1 else math.ceil(warmup * num_steps)
    try:
        scheduler: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
            config.lr_scheduler_type, optimizer, num_warmup_steps=num_warmup, num_training_steps=num_steps
        )
    except ValueError as error:
        raise ExpertMeshError(f"--lr-scheduler-type {config.lr_scheduler_type}: {error}") from error
    return scheduler


def resume_scheduler(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, saved: dict[str, Any]
) -> None:
    """Put a new scheduler where a saved one stood. Peak rate and shape stay those of the new one: flags win."""
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    scheduler.load_state_dict({**saved, "base_lrs": scheduler.base_lrs})
    position = scheduler.last_epoch
    rates = [base * factor(position) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
