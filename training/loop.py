"""The training loop: data in, steps, evaluations, answers, checkpoints and figures out."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoints import Progress, Saver, load_best_model, load_training_state, recorded_settings
from moe import ExpertMeshError, ParameterCounts, moe_layers, read_rope_scaling
from moe.parser import flag_of
from sharding import Mesh, Ranks, Watchdog, check_replicas
from training.adapter_norms import adapter_norms, norms_line
from training.alarms import Alarms
from training.balance import Balance, BiasUpdate
from training.collector import SteadyCollector
from training.compiling import Compilation, compilation
from training.config import TrainConfig
from training.data import Batch, DataOrder, Rows, collate
from training.evaluate import Best, evaluate
from training.generate import generate
from training.inputs import Inputs, Prompts
from training.log import RunLog
from training.meter import Meter
from training.nonfinite import NonFiniteGuard
from training.optimizer import build_optimizer
from training.preemption import StopRequest
from training.profiling import StepProfiler
from training.schedule import Schedule, build_scheduler, resume_scheduler, step_scheduler
from training.step import train_step


@dataclass(frozen=True)
class Run:
    """Everything that training needs. `prompts` and `saver` are None where they are not asked for."""

    config: TrainConfig
    model: Any
    counts: ParameterCounts
    top_k: int
    inputs: Inputs
    order: DataOrder
    prompts: Prompts | None
    balance: Balance
    mesh: Mesh
    ranks: Ranks
    log: RunLog
    saver: Saver | None
    watchdog: Watchdog


def data_order(config: TrainConfig, rows: Rows | None, world_size: int) -> DataOrder:
    """How the rows are shared out under this configuration."""
    return DataOrder(
        0 if rows is None else len(rows),
        world_size // config.cp_size,
        config.per_device_train_batch_size,
        config.forwards(world_size),
        config.seed,
        rows.lengths if rows is not None and config.group_by_length else None,
        config.global_batch_size,
    )


def number_of_steps(config: TrainConfig, order: DataOrder) -> int:
    """--max-steps, or as many as --num-train-epochs takes."""
    return config.max_steps if config.max_steps >= 0 else math.ceil(config.num_train_epochs * order.steps_per_epoch)


def train(run: Run, resume_from: Path | None) -> bool:
    """Train the model in place for the number of steps that the log was told, from a checkpoint on if there is one.

    Returns:
        Whether training came to its end, be it early; False after a signal asked to stop, with a checkpoint saved.

    Raises:
        ExpertMeshError: on all ranks, when the checkpoint does not fit the run, training diverges, replicas differ, or
            a checkpoint cannot be saved and --on-save-error says stop.
    """
    optimizer = build_optimizer(run.model, run.config, run.mesh)
    scheduler = build_scheduler(optimizer, run.config, run.log.num_steps)
    try:
        stopped = _train(run, optimizer, scheduler, resume_from)
    except KeyboardInterrupt:
        if run.saver is not None:
            run.saver.abandon()
        raise
    except ExpertMeshError:
        # what all ranks have met leaves them all there to finish the checkpoint under way
        with suppress(RuntimeError):
            _wait(run)
        raise
    return not stopped


def _train(run: Run, optimizer: torch.optim.Optimizer, scheduler: Schedule, resume_from: Path | None) -> bool:
    """Whether a signal stopped it."""
    config, log, watchdog = run.config, run.log, run.watchdog
    first_step, tokens, best = 0, 0, Best()
    if resume_from is not None:
        first_step, tokens, best = _resume(run, optimizer, scheduler, resume_from)
    run.model.train()
    log.begin_after(first_step)
    stopping, enough = False, _had_enough(config, best)
    compiled: Compilation | None = None
    groups = [layer.kind.num_groups for layer in moe_layers(run.model)]
    guard, alarms = NonFiniteGuard(config, run.model, log), Alarms(config, run.balance, run.top_k, groups, log)
    meter = Meter(run.counts, run.model.config.get_text_config(), run.top_k, run.ranks.device, config.bf16)
    bias_update = BiasUpdate(run.model, run.balance.bias_rate) if run.balance.bias_rate else None
    profiler = StepProfiler(config, run.model, run.ranks, log.output_dir, log.line)
    with StopRequest() as stop, SteadyCollector() as collector, profiler:
        for step in log.steps(log.num_steps if enough else first_step):
            done = step + 1
            watchdog.at("reading the batch", done)
            learning_rate = scheduler.get_last_lr()[0]
            batches = _batches(run, step)
            with profiler.step(done):
                result = train_step(
                    *(run.model, optimizer, batches, run.mesh, run.balance.weights, config.max_grad_norm, bias_update),
                    at=watchdog.at,
                    before_update=run.saver.wait_for_copies if run.saver is not None else lambda: None,
                )
            tokens += result.tokens
            guard.check(done, result)
            alarms.step(done, result)
            meter.add(result)
            collector.step(done)
            if config.compile and compiled is None:
                compiled = compilation()
                log.line(f"compiled {compiled}")

            # what is saved or evaluated must also be logged: a run that goes on from there begins with an empty meter
            evaluates, saves = _evaluates_at(done, run), run.saver is not None and _saves_at(done, run)
            if evaluates or saves or _is_due(done, config.logging_steps, run):
                _log_step(run, meter, alarms, done, learning_rate)
            answers = run.prompts is not None and _is_due(done, config.generate_steps, run)
            eval_loss, is_better = None, False
            if profiler.is_due or evaluates or saves or answers:
                # what comes between two steps is no part of either
                with meter.paused():
                    _write_profile(run, profiler)
                    if evaluates:
                        eval_loss = _evaluate(run, done)
                        is_better = best.update(eval_loss, done, config.early_stopping_threshold)
                    if answers:
                        _generate(run, done)
            step_scheduler(scheduler, eval_loss)
            stopping = stop.on_any_rank(run.ranks.device)
            enough = _had_enough(config, best)
            if stopping and not meter.is_empty:
                _log_step(run, meter, alarms, done, learning_rate)
            is_saving = run.saver is not None and (stopping or is_better or enough or saves)
            # before a save, so that replicas gone bad never take the place of good ones
            if config.check_replicas and (is_saving or _is_due(done, config.check_replicas, run)):
                numbers = {"the learning rate": float(scheduler.get_last_lr()[0]), "the number of steps": done}
                with meter.paused():
                    check_replicas(run.model, run.ranks.device, done, numbers)
            if is_saving:
                progress = Progress(
                    done, tokens, scheduler.state_dict(), _order_facts(run), asdict(config), best.state()
                )
                with meter.paused():
                    _save(run, optimizer, progress)
            if stopping or enough:
                break
        _write_profile(run, profiler)
        if compiled is not None and compilation().is_more_than(compiled):
            log.line(f"compiled {compilation()} in the whole run")
        if enough:
            log.line(
                f"stopped early: {best.since} consecutive evaluations not better by "
                f"{config.early_stopping_threshold:g}; "
                + (f"the best is {best.loss:.4f}, of step {best.step}" if best.step else "none had a finite loss")
            )
        _handle(_wait(run), run)
    watchdog.at("the end of training", limited=False)
    if config.load_best_model_at_end and not stopping:
        _load_best(run, best)
    if norms := adapter_norms(run.model, run.mesh):
        run.log.event({"step": run.log.num_steps, "adapter_norms": norms}, norms_line(norms))
    return stopping


def _resume(run: Run, optimizer: torch.optim.Optimizer, scheduler: Schedule, path: Path) -> tuple[int, int, Best]:
    """Put model, optimizer and schedule where a checkpoint has them: steps and tokens so far, the best evaluation."""
    run.watchdog.at("reading the checkpoint", limited=False)
    _check_trained(recorded_settings(path), run.config, path)
    progress = load_training_state(path, run.model, optimizer)
    _check_order(progress, run, path)
    resume_scheduler(optimizer, scheduler, run.config, progress)
    best = Best(**progress.best)
    if run.saver is not None and not run.saver.restore_best(path, progress.best) and progress.best:
        run.log.line(f"warning: the checkpoint of the best evaluation, of step {best.step}, is gone")
    run.log.line(f"resumed from {path}, step {progress.step}")
    if progress.step >= run.log.num_steps:
        run.log.line(_nothing_to_train(progress.step, run))
    if run.saver is not None and (later := run.saver.later_than(progress.step)):
        run.log.line(f"warning: the next save deletes the newer checkpoints, up to {later[0].name}")
    return progress.step, progress.tokens, best


def _nothing_to_train(step: int, run: Run) -> str:
    asked = "--max-steps" if run.config.max_steps >= 0 else "--num-train-epochs"
    said = f"all {run.log.num_steps} steps of {asked} are done already: nothing is trained"
    if step > run.log.num_steps:
        said = f"warning: the run is at step {step} already, beyond the {run.log.num_steps} of {asked}; it stays there"
    return said + (f", and what is exported is the model of step {step}" if run.config.export else "")


def _had_enough(config: TrainConfig, best: Best) -> bool:
    return 0 < config.early_stopping_patience <= best.since


def _batches(run: Run, step: int) -> list[Batch]:
    assert run.inputs.training is not None
    rows, sharers = run.order.micro_batches(step, run.mesh.topology.data_index(run.ranks.rank)), run.mesh.sharers
    return [collate([run.inputs.training[row] for row in forward], sharers).to(run.ranks.device) for forward in rows]


def _is_due(done: int, every: int, run: Run) -> bool:
    return done % every == 0 or done == run.log.num_steps


def _evaluates_at(done: int, run: Run) -> bool:
    return run.inputs.evaluation is not None and _is_due(done, run.config.eval_steps or run.order.steps_per_epoch, run)


def _saves_at(done: int, run: Run) -> bool:
    """Where nothing is exported, the last checkpoint is all that is kept of the last steps."""
    return done % run.config.save_steps == 0 or (done == run.log.num_steps and not run.config.export)


def _log_step(run: Run, meter: Meter, alarms: Alarms, done: int, learning_rate: Any) -> None:
    epoch = round(done / run.order.steps_per_epoch, 4)
    metrics = {"step": done, "epoch": epoch, "learning_rate": learning_rate} | meter.metrics(run.balance.weights)
    run.log.step(metrics)
    alarms.interval(done, metrics)


def _write_profile(run: Run, profiler: StepProfiler) -> None:
    """Of the steps since the last one was written, if any was profiled."""
    run.watchdog.at("the profile", limited=False)
    profiler.finish()


def _evaluate(run: Run, done: int) -> float:
    assert run.inputs.evaluation is not None
    run.watchdog.at("evaluation")
    found = evaluate(run.model, run.inputs.evaluation, run.config.per_device_eval_batch_size, run.mesh)
    run.log.event(
        {
            "step": done,
            "eval_loss": found.loss,
            "eval_perplexity": found.perplexity,
            "eval_target_tokens": found.targets,
            "eval_seconds": round(found.seconds, 3),
        },
        f"step {done}: eval loss {found.loss:.4f}, perplexity {found.perplexity:,.2f}, "
        f"{found.targets:,} target tokens in {found.seconds:.1f} s",
    )
    if not math.isfinite(found.loss):
        run.log.line(f"warning: step {done}: the evaluation loss is {found.loss}: it counts as not better than any")
    return found.loss


def _generate(run: Run, done: int) -> None:
    prompts = run.prompts
    assert prompts is not None
    run.watchdog.at("sample generations")
    answers = generate(run.model, prompts.tokens, run.config.generate_max_new_tokens, _ends(run, prompts), run.ranks)
    texts = [prompts.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    pairs = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts.texts, texts, strict=True)]
    said = "".join(f"\n  {_short(pair['prompt'])!r} -> {_short(pair['text'])!r}" for pair in pairs)
    run.log.event({"step": done, "generations": pairs}, f"step {done}: sample generations{said}")


def _ends(run: Run, prompts: Prompts) -> Sequence[int]:
    """Tokens that end an answer: the model's own and the tokenizer's."""
    own = getattr(run.model.config.get_text_config(), "eos_token_id", None)
    ends = {*(own if isinstance(own, list) else [own]), prompts.tokenizer.eos_token_id}
    return sorted(end for end in ends if end is not None)


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:100]}…{text[-50:]}"


def _load_best(run: Run, best: Best) -> None:
    assert run.saver is not None
    if best.step == 0:
        run.log.line("warning: no evaluation had a finite loss, so none is the best; the last weights stay")
        return
    path = load_best_model(run.saver.directory, run.model, best.step, run.config.trust_checkpoint_owner)
    if path is None:
        run.log.line(f"warning: the best evaluation, of step {best.step}, left no checkpoint; the last weights stay")
    else:
        run.log.line(f"took the weights of {path}, eval loss {best.loss:.4f}")


def _save(run: Run, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Begin a checkpoint, once the one before it is there; with --no-async-save, also end it."""
    assert run.saver is not None
    _handle(_wait(run), run)
    run.watchdog.at("the beginning of a checkpoint", limited=False)
    run.saver.save(run.model, optimizer, progress)
    if not run.config.async_save:
        _handle(_wait(run), run)


def _wait(run: Run) -> str | None:
    """Until the checkpoint under way is whole, however long it takes; what went wrong with it."""
    if run.saver is None:
        return None
    run.watchdog.at("waiting for the checkpoint", limited=False)
    return run.saver.wait()


def _handle(problem: str | None, run: Run) -> None:
    """A checkpoint that could not be saved; every rank has the same problem."""
    if problem is None:
        return
    if run.config.on_save_error == "stop":
        raise ExpertMeshError(f"{problem}; with --on-save-error continue, training continues without it")
    run.log.line(f"warning: {problem}; training continues, and the checkpoint before it stays")


def _order_facts(run: Run) -> dict[str, int]:
    """What decides which tokens each step sees."""
    assert run.inputs.training is not None
    return {
        "rows": run.order.num_rows,
        "tokens": int(run.inputs.training.lengths.sum()),
        "global_batch_size": run.order.global_batch_size,
        "seed": run.order.seed,
        "packing": int(run.config.packing),
        "group_by_length": int(run.config.group_by_length),
    }


def _check_order(progress: Progress, run: Run, path: Path) -> None:
    """The batches to come must be those that would have come."""
    here = _order_facts(run)
    may_change = ("rows", "tokens") if "data" in run.config.allow_changed else ()
    for name, there in progress.order.items():
        if here[name] != there and name not in may_change:
            raise ExpertMeshError(
                f"--resume {path}: that run had {name.replace('_', ' ')} {there}, this one has {here[name]}; "
                "with other batches it would not be the same run"
                + (f"; --global-batch-size {there} keeps it" if name == "global_batch_size" else "")
            )


_ADAPTER_SETTINGS = ("adapter", "lora_rank", "lora_alpha", "use_rslora", "lora_targets", "base_dtype")


def _check_trained(settings: dict[str, Any], config: TrainConfig, path: Path) -> None:
    """One optimizer's state means nothing to another, to another adapter, or to what was frozen; and weights that were
    trained with positions stretched one way are not meant for another."""
    if settings.get("adapter", "none") != "none" or config.adapter != "none":
        for name in _ADAPTER_SETTINGS:
            if settings.get(name, "none") != getattr(config, name):
                flag = flag_of(name)
                raise ExpertMeshError(
                    f"--resume {path}: that run had {flag} {settings.get(name, 'none')}, this one has "
                    f"{getattr(config, name)}; take the same"
                )
    there = settings.get("optim", "adamw_torch_fused")
    if there != config.optim:
        raise ExpertMeshError(
            f"--resume {path}: that run had --optim {there}, this one has {config.optim}; take the same"
        )
    scaling = settings.get("rope_scaling", "")
    if (read_rope_scaling(scaling) if scaling else None) != config.rope:
        there, here = (
            f"--rope-scaling {text}" if text else "no --rope-scaling" for text in (scaling, config.rope_scaling)
        )
        raise ExpertMeshError(f"--resume {path}: that run had {there}, this one has {here}; take the same")
    frozen = settings.get("freeze", [])
    if sorted(frozen) != sorted(config.freeze):
        there, here = (
            f"--freeze {' '.join(entries)}" if entries else "nothing frozen" for entries in (frozen, config.freeze)
        )
        raise ExpertMeshError(f"--resume {path}: that run had {there}, this one has {here}; take the same")
