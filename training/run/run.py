"""A run of train_ep.py from its settings to its export."""

import sys
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...checkpoints.files.directories import write_errors
from ...checkpoints.training_state.saving import checkpoint_name
from ...moe.util.errors import ExpertMeshError
from ...moe.util.telling import telling
from ...moe.util.terminal import folded, going_on_unread
from ...sharding.runtime.debugger import check_debug_ranks, debugging
from ...sharding.runtime.memory import measured_peak
from ...sharding.runtime.preemption import Stopped, StopRequest, boundary, leave
from ...sharding.runtime.process import Ranks, end_process_group, raise_together, start_process_group, use_own_cores
from ...sharding.runtime.watchdog import STUCK, Watchdog, collectives_limit
from ...sharding.torchrun import STOPPED
from ..config.train_config import TrainConfig
from ..data.image_files import samples_cache
from ..data.preview import print_preview
from ..data.sequences import DataOrder
from ..engine.engine import Engine, start_engine
from ..engine.model_card import tell_left_out
from ..monitoring.log import NOTABLE, RunLog
from ..monitoring.profiling import check_profile
from ..optim.schedule import check_schedule
from ..planning.rank_memory import Forecast, beside, forecast_rank
from ..start.consistency import compare_data, start_facts
from ..start.inputs import Inputs, make_prompts, open_model, read_inputs
from ..start.resume import find_resume, how_it_goes_on
from ..tasks.registry import task_of
from ..tasks.task import Preparation, Task, TaskInputs
from .banner import data_line, data_sets, detail_lines, dispatch_lines, first_lines, pipeline_lines, replica_lines
from .disk import disk_lines
from .finished import Finished, complete_report, find_finished, held_line, recorded_date, way_to_export
from .loop import Run, Trained, batch_maker_of_data, data_order, number_of_steps, order_facts, train
from .output import clear_output, output_directory


def run(config: TrainConfig) -> int:
    """Join the other ranks and do all that was asked for; the exit code is 0 or STOPPED.

    Raises:
        ExpertMeshError: something that was asked for does not work here; every rank raises it.
    """
    # nobody at a debugger is to be hurried by a time limit
    limit = None if config.debug_ranks else config.ddp_timeout
    alike = start_facts(config)
    ranks = start_process_group(config.use_cpu, collectives_limit(limit), alike)
    watchdog = Watchdog(ranks, limit)
    try:
        unread = f"standard output is no longer read; the run continues, see {config.output_dir}/metrics.jsonl"
        reading = going_on_unread("" if config.ends_after_data else f"train_ep.py: {unread}")
        with reading, StopRequest(leave), watchdog.watching():
            with ExitStack() as closing:
                finished = run_training(config, ranks, watchdog, closing)
            end_process_group()
    except Stopped:
        text = watchdog.stopped()
        if ranks.rank == 0:
            tell(text)
        return STOPPED
    except ExpertMeshError:
        # every rank raised it; should one be gone by now, the error is still what to tell
        with suppress(RuntimeError):
            end_process_group()
        raise
    return 0 if finished else STOPPED


def run_training(config: TrainConfig, ranks: Ranks, watchdog: Watchdog, closing: ExitStack) -> bool:
    """Check everything that was asked for, and do it. False: stopped by a signal before the last step.

    What is held for as long as the run takes is given to `closing`.
    """
    unheeded = [*config.without_effect, *config.without_effect_on(ranks.device.type)]
    if ranks.rank == 0 and unheeded:
        print(folded(f"note: {'; '.join(unheeded)}"), flush=True)
    if config.ends_after_data and ranks.world_size == 1:
        # samples are the same on any number of ranks
        config, without = config.on_one_rank()
        if without and config.preview:
            alone = "figures per rank and per step are for one rank"
            print(folded(f"note: a preview in one process ignores {' '.join(without)}: {alone}"), flush=True)
    watchdog.at("the checks before training", limited=False)
    with raise_together(patient=ranks):
        check_debug_ranks(config.debug_ranks, ranks.world_size)
    if config.prepare_only:
        prepare(config, ranks, watchdog)
        return True
    if config.preview:
        preview(config, ranks, watchdog)
        return True
    return load_and_train(config, ranks, watchdog, closing)


def preview(config: TrainConfig, ranks: Ranks, watchdog: Watchdog) -> None:
    """Print what would be trained on, and how, without training."""
    engine = start_engine(config, ranks, tell)
    inputs, order = read_data(engine, task_of(config), watchdog, "")
    num_steps = number_of_steps(engine.config, order)
    check_steps(engine.config, num_steps, ranks)
    memory = forecast_memory(engine, inputs, watchdog, num_steps)
    if ranks.rank == 0:
        lines = [*first_lines(engine, inputs, order, memory), *detail_lines(engine, inputs, order, memory)]
        print(folded("\n".join(lines)), flush=True)
        if inputs.training is not None:
            if inputs.stream is not None:
                print(f"note: --streaming: of the first {config.shuffle_buffer:,} records")
            print_preview(inputs.training, order, inputs.tokenizer, config.max_seq_length)


def load_and_train(config: TrainConfig, ranks: Ranks, watchdog: Watchdog, closing: ExitStack) -> bool:
    """Load, train, export; as `run_training`."""
    task = task_of(config)
    engine = start_engine(config, ranks, tell, config.dataset)
    if engine.config.offload and ranks.device.type == "cuda":
        use_own_cores()
    output_dir = closing.enter_context(output_directory(engine.config, ranks))
    watchdog.directory, watchdog.goes_on = output_dir / STUCK, partial(how_it_goes_on, output_dir)
    began = recorded_date(engine.config, engine.resumed) if ranks.rank == 0 else ""
    inputs, order = read_data(engine, task, watchdog, began)
    config = engine.config
    num_steps, prompts = number_of_steps(config, order), make_prompts(config, inputs)
    watchdog.at("comparing the data", limited=False)
    engine.facts |= compare_data(inputs, prompts, num_steps, ranks)
    if inputs.training is not None:
        engine.facts |= task.open(config, engine.source, inputs, ranks)
    if config.resume == "auto" and inputs.training is not None:
        compared = (num_steps, engine.facts, order_facts(config, inputs.training, order))
        if done := find_finished(config, output_dir, *compared, ranks, engine.tell):
            engine.tell(done)
            if ranks.rank == 0:
                complete_report(output_dir, engine.tell)
            return True
    check_steps(config, num_steps, ranks)
    memory = forecast_memory(engine, inputs, watchdog, 0 if inputs.training is None else num_steps)
    if ranks.rank == 0:
        lines: list[str] = []
        with telling("lines about the run are missing", tell):
            lines += first_lines(engine, inputs, order, memory)
            details = detail_lines(engine, inputs, order, memory)
            lines += [line for line in details if config.verbose or line.startswith(NOTABLE)]
        print(folded("\n".join(lines)), flush=True)
    # only training needs gradients and optimizer state
    if inputs.training is not None and not config.force:
        with raise_together():
            memory.check(ranks.world_size, config)
    log = RunLog(config, output_dir, num_steps, ranks, engine.flash_attention)
    resume_from: Path | None = None
    if config.resume:
        resume_from = find_resume(config.resume, output_dir / "checkpoints", engine.tell, ranks)
    at = partial(watchdog.at, limited=False)
    at("opening the model")
    engine.open(resume_from, watchdog.limit)
    ends = [] if inputs.training is None else engine.answers_end_in(inputs.training.samples.ends, inputs.tokenizer)
    exports = engine.plan_exports(inputs.saved_tokenizer, config.merge) if config.export else {}
    num_saved = 0 if inputs.training is None else num_steps
    for line in disk_lines(config, output_dir, engine.checkpoint_bytes, exports, num_saved, ranks):
        log.line(line)
    maker = batch_maker_of_data(engine, inputs)
    preparation = Preparation(engine, maker, inputs, output_dir, resume_from, num_steps, at, log.detail)
    if inputs.training is not None:
        task.before_loading(preparation)
    at("loading the model")
    engine.place(resume_from, watchdog.limit)
    with telling("lines about the run are missing", log.line):
        for line in (*pipeline_lines(engine), *dispatch_lines(engine), *replica_lines(engine)):
            log.detail(line)
    for line in filter(None, (engine.untrained, engine.encoding, *ends)):
        log.detail(line)
    with raise_together(patient=ranks), write_errors(output_dir):
        if ranks.rank == 0:
            clear_output(config, output_dir)
    if config.save_steps:
        engine.saves_to(output_dir / "checkpoints", inputs.saved_tokenizer)
    task_inputs = TaskInputs() if inputs.training is None else task.inputs(preparation)
    run = Run(engine, inputs, order, prompts, log, watchdog, task, task_inputs)
    # an error is told before the log is closed, which may wait for a tracker
    with log, watchdog.ending_clearly():
        return train_and_export(run, memory, resume_from, output_dir)


def read_data(engine: Engine, task: Task, watchdog: Watchdog, began: str) -> tuple[Inputs, DataOrder]:
    """The data, which the task can learn from, and the order in which steps see them.

    Args:
        began: see `read_inputs`.
    """
    watchdog.at("reading the data", limited=False)
    inputs = read_inputs(engine.config, engine.source, engine.ranks, task.check, began)
    engine.config = replace(engine.config, template_date=inputs.template_date)
    if inputs.training is not None:
        tell_left_out(engine, sum(len(origin.bad) for origin in inputs.training.samples.origins))
    return inputs, data_order(engine.config, inputs.training, engine.ranks.world_size)


def check_steps(config: TrainConfig, num_steps: int, ranks: Ranks) -> None:
    """
    Raises:
        ExpertMeshError: something is asked for that so many steps cannot do.
    """
    check_schedule(config, num_steps, config.has_evaluation_data)
    check_profile(config, num_steps, ranks.world_size)


def forecast_memory(engine: Engine, inputs: Inputs, watchdog: Watchdog, num_steps: int) -> Forecast:
    """What a rank will hold in so many steps."""
    watchdog.at("forecasting the memory", limited=False)
    known = (engine.source, engine.topology, engine.kernel, engine.config, inputs, engine.ranks, engine.batch_maker)
    # in the compute dtype, of one stage
    dense = (engine.counts.total - engine.counts.experts) * (2 if engine.config.bf16 else 4) / engine.topology.pp_size
    return forecast_rank(*known).of_run(engine.config, num_steps, dense)


def prepare(config: TrainConfig, ranks: Ranks, watchdog: Watchdog) -> None:
    """Tokenize the data into the cache of each node, and say what is there. Of the model, config.json and tokenizer are
    read."""
    with raise_together(patient=ranks):
        source = open_model(config, weights=False)
    watchdog.at("reading the data", limited=False)
    inputs = read_inputs(config, source, ranks, task_of(config).check)
    order = data_order(config, inputs.training, ranks.world_size)
    if ranks.rank == 0:
        lines = [f"data    {data_line(inputs, order)}", *data_sets(inputs, config)]
        date = f" and --template-date {inputs.template_date}" if inputs.template_date else ""
        lines.append(f"prepared: a run with the same data flags{date} finds these samples in {samples_cache()}")
        print(folded("\n".join(lines)), flush=True)


def train_and_export(run: Run, memory: Forecast, resume_from: Path | None, output_dir: Path) -> bool:
    """False: stopped by a signal before the last step."""
    engine, log, watchdog, config, ranks = run.engine, run.log, run.watchdog, run.config, run.ranks
    if run.inputs.training is not None:
        with watchdog.following(engine.model), debugging(config.debug_ranks):
            trained = train(run, resume_from)
        peak = measured_peak(ranks.device)
        with telling("the memory is not compared with its forecast", log.line):
            log.line(beside(memory, peak))
        if not trained.finished:
            kept = "--resume auto resumes from here" if engine.saver else "nothing was saved (--save-steps 0)"
            log.line(f"stopped by a signal; {kept} (exit code {STOPPED})")
            return False
    done = None if run.inputs.training is None else record(run, trained, output_dir)
    if config.export:
        watchdog.at("the export", limited=False)
        with raise_together():
            log.check_directory()
            if done is not None and ranks.rank == 0:
                with telling():  # what the export then meets too
                    done.announce(output_dir)
        # it can be made again where a checkpoint has what it exports; else a signal lets it come to its end
        with nullcontext() if run.inputs.training is None or _is_saved(run, output_dir) else StopRequest():
            boundary()
            try:
                lines = export(engine, output_dir, run.inputs.saved_tokenizer)
            except ExpertMeshError as error:
                if run.inputs.training is None:
                    raise
                raise ExpertMeshError(f"{error}; {way_to_export(output_dir)}") from error
            for line in lines:
                log.line(line)
    elif engine.saver is None and run.inputs.training is not None:
        log.line("the trained weights are not saved (--no-export --save-steps 0)")
    log.state = "finished"
    if done is not None:
        finish(run, done, output_dir)
    return True


def _is_saved(run: Run, output_dir: Path) -> bool:
    """Whether the last step has a training checkpoint."""
    return (output_dir / "checkpoints" / checkpoint_name(run.engine.step_number)).exists()


def record(run: Run, trained: Trained, output_dir: Path) -> Finished:
    """What is recorded of a run that has come to its end."""
    engine = run.engine
    holds = "no more is known of what it holds"
    with telling("nothing says whose weights are exported", run.log.line):
        holds = held_line(output_dir, engine.config, engine.step_number, trained.best, trained.took_best)
    recorded = (asdict(engine.config), engine.facts, run.order_facts)
    return Finished(engine.step_number, run.log.num_steps, holds, *recorded)


def finish(run: Run, done: Finished, output_dir: Path) -> None:
    """Say whose weights are exported, and record that the run has come to its end, which `--resume auto` then finds."""
    engine = run.engine
    run.log.line(done.holds)
    saved = output_dir / "checkpoints" / checkpoint_name(engine.step_number)
    # where the weights could not be saved, nothing is at its end
    if run.ranks.rank == 0 and (engine.config.export or engine.saver is None or saved.exists()):
        with telling("finished.json was not written", run.log.line):  # the run has lost nothing by it
            done.write(output_dir)


def export(engine: Engine, output_dir: Path, tokenizer: Any) -> list[str]:
    """Write the model, or its adapters and, if asked for, the model that they make; what to say of it."""
    hf, adapter = output_dir / "hf", output_dir / "adapter"
    if engine.config.adapter == "none":
        return [*engine.export(hf, tokenizer, overwrite=True), f"exported to {hf}"]
    lines = engine.export(adapter, tokenizer, overwrite=True)
    if not engine.config.merge:
        return [*lines, f"exported to {adapter}"]
    return [*lines, *engine.merge(adapter, hf, tokenizer), f"exported to {adapter}", f"exported to {hf}"]


def tell(line: str) -> None:
    """Print a line for the user: a warning to standard error."""
    print(folded(line), file=sys.stderr if line.startswith("warning: ") else sys.stdout, flush=True)
