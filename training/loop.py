"""The training loop: data in, steps, figures and checkpoints out."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoints import ModelSource, Progress, Saver, load_training_state
from moe import ExpertMeshError
from sharding import Mesh, Ranks
from training.config import TrainConfig
from training.data import Batch, DataOrder, Samples, collate
from training.log import RunLog
from training.optimizer import build_optimizer
from training.preemption import StopRequest
from training.schedule import build_scheduler, resume_scheduler, step_scheduler
from training.step import LossWeights, StepResult, train_step


@dataclass(frozen=True)
class Run:
    """Everything that training needs. `saver` is None where no checkpoints are asked for."""

    config: TrainConfig
    model: Any
    samples: Samples
    order: DataOrder
    weights: LossWeights
    mesh: Mesh
    ranks: Ranks
    log: RunLog
    saver: Saver | None


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


def train(run: Run, resume_from: Path | None) -> bool:
    """Train the model in place for the number of steps that the log was told, from a checkpoint on if there is one.

    Returns:
        Whether all steps were made; False after a signal asked to stop, with a checkpoint saved.

    Raises:
        ExpertMeshError: on all ranks, when the checkpoint does not fit the run, training diverges, or a checkpoint
            cannot be saved and --on-save-error says stop.
    """
    config, log = run.config, run.log
    optimizer = build_optimizer(run.model, config, run.mesh)
    scheduler = build_scheduler(optimizer, config, log.num_steps)
    first_step, tokens = 0, 0
    if resume_from is not None:
        progress = load_training_state(resume_from, run.model, optimizer)
        _check_order(progress, run.order, resume_from)
        _check_optimizer(progress, config, resume_from)
        resume_scheduler(optimizer, scheduler, config, progress)
        first_step, tokens = progress.step, progress.tokens
        log.line(f"resumed from {resume_from}, step {first_step}")
    run.model.train()
    log.keep_until(first_step)
    stopping = False
    tokens_logged, time_logged = tokens, time.perf_counter()
    with StopRequest() as stop:
        for step in log.steps(first_step):
            learning_rate = scheduler.get_last_lr()[0]
            result = train_step(run.model, optimizer, _batches(run, step), run.mesh, run.weights, config.max_grad_norm)
            step_scheduler(scheduler, eval_loss=None)
            done = step + 1
            tokens += result.tokens
            if done % config.logging_steps == 0 or done == log.num_steps:
                now = time.perf_counter()
                rate = (tokens - tokens_logged) / (now - time_logged)
                tokens_logged, time_logged = tokens, now
                metrics = _metrics(done, run, result, learning_rate, rate)
                log.step(metrics, _console(metrics))
            stopping = stop.on_any_rank(run.ranks.device)
            if run.saver is not None and (stopping or done % config.save_steps == 0):
                progress = Progress(done, tokens, scheduler.state_dict(), _order_facts(run.order), asdict(config))
                _handle(run.saver.wait(), run)
                run.saver.save(run.model, optimizer, progress)
            if stopping:
                break
        if run.saver is not None:
            _handle(run.saver.wait(), run)
    return not stopping


def _batches(run: Run, step: int) -> list[Batch]:
    rows = run.order.micro_batches(step, run.ranks.rank)
    return [collate([run.samples[row] for row in forward]).to(run.ranks.device) for forward in rows]


def _handle(problem: str | None, run: Run) -> None:
    """A checkpoint that could not be saved; every rank has the same problem."""
    if problem is None:
        return
    if run.config.on_save_error == "stop":
        raise ExpertMeshError(f"{problem}; with --on-save-error continue, training goes on without it")
    run.log.line(f"warning: {problem}; training goes on, and the checkpoint before it stays")


def _order_facts(order: DataOrder) -> dict[str, int]:
    return {"rows": order.num_rows, "global_batch_size": order.global_batch_size, "seed": order.seed}


def _check_order(progress: Progress, order: DataOrder, path: Path) -> None:
    """The batches to come must be those that would have come."""
    here = _order_facts(order)
    for name, there in progress.order.items():
        if here[name] != there:
            raise ExpertMeshError(
                f"--resume {path}: that run had {name.replace('_', ' ')} {there}, this one has {here[name]}; "
                "with other batches it would not be the same run"
            )


def _check_optimizer(progress: Progress, config: TrainConfig, path: Path) -> None:
    """One optimizer's state means nothing to another."""
    there = progress.settings.get("optim", "adamw_torch_fused")
    if there != config.optim:
        raise ExpertMeshError(
            f"--resume {path}: that run had --optim {there}, this one has {config.optim}; take the same"
        )


def _metrics(done: int, run: Run, result: StepResult, learning_rate: Any, rate: float) -> dict[str, Any]:
    counts_LE = result.counts_LE.double()
    load_L = counts_LE.max(dim=1).values / counts_LE.mean(dim=1).clamp(min=torch.finfo(torch.double).tiny)
    metrics: dict[str, Any] = {
        "step": done,
        "epoch": round(done / run.order.steps_per_epoch, 4),
        "learning_rate": learning_rate,
        "tokens_per_second": round(rate, 1),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
    }
    if run.weights.balance > 0:
        metrics["balance_loss"] = result.balance_loss
    if run.weights.z > 0:
        metrics["z_loss"] = result.z_loss
    return {
        **metrics,
        "tokens": result.tokens,
        "target_tokens": result.targets,
        # 1 is even; E/K is all tokens on the same experts
        "expert_load_max_over_mean": float(load_L.max()),
        "expert_tokens": result.counts_LE.tolist(),
    }


def _console(metrics: dict[str, Any]) -> str:
    return (
        f"loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  lr {metrics['learning_rate']:.2e}  "
        f"{metrics['tokens_per_second']:,.0f} tokens/s  expert load {metrics['expert_load_max_over_mean']:.2f}x mean"
    )
