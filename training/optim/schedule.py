"""The learning rate over a run: all schedules of transformers, and continuing one after a resume."""

import inspect
import json
import math
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
from transformers.trainer_utils import SchedulerType

from ...checkpoints.training_state.saving import Progress
from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig

Schedule = LambdaLR | ReduceLROnPlateau | GreedyLR

_SET_BY_US = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
_HISTORY = (
    "best", "num_bad_epochs", "num_good_epochs", "cooldown_counter", "warmup_counter", "reset_start", "last_epoch",
    "_streaming_avg",
)  # fmt: skip
"""What a schedule that follows the evaluation loss remembers; all else in its state are settings."""


def follows_eval_loss(config: TrainConfig) -> bool:
    """Whether the schedule steps on the evaluation loss, and so needs one."""
    return SchedulerType(config.lr_scheduler_type) in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def check_schedule(config: TrainConfig, num_steps: int, evaluates: bool) -> None:
    """Try what `build_scheduler` will do, before any weight is read.

    Raises:
        ExpertMeshError: as `build_scheduler`; or the schedule follows the evaluation loss, and the run has none,
            or it knows no warm-up, and one is asked for.
    """
    if num_steps == 0:
        return
    if (config.warmup_steps or config.warmup_ratio) and (
        follows_eval_loss(config) or config.lr_scheduler_type == SchedulerType.CONSTANT
    ):
        raise ExpertMeshError(
            f"--lr-scheduler-type {config.lr_scheduler_type} has no warm-up; leave out --warmup-steps "
            "and --warmup-ratio, or use another schedule, such as constant_with_warmup"
        )
    if follows_eval_loss(config) and not evaluates:
        raise ExpertMeshError(
            f"--lr-scheduler-type {config.lr_scheduler_type} follows the evaluation loss, but this "
            "run does not evaluate; give --eval-dataset or --eval-ratio, or use another schedule"
        )
    build_scheduler(torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate), config, num_steps)


def build_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig, num_steps: int) -> Schedule:
    """transformers' schedule (`get_scheduler`) over `num_steps`.

    Raises:
        ExpertMeshError: the schedule does not take this learning rate, warm-up, or --lr-scheduler-kwargs.
    """
    name, arguments = config.lr_scheduler_type, scheduler_arguments(config)
    try:
        scheduler: Schedule = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=num_warmup_steps(config, num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=arguments,
        )
    except (ValueError, TypeError, ZeroDivisionError) as error:
        with_arguments = f" with --lr-scheduler-kwargs {json.dumps(arguments)}" if arguments else ""
        raise ExpertMeshError(f"--lr-scheduler-type {name}{with_arguments}: {error}") from error
    return scheduler


def num_warmup_steps(config: TrainConfig, num_steps: int) -> int:
    """--warmup-steps, or the fraction of all steps that it, or --warmup-ratio, says; rounded up, as transformers
    does."""
    if config.warmup_steps >= 1:
        return int(config.warmup_steps)
    return math.ceil((config.warmup_steps or config.warmup_ratio) * num_steps)


def scheduler_arguments(config: TrainConfig) -> dict[str, Any]:
    """What --lr-scheduler-kwargs says.

    Raises:
        ExpertMeshError: it is no JSON object, or has a key that the schedule does not take.
    """
    text = config.lr_scheduler_kwargs
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ExpertMeshError(f"--lr-scheduler-kwargs {text}: is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ExpertMeshError(
            f"--lr-scheduler-kwargs {text}: is not a JSON object; write it like '{{\"min_lr\": 1e-6}}'"
        )
    takes = _arguments_of(SchedulerType(config.lr_scheduler_type))
    unknown = [key for key in arguments if key not in takes]
    if unknown:
        raise ExpertMeshError(
            f"--lr-scheduler-kwargs: {config.lr_scheduler_type} does not take {unknown[0]!r}; "
            + (f"it takes {', '.join(takes)}" if takes else "it takes none")
        )
    return {key: _number(value) for key, value in arguments.items()}


def _arguments_of(name: SchedulerType) -> list[str]:
    by_class = {SchedulerType.REDUCE_ON_PLATEAU: ReduceLROnPlateau, SchedulerType.GREEDY: GreedyLR}
    ignores_them = name in (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP)
    function: Any = by_class.get(name, TYPE_TO_SCHEDULER_FUNCTION[name])
    return [] if ignores_them else [key for key in inspect.signature(function).parameters if key not in _SET_BY_US]


def _number(value: Any) -> Any:
    """YAML reads 1e-6, without a dot, as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def step_scheduler(scheduler: Schedule, eval_loss: float | None) -> None:
    """To be called once after every step.

    Args:
        eval_loss: the evaluation loss, where the run has just evaluated; else None. Schedules that follow it stay where
            they are until the next that is finite.
    """
    if isinstance(scheduler, LambdaLR):
        with warnings.catch_warnings():
            # of a run whose first step is skipped
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            scheduler.step()
    elif eval_loss is not None and math.isfinite(eval_loss):
        scheduler.step(eval_loss)


def resume_scheduler(
    optimizer: torch.optim.Optimizer, scheduler: Schedule, config: TrainConfig, progress: Progress
) -> None:
    """Put a new scheduler where a saved one stood. Shape and peak stay those of the new one: flags win.

    One that follows the evaluation loss continues from that loss's history, at the saved fraction of the peak rate;
    after a schedule of another kind it begins afresh.
    """
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch, scheduler._step_count = progress.step, progress.step + 1
        factors = [factor(progress.step) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    elif progress.settings["lr_scheduler_type"] == config.lr_scheduler_type:
        scheduler.load_state_dict({key: progress.scheduler[key] for key in _HISTORY if key in progress.scheduler})
        change = config.learning_rate / (progress.settings["learning_rate"] or 1.0)
        rates = [rate * change for rate in progress.scheduler["_last_lr"]]
    else:
        return
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
