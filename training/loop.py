"""The training loop: data in, steps, figures out."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from checkpoints import ModelSource
from sharding import Mesh, Ranks
from training.config import TrainConfig
from training.data import DataOrder, Sample, collate
from training.log import RunLog
from training.optimizer import build_optimizer, build_scheduler
from training.step import LossWeights, StepResult, train_step


def data_order(config: TrainConfig, num_rows: int, world_size: int) -> DataOrder:
    """How the rows are shared out under this configuration."""
    return DataOrder(
        num_rows, world_size, config.per_device_train_batch_size, config.gradient_accumulation_steps, config.seed
    )


def number_of_steps(config: TrainConfig, order: DataOrder) -> int:
    """--max-steps, or as many as --num-train-epochs takes."""
    return config.max_steps if config.max_steps >= 0 else math.ceil(config.num_train_epochs * order.steps_per_epoch)


def loss_weights(config: TrainConfig, source: ModelSource) -> LossWeights:
    """The coefficients asked for, or the model's own where it would add the balancing loss in transformers too."""
    balance = config.router_aux_loss_coef
    if balance is None:
        balance = source.config.router_aux_loss_coef if source.config.output_router_logits else 0.0
    return LossWeights(balance, config.router_z_loss_coef)


def train(
    model: Any,
    samples: Sequence[Sample],
    order: DataOrder,
    config: TrainConfig,
    weights: LossWeights,
    mesh: Mesh,
    ranks: Ranks,
    log: RunLog,
) -> None:
    """Train `model` in place for the number of steps that `log` was told."""
    optimizer = build_optimizer(model, config)
    scheduler = build_scheduler(optimizer, config, log.num_steps)
    model.train()
    tokens_since, time_since = 0, time.perf_counter()
    for step in log.steps():
        rows = order.micro_batches(step, ranks.rank)
        batches = [collate([samples[row] for row in forward]).to(ranks.device) for forward in rows]
        learning_rate = scheduler.get_last_lr()[0]
        result = train_step(model, optimizer, batches, mesh, weights, config.max_grad_norm)
        scheduler.step()
        tokens_since += result.tokens
        if (step + 1) % config.logging_steps == 0 or step + 1 == log.num_steps:
            now = time.perf_counter()
            metrics = {
                "step": step + 1,
                "epoch": round((step + 1) / order.steps_per_epoch, 4),
                "learning_rate": learning_rate,
                "tokens_per_second": round(tokens_since / (now - time_since), 1),
                **_figures(result, weights),
            }
            log.step(metrics, _console(metrics))
            tokens_since, time_since = 0, now


def _figures(result: StepResult, weights: LossWeights) -> dict[str, Any]:
    counts_LE = result.counts_LE.double()
    load_L = counts_LE.max(dim=1).values / counts_LE.mean(dim=1).clamp(min=torch.finfo(torch.double).tiny)
    figures: dict[str, Any] = {"loss": result.loss, "grad_norm": result.grad_norm}
    if weights.balance > 0:
        figures["balance_loss"] = result.balance_loss
    if weights.z > 0:
        figures["z_loss"] = result.z_loss
    return {
        **figures,
        "tokens": result.tokens,
        "target_tokens": result.targets,
        # 1 is even; E is all tokens on one expert
        "expert_load_max_over_mean": float(load_L.max()),
        "expert_tokens": result.counts_LE.tolist(),
    }


def _console(metrics: dict[str, Any]) -> str:
    return (
        f"loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  lr {metrics['learning_rate']:.2e}  "
        f"{metrics['tokens_per_second']:,.0f} tokens/s  expert load {metrics['expert_load_max_over_mean']:.2f}x mean"
    )
