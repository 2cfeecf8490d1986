"""The training loop: data in, steps, evaluations, sample generations, checkpoints and figures out."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...checkpoints.training_state.resuming import load_best_model
from ...checkpoints.training_state.saving import Progress, Saver
from ...moe.experts.model_layers import moe_layers, moe_shape
from ...moe.util.errors import ExpertMeshError
from ...moe.util.telling import telling
from ...sharding.replicas import check_replicas
from ...sharding.runtime.agreement import wait_for_all
from ...sharding.runtime.memory import free_on_host
from ...sharding.runtime.preemption import Stopped, StopRequest, boundary
from ...sharding.runtime.process import Ranks
from ...sharding.runtime.watchdog import Watchdog
from ...sharding.torchrun import node_name
from ..config.train_config import TrainConfig
from ..data.batch import Batch, BatchMaker, collate, collate_rows
from ..data.sequences import DataOrder, Rows, share_out
from ..data.stream import Stream, place_in
from ..data.truncation import WRAPPED
from ..engine.engine import Engine
from ..engine.model_card import tell_left_out, tell_loss
from ..metrics import told_of
from ..model_setup.compiling import Compilation, compilation
from ..monitoring.alarms import Alarms
from ..monitoring.attribution import Parts
from ..monitoring.collector import SteadyCollector
from ..monitoring.log import RunLog
from ..monitoring.meter import Meter, measured
from ..monitoring.nonfinite import NonFiniteGuard
from ..monitoring.profiling import StepProfiler
from ..optim.schedule import Schedule, follows_eval_loss, step_scheduler
from ..start.inputs import Inputs, Prompts
from ..start.questions import Questions
from ..start.resume import check_data_order
from ..steps.evaluate import Best, evaluate
from ..steps.generate import Sampling, generate
from ..steps.scores import SHOWN, Scored
from ..steps.step import NO_TARGETS
from ..tasks.task import DataTraits, Task, TaskInputs

T = TypeVar("T")

_EVALUATION, _SCORE, _GENERATIONS = "eval_loss", "eval_score", "generations"
"""What comes between two steps, by its key in metrics.jsonl."""

_QUEUE_SECONDS = 0.1
"""How often a thread that makes batches ahead looks whether they are wanted no more."""


@dataclass(frozen=True)
class Run:
    """Everything that training needs. `prompts` is None where none are asked for. `task_inputs`: what the loss of a
    batch needs beside its tokens."""

    engine: Engine
    inputs: Inputs
    order: DataOrder
    prompts: Prompts | None
    log: RunLog
    watchdog: Watchdog
    task: Task
    task_inputs: TaskInputs

    @property
    def config(self) -> TrainConfig:
        return self.engine.config

    @property
    def batch_maker(self) -> BatchMaker:
        return batch_maker_of_data(self.engine, self.inputs)

    @property
    def model(self) -> Any:
        return self.engine.model

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    @property
    def order_facts(self) -> dict[str, int]:
        """See `order_facts`."""
        assert self.inputs.training is not None
        return order_facts(self.config, self.inputs.training, self.order)

    def stream_state(self, step: int) -> dict[str, int]:
        """Where the stream of data stands before a step, for a checkpoint."""
        stream = self.inputs.stream
        return {} if stream is None else stream.place(step).state()

    @property
    def saver(self) -> Saver | None:
        """What saves training checkpoints; None where none are saved."""
        return self.engine.saver


def batch_maker_of_data(engine: Engine, inputs: Inputs) -> BatchMaker:
    """How our data become batches: no longer than --max-seq-length, or, of packed pairs, twice as much."""
    config = engine.config
    limit = config.max_seq_length * (config.sequences_per_row if config.packing else 1)
    return replace(engine.batch_maker.within(limit), pictures=inputs.images)


def data_order(config: TrainConfig, rows: Rows | None, world_size: int) -> DataOrder:
    """How the sequences are distributed under this configuration."""
    return DataOrder(
        0 if rows is None else len(rows),
        config.topology(world_size).data_size,
        config.per_device_train_batch_size,
        config.micro_batches(world_size),
        config.seed,
        rows.lengths if rows is not None and config.group_by_length else None,
        config.global_batch_size,
    )


def number_of_steps(config: TrainConfig, order: DataOrder) -> int:
    """--max-steps, or as many as --num-train-epochs takes."""
    return config.max_steps if config.max_steps >= 0 else math.ceil(config.num_train_epochs * order.steps_per_epoch)


def order_facts(config: TrainConfig, rows: Rows, order: DataOrder) -> dict[str, int]:
    """What decides which tokens each step sees."""
    return {
        "rows": order.num_rows,
        "tokens": int(rows.lengths.sum()),
        "global_batch_size": order.global_batch_size,
        "seed": order.seed,
        "packing": (False, True, WRAPPED).index(config.packing),
        "group_by_length": int(config.group_by_length),
        "shuffle_buffer": config.shuffle_buffer if config.streaming else 0,
    }


@dataclass(frozen=True)
class Trained:
    """How training ended.

    Attributes:
        finished: whether it came to its end, be it early; False after a signal asked to stop, with a checkpoint saved.
        best: the best evaluation. took_best: whether the model has its weights.
    """

    finished: bool
    best: Best
    took_best: bool


def train(run: Run, resume_from: Path | None) -> Trained:
    """Train the model in place for the number of steps that the log was told, from a checkpoint on if there is one.

    Raises:
        ExpertMeshError: on all ranks, when the checkpoint does not fit the run, training diverges, replicas differ, or
            a checkpoint cannot be saved and --on-save-error says stop.
    """
    scheduler = run.engine.schedule(run.log.num_steps)
    try:
        return _train(run, scheduler, resume_from)
    except KeyboardInterrupt:
        if run.saver is not None:
            run.saver.abandon()
        raise
    except ExpertMeshError:
        # what all ranks have met leaves them all there to finish the checkpoint under way
        with suppress(RuntimeError):
            _wait(run)
        raise


def _train(run: Run, scheduler: Schedule, resume_from: Path | None) -> Trained:
    engine, config, log, watchdog = run.engine, run.config, run.log, run.watchdog
    best, owed = (_no_best(run), []) if resume_from is None else _resume(run, resume_from)
    assert run.inputs.training is not None
    data = DataTraits.of(run.inputs.training.samples)
    first_step, top_k = engine.step_number, moe_shape(run.model).top_k
    run.model.train()
    is_untrained = config.eval_on_start and config.evaluates and resume_from is None
    log.begin_after(first_step, [_EVALUATION, _SCORE, _GENERATIONS] if is_untrained else owed)
    if is_untrained:
        for name in _can_be_due(run):
            _make(name, run, 0, _no_best(run))  # never the best, as no checkpoint has it
    stopping = bool(owed) and not _make_up(run, scheduler, best, owed)
    enough = _had_enough(config, best)
    compiled: Compilation | None = None
    groups = [layer.kind.num_groups for layer in moe_layers(run.model)]
    guard, alarms = NonFiniteGuard(config, run.model, log.line), Alarms(config, engine.balance, top_k, groups, log)
    meter = Meter(engine.counts, run.model.config.get_text_config(), top_k, run.ranks.device, config.bf16, log.warn)
    profiler = StepProfiler(config, partial(Parts, run.model), run.ranks, log.output_dir, log.line)
    begin = log.num_steps if enough or stopping else first_step
    with StopRequest() as stop, SteadyCollector() as collector, profiler, _batches(run, begin) as following:
        for step in log.steps(begin):
            done = step + 1
            watchdog.at("reading the batch", done)
            learning_rate = scheduler.get_last_lr()[0]
            with meter.waiting():
                batches = next(following)
            # of a stream, each batch may have weights, or none
            objective = run.task.objective(config, replace(data, is_weighted=batches[0].is_weighted))
            with profiler.step(done):
                result = engine.train_step(batches, watchdog.at, stop.is_asked, objective)
            guard.check(done, result)
            meter.add(result)
            collector.step(done)
            if config.compile and compiled is None:
                with telling("nothing is said of what was compiled", log.warn):
                    compiled = compilation()
                    log.detail(f"compiled {compiled}")

            # what is saved or evaluated must also be logged: a run resumed from there begins with an empty meter
            evaluates, saves = _evaluates_at(done, run), run.saver is not None and _saves_at(done, run)
            if evaluates or saves or _is_due(done, config.logging_steps, run):
                _log_step(run, meter, done, learning_rate)
            alarms.step(done, result)
            generates = run.prompts is not None and _is_due(done, config.generate_steps, run)
            owed = [name for name in _can_be_due(run) if (generates if name == _GENERATIONS else evaluates)]
            eval_loss, is_better, stopping = None, False, result.is_stopping
            if profiler.is_due or saves or owed:
                # what comes between two steps is no part of either
                with meter.paused():
                    _write_profile(run, profiler)
                    if not stopping:
                        eval_loss, is_better, owed = _between_steps(run, stop, done, best, owed)
                        stopping = stop.on_any_rank()
            step_scheduler(scheduler, eval_loss)
            enough = _had_enough(config, best)
            if stopping and not meter.is_empty:
                _log_step(run, meter, done, learning_rate)
            if run.saver is not None and config.async_save and step == begin:
                _check_host_memory(run, run.saver)
            is_saving = run.saver is not None and (stopping or is_better or enough or saves)
            # before a save, so that replicas gone bad never take the place of good ones
            if config.check_replicas and (is_saving or _is_due(done, config.check_replicas, run)):
                numbers = {"the learning rate": float(scheduler.get_last_lr()[0]), "the number of steps": done}
                with meter.paused():
                    check_replicas(run.model, engine.topology, run.ranks.device, done, numbers)
            if is_saving:
                with meter.paused():
                    _save(run, _progress(run, best, owed), not stopping and (enough or done == log.num_steps))
            elif run.saver is not None and config.async_save:
                run.saver.prepare(run.model, engine.optimizer)
            if stopping or enough:
                break
        alarms.end(engine.step_number)
        _write_profile(run, profiler)
        with telling("nothing is said of what was compiled", log.warn):
            if compiled is not None and compilation().is_more_than(compiled):
                log.detail(f"compiled {compilation()} in the whole run")
        if enough:
            log.line(
                f"stopped early: the last {best.since} evaluation{'s' * (best.since > 1)} not better by "
                f"{config.early_stopping_threshold:g}; "
                + (f"the best is {best.figure:.4f}, of step {best.step}" if best.step else "none had a finite loss")
            )
        _handle(_wait(run), run, not stopping)
    watchdog.at("the end of training", limited=False)
    took_best = config.load_best_model_at_end and not stopping and _load_best(run, best)
    return Trained(not stopping, best, took_best)


def _between_steps(
    run: Run, stop: StopRequest, done: int, best: Best, due: list[str]
) -> tuple[float | None, bool, list[str]]:
    """Make what is due after a step. All ranks call it together.

    Returns:
        The evaluation's loss, whether it is the best so far, and what a signal has cut or kept from beginning, which
        leaves no trace.
    """
    eval_loss, is_better, owed = None, False, list(due)
    with suppress(Stopped), stop.cutting():
        for name in due:
            boundary()
            loss, found_better = _make(name, run, done, best)
            eval_loss, is_better = eval_loss if loss is None else loss, is_better or found_better
            owed.remove(name)
    return eval_loss, is_better, owed


def _make(name: str, run: Run, done: int, best: Best) -> tuple[float | None, bool]:
    """What comes between two steps; the loss of an evaluation, and whether it is the best so far."""
    if name == _EVALUATION:
        return _evaluate(run, done, best)
    if name == _SCORE:
        return None, _answer(run, done, best)
    _generate(run, done)
    return None, False


def _can_be_due(run: Run) -> list[str]:
    """What the run is asked to make between steps, in that order."""
    has = {_EVALUATION: run.inputs.evaluation, _SCORE: run.inputs.questions, _GENERATIONS: run.prompts}
    return [name for name, asked in has.items() if asked is not None]


def _make_up(run: Run, scheduler: Schedule, best: Best, owed: list[str]) -> bool:
    """Make what a signal has cut after the step that the run resumes from, and save that step as one that owes nothing;
    False: cut again."""
    due = [name for name in owed if name in _can_be_due(run)]
    with StopRequest() as stop:
        eval_loss, _, owed = _between_steps(run, stop, run.engine.step_number, best, due)
        if not owed:
            if follows_eval_loss(run.config):  # others have stepped
                step_scheduler(scheduler, eval_loss)
            if run.saver is not None:
                _save(run, _progress(run, best), run.engine.step_number == run.log.num_steps)
        return not owed and not stop.on_any_rank()


def _progress(run: Run, best: Best, owed: Sequence[str] = ()) -> Progress:
    order = run.order_facts | run.stream_state(run.engine.step_number)
    return run.engine.progress(order, best.state(), owed)


def _resume(run: Run, path: Path) -> tuple[Best, list[str]]:
    """Put model, optimizer and schedule where a checkpoint has them; the best evaluation so far, and what is owed after
    its step (see `Progress`)."""
    run.watchdog.at("reading the checkpoint", limited=False)
    progress = run.engine.load_state(path)
    check_data_order(progress.order, run.order_facts, run.config, path)
    if run.inputs.stream is not None:
        run.inputs.stream.begin_at(progress.step, place_in(progress.order))
    best = Best(**progress.best)
    if best.by_score != run.config.best_by_score:
        if best.step:
            run.log.line(f"warning: no evaluation is the best yet: that of step {best.step} was by another metric")
        best = _no_best(run)
    if run.saver is not None and not run.saver.restore_best(path, best.state()) and best.step:
        run.log.line(f"warning: the checkpoint of the best evaluation (step {best.step}) was deleted")
    run.log.line(f"resumed from {path}, step {progress.step}")
    if progress.step >= run.log.num_steps:
        run.log.line(_nothing_to_train(progress.step, run))
    if run.saver is not None and (later := run.saver.later_than(progress.step)):
        run.log.line(f"warning: the next save deletes the newer checkpoints, up to {later[0].name}")
    return best, progress.owed


def _nothing_to_train(step: int, run: Run) -> str:
    asked = "--max-steps" if run.config.max_steps >= 0 else "--num-train-epochs"
    line = f"all {run.log.num_steps} steps of {asked} are already done: nothing is trained"
    if step > run.log.num_steps:
        line = (
            f"warning: the run is already at step {step}, beyond the {run.log.num_steps} of {asked}; nothing is trained"
        )
    return line + (f", and the export has the model of step {step}" if run.config.export else "")


def _had_enough(config: TrainConfig, best: Best) -> bool:
    return 0 < config.early_stopping_patience <= best.since


@contextmanager
def _batches(run: Run, first_step: int) -> Iterator[Iterator[list[Batch]]]:
    """This rank's micro-batches of each step from one on, on its device; for a GPU they are made by a thread, which has
    the next steps' in pinned memory before they are asked for."""
    device, steps = run.ranks.device, range(first_step, run.log.num_steps)
    if device.type != "cuda":
        yield ([batch.to(device) for batch in _collated(run, step)] for step in steps)
        return

    def pinned(step: int) -> list[Batch]:
        return [batch.pinned() for batch in _collated(run, step)]

    # each thread has a current GPU of its own, on which pinning would else make a context
    with made_ahead(pinned, steps, partial(torch.cuda.set_device, device)) as ahead:
        yield ([batch.to(device) for batch in batches] for batches in ahead)


def _collated(run: Run, step: int) -> list[Batch]:
    assert run.inputs.training is not None
    if run.inputs.stream is not None:
        return _streamed(run, run.inputs.stream, step)
    rows, cp_group = run.order.micro_batches(step, run.engine.data_rank), run.engine.mesh.cp_group
    data, maker = run.inputs.training, run.batch_maker
    inputs_of = run.task_inputs.training.within(data, run.order.global_batch(step))
    return [collate_rows(data, forward, cp_group, maker, inputs_of(forward)) for forward in rows]


def _streamed(run: Run, stream: Stream, step: int) -> list[Batch]:
    order, cp_group = run.order, run.engine.mesh.cp_group
    entries = stream.batch(step, order.global_batch_size)
    tell_left_out(run.engine, stream.left_out)
    # alike on all ranks, which have all entries
    is_weighted = any(rows.samples.is_weighted for rows, _ in entries)
    if is_weighted:
        run.task.check_weighted(run.config)
    mine = share_out(entries, order.num_readers, order.per_device, run.engine.data_rank)
    sequences = [[sequence for rows, number in part for sequence in rows.sequences(number)] for part in mine]
    assert run.inputs.training is not None
    inputs = run.task_inputs.training.within(run.inputs.training, [])([])  # of a stream no loss needs more than tokens
    return [collate(part, cp_group, run.batch_maker, inputs, is_weighted) for part in sequences]


@contextmanager
def made_ahead(
    make: Callable[[int], T], numbers: Iterable[int], prepare: Callable[[], object] = lambda: None
) -> Iterator[Iterator[T]]:
    """Within it, `make` of each number, in their order, up to two ahead of what was taken.

    An error in the thread is raised where its result would have been taken, with its own traceback. The thread ends
    with the context, whatever was not taken.

    Args:
        prepare: is called once, in the thread.
    """
    made: queue.Queue[tuple[T, None] | tuple[None, BaseException]] = queue.Queue(maxsize=1)
    ended = threading.Event()

    def put(result: tuple[T, None] | tuple[None, BaseException]) -> None:
        while not ended.is_set():
            try:
                made.put(result, timeout=_QUEUE_SECONDS)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            prepare()
            for number in numbers:
                if ended.is_set():
                    return
                put((make(number), None))
            put((None, StopIteration()))
        except BaseException as error:  # the loop is to end with it, whatever it is
            put((None, error))

    def take() -> Iterator[T]:
        while True:
            result, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield result  # type: ignore[misc]

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        ended.set()
        thread.join()


def _is_due(done: int, every: int, run: Run) -> bool:
    return done % every == 0 or done == run.log.num_steps


def _evaluates_at(done: int, run: Run) -> bool:
    return run.config.evaluates and _is_due(done, run.config.eval_steps or run.order.steps_per_epoch, run)


def _saves_at(done: int, run: Run) -> bool:
    """Also the last step: a run of more steps goes on from there."""
    return _is_due(done, run.config.save_steps, run)


def _log_step(run: Run, meter: Meter, done: int, learning_rate: Any) -> None:
    stream = run.inputs.stream
    epoch = round(done / run.order.steps_per_epoch, 4) if stream is None else float(stream.epoch(done))
    metrics = {"step": done} | meter.metrics(run.engine.balance.weights, epoch, learning_rate)
    run.log.step(metrics)


def _write_profile(run: Run, profiler: StepProfiler) -> None:
    """Write the profile of the steps since the last one was written, if any was profiled."""
    run.watchdog.at("the profile", limited=False)
    profiler.finish()


def _no_best(run: Run) -> Best:
    """Before the first evaluation."""
    return Best(by_score=run.config.best_by_score)


def _evaluate(run: Run, done: int, best: Best) -> tuple[float, bool]:
    """The evaluation's loss, and whether it is the best so far."""
    assert run.inputs.evaluation is not None
    run.watchdog.at("evaluation")
    rows, config = run.inputs.evaluation, run.config
    assert run.task_inputs.evaluation is not None
    objective = run.task.objective(config, DataTraits.of(rows.samples))
    inputs_of = run.task_inputs.evaluation.within(rows, range(len(rows)))
    how = config.per_device_eval_batch_size, run.engine.mesh, run.batch_maker
    evaluation = evaluate(run.model, rows, *how, objective, inputs_of)
    tell_loss(run.engine, "evaluation loss", evaluation.loss)
    is_better = not best.by_score and best.update(evaluation.loss, done, config.early_stopping_threshold)
    of_evaluation = measured("evaluation", evaluation, run.ranks.device, figures=evaluation.figures, warn=run.log.warn)
    figures = {"step": done} | of_evaluation
    found = str(evaluation)
    if evaluation.figures:
        found = ", ".join([f"eval loss {evaluation.loss:.4f}", *told_of(figures, verbose=True)])
    run.log.event(figures, f"step {done}: {found}{'' if best.by_score else _compared(run, best, done)}")
    if not math.isfinite(evaluation.loss):
        why = "" if evaluation.targets else f" ({NO_TARGETS})"
        run.log.line(
            f"warning: step {done}: the evaluation loss is {evaluation.loss}{why}, which counts as worse than any other"
        )
    return evaluation.loss, is_better


def _compared(run: Run, best: Best, done: int) -> str:
    """An evaluation beside the best so far, to follow its figures."""
    return f"; {best.compared(done, run.config.early_stopping_patience) if done else 'before training'}"


def _answer(run: Run, done: int, best: Best) -> bool:
    """Have the model answer --eval-generate, and score it; whether that is the best evaluation so far."""
    questions, config = run.inputs.questions, run.config
    assert questions is not None
    run.watchdog.at("answers to --eval-generate")
    begun = time.perf_counter()
    ends = run.engine.end_tokens(questions.tokenizer)
    how = config.generate_max_new_tokens, ends, run.ranks, config.per_device_eval_batch_size
    sampling = Sampling(config.eval_temperature, f"{config.seed} {done}") if config.eval_temperature else None
    answers = generate(run.model, questions.prompts, *how, sampling)
    score, problem = _scored(run, questions, answers)
    unended = sum(answer[-1] not in ends for answer in answers)
    shown = questions.shown(answers, SHOWN)
    seconds = round(time.perf_counter() - begun, 3)
    scored = Scored(score, len(answers), unended, seconds, shown)
    tell_loss(run.engine, "evaluation score", score)
    is_better = best.by_score and best.update(-score, done, config.early_stopping_threshold)
    figures = {"step": done} | measured("answers", scored, run.ranks.device, warn=run.log.warn)
    figures |= {"answers": scored.shown, "generate_seconds": seconds}
    run.log.event(figures, f"step {done}: {scored}{_compared(run, best, done) if best.by_score else ''}")
    if problem:
        run.log.line(f"warning: step {done}: --eval-score {config.eval_score}: {problem}; there is no score")
    return is_better


def _scored(run: Run, questions: Questions, answers: Sequence[Sequence[int]]) -> tuple[float, str]:
    """The mean score, the same on all ranks, and why it is NaN: a function of the user's own has failed."""
    found: list[Any] = [(math.nan, "")]
    run.watchdog.at("the scores of answers", limited=False)
    if run.ranks.rank == 0:
        try:
            found = [(questions.score_of(answers), "")]
        except Exception as error:  # of another's code
            found = [(math.nan, f"{type(error).__name__}: {error}")]
    wait_for_all(run.ranks)
    dist.broadcast_object_list(found, src=0)
    score, problem = found[0]
    return score, problem


def _generate(run: Run, done: int) -> None:
    prompts = run.prompts
    assert prompts is not None
    run.watchdog.at("sample generations")
    begun = time.perf_counter()
    ends = run.engine.end_tokens(prompts.tokenizer)
    answers = generate(run.model, prompts.tokens, run.config.generate_max_new_tokens, ends, run.ranks)
    samples, lines = [], ""
    with telling("sample generations are missing", run.log.warn):
        own = _without_beginning(prompts.texts)
        for prompt, shown, answer, reference in zip(prompts.texts, own, answers, prompts.references, strict=True):
            # special tokens are a part of it: the end, channels
            text = prompts.tokenizer.decode(answer)
            samples.append({"prompt": prompt, "text": text})
            lines += f"\n  {_short(shown)!r} -> {_short(text)!r}"
            if reference is not None:
                samples[-1]["reference"] = reference
                lines += f", in the data {_short(reference)!r}"
    seconds = round(time.perf_counter() - begun, 3)
    metrics = {"step": done, "generations": samples, "generate_seconds": seconds}
    run.log.event(metrics, f"step {done}: sample generations{lines}")


def _without_beginning(texts: Sequence[str]) -> list[str]:
    """Without the lines that all begin with, such as a template's system prompt."""
    lines = [text.splitlines(keepends=True) for text in texts]
    alike = list(takewhile(lambda each: len(set(each)) == 1, zip(*(each[:-1] for each in lines), strict=False)))
    begun = len(alike) if len(texts) > 1 else 0
    return ["…" * (begun > 0) + "".join(each[begun:]) for each in lines]


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:100]}…{text[-50:]}"


def _load_best(run: Run, best: Best) -> bool:
    """Take the weights of the best evaluation; whether there were any to take."""
    assert run.saver is not None
    if best.step == 0:
        run.log.line("warning: no evaluation had a finite loss; the run keeps the last weights")
        return False
    path = load_best_model(run.saver.directory, run.model, best.step, run.ranks)
    if path is None:
        run.log.line(
            f"warning: the best evaluation (step {best.step}) has no checkpoint; the run keeps the last weights"
        )
    else:
        is_best = "score is the highest" if best.by_score else "loss is the lowest"
        run.engine.results = {"weights": f"of step {best.step:,}, whose evaluation {is_best}: {best.figure:.4f}"}
        run.log.line(f"loaded the best weights from {path}, eval {best}")
    return path is not None


def _save(run: Run, progress: Progress, is_end: bool) -> None:
    """Begin a checkpoint, once the one before it is there; with --no-async-save, also end it.

    Args:
        is_end: whether an export is all that follows.
    """
    assert run.saver is not None
    begun = time.perf_counter()
    _handle(_wait(run), run)
    run.watchdog.at("the beginning of a checkpoint", limited=False)
    run.saver.save(run.model, run.engine.optimizer, progress, copies=run.config.async_save)
    if not run.config.async_save:
        _handle(_wait(run), run, is_end)
    run.log.note({"step": run.engine.step_number, "save_seconds": round(time.perf_counter() - begun, 3)})


def _check_host_memory(run: Run, saver: Saver) -> None:
    """Warn of nodes whose memory may not hold the copies of a checkpoint, before the first one. All ranks call it
    together, once the optimizer has its state."""
    nodes: list[Any] = [None] * run.ranks.world_size
    needed, free = 0, math.inf
    with telling("the host memory for copies of a checkpoint is not known", run.log.line):
        needed, free = saver.bytes_to_copy(run.model, run.engine.optimizer), free_on_host()
    dist.all_gather_object(nodes, (node_name(), needed, free))
    for node in dict.fromkeys(name for name, _, _ in nodes):
        copies = sum(size for name, size, _ in nodes if name == node)
        free = min((bytes_free for name, _, bytes_free in nodes if name == node), default=math.inf)
        if copies > free:
            run.log.line(
                f"warning: {node} has {free / 2**20:,.1f} MiB of host memory available, and its ranks "
                f"copy {copies / 2**20:,.1f} MiB there for each checkpoint, so the first save may run "
                "out of memory; --no-async-save needs no copies, but training waits for each save"
            )


def _wait(run: Run) -> str | None:
    """Wait until the checkpoint under way is complete, however long it takes; returns what went wrong with it."""
    if run.saver is None:
        return None
    run.watchdog.at("waiting for the checkpoint", limited=False)
    return run.saver.wait()


def _handle(problem: str | None, run: Run, is_end: bool = False) -> None:
    """A checkpoint that could not be saved; every rank has the same problem.

    Args:
        is_end: see `_save`.
    """
    if problem is None:
        return
    is_export_left = is_end and run.config.export
    # at the end there is nothing to stop but the export, which is not to be lost with it
    if run.config.on_save_error == "stop" and not is_export_left:
        raise ExpertMeshError(f"{problem}; to train on without it, give --on-save-error continue")
    following = "the export follows" if is_export_left else "training continues"
    run.log.line(f"warning: {problem}; {following}, and the previous checkpoint stays")
