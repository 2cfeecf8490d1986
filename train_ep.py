"""Fine-tune a Hugging Face mixture-of-experts model with expert parallelism.

    torchrun --nproc-per-node 8 train_ep.py --model DIR --dataset data.jsonl --ep-size 8
    python train_ep.py --model DIR --dataset data.jsonl            # one process

`--help` lists the flags.

Names are asked of their packages where they are used, and imported then (see `moe.base.lazy`): what is wrong with the
flags is told before torch is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

if not __package__:  # a script in a checkout, which goes by the modules beside it, whatever is installed
    sys.path.insert(0, str(Path(__file__).parent / "training" / "public"))

from expertmesh import checkpoints, sharding, training
from expertmesh.moe import ExpertMeshError
from expertmesh.moe.base.command import run_command
from expertmesh.moe.base.terminal import ends_with_reader, folded, going_on_unread

STOPPED = 75
"""Exit code after a signal stopped the run with a checkpoint saved: "try again later", EX_TEMPFAIL of sysexits.h."""


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code is 0, 2 after a mistake of the user's (reported once per node), or STOPPED."""
    sharding.let_segments_grow(os.environ)
    try:
        config = read_flags(argv)
        # nobody at a debugger is to be hurried by a time limit
        limit = None if config.debug_ranks else config.ddp_timeout
        alike = training.start_facts(config)
        ranks = sharding.start_process_group(config.use_cpu, sharding.collectives_limit(limit), alike)
        watchdog = sharding.Watchdog(ranks, limit)
        try:
            unread = f"standard output is no longer read; the run continues, see {config.output_dir}/metrics.jsonl"
            with going_on_unread("" if config.preview else f"train_ep.py: {unread}"), watchdog.watching():
                with ExitStack() as closing:
                    finished = run_training(config, ranks, watchdog, closing)
                sharding.end_process_group()
        except ExpertMeshError:
            # every rank raised it; should one be gone by now, the error is still what to tell
            with suppress(RuntimeError):
                sharding.end_process_group()
            raise
        return 0 if finished else STOPPED
    except ExpertMeshError as error:
        return sharding.tell_mistake(f"train_ep.py: error: {' '.join(str(error).split())}")


def read_flags(argv: Sequence[str] | None) -> training.TrainConfig:
    """The configuration, and what it asks of the process before torch computes anything.

    Raises:
        ExpertMeshError: a flag does not work here; ranks on other nodes, where it may work, are told.
    """
    try:
        config = training.parse_config(argv)
        training.check_apart(config)
        training.prepare_process(config)
        if sharding.device_type(config.use_cpu) == "cpu":
            sharding.settle_malloc()
        return config
    except ExpertMeshError as error:
        if sharding.spans_nodes():
            sharding.refuse_at_start(str(error))
        raise


def run_training(
    config: training.TrainConfig, ranks: sharding.Ranks, watchdog: sharding.Watchdog, closing: ExitStack
) -> bool:
    """Check everything that was asked for, load, train, export. False: stopped by a signal before the last step.

    What is held for as long as the run takes is given to `closing`.
    """
    if ranks.rank == 0 and config.without_effect:
        print(folded(f"note: {'; '.join(config.without_effect)}"), flush=True)
    if config.preview and ranks.world_size == 1:
        # samples are the same on any number of ranks
        config, without = config.on_one_rank()
        if without:
            alone = "figures per rank and per step are those of one rank"
            print(folded(f"note: a preview by one process goes without {' '.join(without)}: {alone}"), flush=True)
    watchdog.at("the checks before training", limited=False)
    with sharding.raise_together(patient=ranks):
        training.check_trackers(config)
    engine, products = training.start_engine(config, ranks, tell)
    config, source = engine.config, engine.source
    if config.offload and ranks.device.type == "cuda":
        sharding.use_own_cores()
    if not config.preview:
        output_dir = closing.enter_context(training.output_directory(config, ranks))
        watchdog.directory = output_dir / sharding.STUCK
    watchdog.at("reading the data", limited=False)
    inputs = training.read_inputs(config, source, ranks)
    order = training.data_order(config, inputs.training, ranks.world_size)
    num_steps = training.number_of_steps(config, order)
    prompts = None if config.preview else training.make_prompts(config, inputs)
    if not config.preview:
        watchdog.at("comparing the data", limited=False)
        engine.facts |= training.compare_data(inputs, prompts, num_steps, ranks)
    if config.resume == "auto" and inputs.training is not None and not config.preview:
        order_facts = training.order_facts(config, inputs.training, order)
        compared = (num_steps, engine.facts, order_facts)
        if done := training.find_finished(config, output_dir, *compared, ranks, engine.tell):
            engine.tell(done)
            return True
    training.check_schedule(config, num_steps, config.evaluates)
    training.check_profile(config, num_steps, ranks.world_size)
    watchdog.at("forecasting the memory", limited=False)
    memory = training.forecast(source, engine.topology, engine.kernel, config, inputs, ranks, engine.padding)
    chosen = memory.chosen(config)
    config = engine.config = replace(config, **chosen)
    if ranks.rank == 0:
        told = training.first_lines(engine, inputs, order, memory)
        print(folded(told), *([] if products is None else [folded(products.line)]), sep="\n", flush=True)
    if config.preview:
        if ranks.rank == 0 and inputs.training is not None:
            training.print_preview(inputs.training, order, inputs.tokenizer, config.max_seq_length)
        return True

    # only training needs gradients and optimizer state
    if inputs.training is not None and not config.force:
        with sharding.raise_together():
            memory.check(ranks.world_size, config)
    log = training.RunLog(config, output_dir, num_steps, ranks, products, engine.flash_attention_3, chosen)
    watchdog.at("loading the model", limited=False)
    resume_from: Path | None = None
    if config.resume:
        directory = output_dir / "checkpoints"
        resume_from = training.find_resume(config.resume, directory, config, engine.tell, ranks)
    engine.place(resume_from, watchdog.limit)
    of_layout = (training.pipeline_lines(engine, memory), training.dispatch_lines(engine))
    for line in (*of_layout[0], *of_layout[1], *training.replica_lines(engine)):
        log.line(folded(line))
    ends = [] if inputs.training is None else engine.answers_end_in(inputs.training.samples.ends, inputs.tokenizer)
    for said in filter(None, (engine.untrained, engine.encoding, *ends)):
        log.line(said)
    with sharding.raise_together(patient=ranks), checkpoints.write_errors(output_dir):
        if ranks.rank == 0:
            training.clear_output(config, output_dir)
    if config.save_steps:
        engine.saves_to(output_dir / "checkpoints", inputs.saved_tokenizer)
    run = training.Run(engine, inputs, order, prompts, log, watchdog)
    # an error is told before the log is closed, which may wait for a tracker
    with log, watchdog.ending_clearly():
        return train_and_export(run, memory, resume_from, output_dir)


def train_and_export(
    run: training.Run, memory: training.Forecast | training.NoForecast, resume_from: Path | None, output_dir: Path
) -> bool:
    """False: stopped by a signal before the last step."""
    engine, log, watchdog, config, ranks = run.engine, run.log, run.watchdog, run.config, run.ranks
    if run.inputs.training is not None:
        debugger = sharding.debugging(config.debug_ranks, ranks, watchdog, output_dir)
        with watchdog.following(engine.model), debugger:
            trained = training.train(run, resume_from)
        log.line(training.beside(memory, training.measured_peak(ranks.device)))
        if not trained.finished:
            kept = "--resume auto resumes from here" if engine.saver else "nothing was saved, as --save-steps is 0"
            log.line(f"stopped by a signal; {kept} (exit code {STOPPED})")
            return False
    done = None if run.inputs.training is None else record(run, trained, output_dir)
    if config.export:
        watchdog.at("the export", limited=False)
        with sharding.raise_together():
            log.check_directory()
            if done is not None and ranks.rank == 0:
                with suppress(OSError):  # what the export then meets too
                    done.announce(output_dir)
        for line in export(engine, output_dir, run.inputs.saved_tokenizer):
            log.line(line)
    elif engine.saver is None and run.inputs.training is not None:
        log.line("the trained weights are not saved: --no-export and --save-steps 0 were given")
    log.state = "finished"
    if done is not None:
        finish(run, done, output_dir)
    return True


def record(run: training.Run, trained: training.Trained, output_dir: Path) -> training.Finished:
    """What is recorded of a run that has come to its end."""
    engine = run.engine
    holds = training.held_line(output_dir, engine.config, engine.step_number, trained.best, trained.took_best)
    recorded = (asdict(engine.config), engine.facts, run.order_facts)
    return training.Finished(engine.step_number, run.log.num_steps, holds, *recorded)


def finish(run: training.Run, done: training.Finished, output_dir: Path) -> None:
    """Say whose weights are exported, and record that the run has come to its end, which `--resume auto` then finds."""
    engine = run.engine
    run.log.line(done.holds)
    saved = output_dir / "checkpoints" / checkpoints.checkpoint_name(engine.step_number)
    # where the weights could not be saved, nothing is at its end
    if run.ranks.rank == 0 and (engine.config.export or engine.saver is None or saved.exists()):
        try:
            done.write(output_dir)
        except OSError as error:  # the run has lost nothing by it
            run.log.line(f"warning: finished.json was not written: {error.strerror}")


def export(engine: training.Engine, output_dir: Path, tokenizer: Any) -> list[str]:
    """Write the model, or its adapters and, if asked for, the model that they make; what to say of it."""
    hf, adapter = output_dir / "hf", output_dir / "adapter"
    if engine.config.adapter == "none":
        return [*engine.export(hf, tokenizer, overwrite=True), f"exported to {hf}"]
    engine.export(adapter, tokenizer, overwrite=True)
    if not engine.config.merge:
        return [f"exported to {adapter}"]
    return [*engine.merge(adapter, hf, tokenizer), f"exported to {adapter}", f"exported to {hf}"]


def tell(line: str) -> None:
    """Print a line for the user: a warning to standard error."""
    print(folded(line), file=sys.stderr if line.startswith("warning: ") else sys.stdout, flush=True)


def script() -> NoReturn:
    """`main` as a process of its own."""
    run_command(main)


if __name__ == "__main__":
    script()
