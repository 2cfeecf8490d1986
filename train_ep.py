"""Fine-tune a Hugging Face mixture-of-experts model with expert parallelism.

    torchrun --nproc-per-node 8 train_ep.py --model DIR --dataset data.jsonl --ep-size 8
    python train_ep.py --model DIR --dataset data.jsonl            # one process

`--help` lists the flags.

Names are asked of their packages where they are used, and imported then (see `moe.lazy`): what is wrong with the flags
is told before torch is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import checkpoints
import moe
import sharding
import training
from moe import ExpertMeshError
from moe.command import run_command
from moe.terminal import ends_with_reader, folded, going_on_unread

STOPPED = 75
"""Exit code after a signal stopped the run with a checkpoint saved: "try again later", EX_TEMPFAIL of sysexits.h."""


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code is 0, 2 after a mistake of the user's (reported once a node), or STOPPED."""
    sharding.let_segments_grow(os.environ)
    _, _, local_rank = sharding.read_environment()
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
        if local_rank == 0:
            print(f"train_ep.py: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2


def read_flags(argv: Sequence[str] | None) -> training.TrainConfig:
    """The configuration, and what it asks of the process before torch computes anything.

    Raises:
        ExpertMeshError: a flag will not do; ranks on other nodes, where it may do, are told.
    """
    try:
        config = training.parse_config(argv)
        checkpoints.check_model(config.model)
        if sharding.device_type(config.use_cpu) == "cpu":
            sharding.settle_malloc()
        if config.tf32:
            training.compute_in_tf32(sharding.device_type(config.use_cpu))
        if config.deterministic:
            training.compute_deterministically()
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
    import torch

    watchdog.at("the checks before training", limited=False)
    with sharding.raise_together(patient=ranks):
        training.check_trackers(config)
        source = checkpoints.open_source(checkpoints.resolve_model(config.model), config.rope)
        checkpoints.side_files(source.path)  # what cannot go along is better told now than at the export
    facts = {"model": training.compare_models(config, source, ranks)}
    with sharding.raise_together():
        assembled = training.assemble(config, source, ranks.device.type)
    model, kernel = assembled.model, assembled.kernel
    num_experts = moe.moe_shape(model).num_experts
    if config.elastic:
        config, changes = training.fit_to_ranks(config, num_experts, ranks)
        if ranks.rank == 0 and changes:
            print(f"elastic: {ranks.world_size} ranks: {'; '.join(changes)}", flush=True)
    products = training.choose_products(config, ranks)
    with sharding.raise_together():
        sharding.check_ep_size(config.ep_size, ranks.world_size, num_experts)
        sharding.check_cp_size(config.cp_size, ranks.world_size)
        balance = training.choose_balance(config, model, source.config)
    if config.offload and ranks.device.type == "cuda":
        sharding.use_own_cores()
    counts = moe.count_parameters(model)
    topology = sharding.Topology(ranks.world_size, config.ep_size, config.dense_shard, config.cp_size)
    if not config.preview:
        output_dir = closing.enter_context(training.output_directory(config, ranks))
        watchdog.directory = output_dir / sharding.STUCK
    watchdog.at("reading the data", limited=False)
    inputs = training.read_inputs(config, source, ranks)
    order = training.data_order(config, inputs.training, ranks.world_size)
    prompts = None if config.preview else training.make_prompts(config, inputs)
    if not config.preview:
        watchdog.at("comparing the data", limited=False)
        num_steps = training.number_of_steps(config, order)
        facts |= training.compare_data(inputs, prompts, num_steps, ranks)
    training.check_schedule(config, training.number_of_steps(config, order), config.evaluates)
    training.check_profile(config, training.number_of_steps(config, order), ranks.world_size)
    memory = training.forecast(source, topology, kernel, config, inputs, ranks)
    if ranks.rank == 0:
        how = [balance.line(), *assembled.trained]
        told = training.first_lines(model, source, counts, topology, kernel, config, inputs, order, memory, how)
        print(folded(told), *([] if products is None else [folded(products.line)]), sep="\n", flush=True)
    if config.preview:
        if ranks.rank == 0 and inputs.training is not None:
            training.print_preview(inputs.training, order, inputs.tokenizer, config.max_seq_length)
        return True

    # only training needs gradients and optimizer state
    if inputs.training is not None and not config.force:
        with sharding.raise_together():
            memory.check(ranks.world_size)
    log = training.RunLog(config, output_dir, training.number_of_steps(config, order), ranks, products)
    watchdog.at("loading the model", limited=False)
    mesh = sharding.build_mesh(ranks.device.type, topology, sharding.collectives_limit(watchdog.limit))
    resume_from = find_resume(config, output_dir, ranks)
    if resume_from is not None and (changed := training.check_resumed(resume_from, config, facts, ranks)):
        log.line(f"warning: {changed}")
    checkpoint = training.place(config, model, source, mesh, ranks.device, resume_from)
    if balance.bias_rate:
        checkpoint = checkpoint.exporting(training.correction_biases(model), "F32")
    if carried := checkpoint.carried_summary:
        log.line(training.untrained(checkpoint, carried, config.drop_untrained))
    if config.drop_untrained:
        checkpoint = checkpoint.dropping_untrained()
    elif resume_from is not None:
        with sharding.raise_together():
            checkpoints.check_carried(resume_from, checkpoint)
    torch.manual_seed(config.seed + ranks.rank)
    with sharding.raise_together(patient=ranks), checkpoints.write_errors(output_dir):
        if ranks.rank == 0:
            training.clear_output(config, output_dir)
    saver = make_saver(config, output_dir, checkpoint, facts, inputs)
    # an error is told before the log is closed, which may wait for a tracker
    with log, watchdog.ending_clearly():
        if inputs.training is not None:
            top_k = moe.moe_shape(model).top_k
            run = training.Run(
                config, model, counts, top_k, inputs, order, prompts, balance, mesh, ranks, log, saver, watchdog
            )
            with watchdog.following(model), sharding.debugging(config.debug_ranks, ranks, watchdog, output_dir):
                finished = training.train(run, resume_from)
            log.line(training.beside(memory, training.measured_peak(ranks.device)))
            if not finished:
                kept = "--resume auto resumes from here" if saver else "nothing was saved, as --save-steps is 0"
                log.line(f"stopped by a signal; {kept} (exit code {STOPPED})")
                return False
        if config.export:
            watchdog.at("the export", limited=False)
            with sharding.raise_together():
                log.check_directory()
            for directory in export(config, model, checkpoint, topology, output_dir, inputs, ranks):
                log.line(f"exported to {directory}")
        elif saver is None and inputs.training is not None:
            log.line("the trained weights are not saved: --no-export and --save-steps 0 were given")
        log.state = "finished"
    return True


def export(
    config: training.TrainConfig,
    model: Any,
    checkpoint: checkpoints.Checkpoint,
    topology: sharding.Topology,
    output_dir: Path,
    inputs: training.Inputs,
    ranks: sharding.Ranks,
) -> list[Path]:
    """Write the model, or its adapters and, if asked for, the model that they make; where to."""
    hf, tokenizer = output_dir / "hf", inputs.saved_tokenizer
    if config.adapter == "none":
        checkpoints.export_model(model, checkpoint, topology, hf, config.shard_bytes, tokenizer, ranks)
        return [hf]
    adapter, lora = output_dir / "adapter", training.lora_of(config)
    form = config.adapter_format
    checkpoints.export_adapter(model, checkpoint, topology, adapter, lora, config.model, form, tokenizer)
    if not config.merge:
        return [adapter]
    with sharding.raise_together(patient=ranks):
        if ranks.rank == 0:
            how = checkpoints.HowToWrite(
                *(config.shard_bytes, 1), overwrite=True, drop_untrained=config.drop_untrained, tokenizer=tokenizer
            )
            checkpoints.merge_adapter(checkpoint.source.path, adapter, hf, how)
    return [adapter, hf]


def make_saver(
    config: training.TrainConfig,
    output_dir: Path,
    checkpoint: checkpoints.Checkpoint,
    facts: dict[str, dict[str, str]],
    inputs: training.Inputs,
) -> checkpoints.Saver | None:
    """What saves training checkpoints, if any are to be saved."""
    if config.save_steps == 0:
        return None
    base = None if config.adapter == "none" else {"path": str(checkpoint.source.path)}
    directory = output_dir / "checkpoints"
    return checkpoints.Saver(directory, checkpoint, inputs.saved_tokenizer, config.save_total_limit, base, facts)


def find_resume(config: training.TrainConfig, output_dir: Path, ranks: sharding.Ranks) -> Path | None:
    """The checkpoint to go on from; None to start from the model."""
    if not config.resume:
        return None
    found, warnings = checkpoints.find_checkpoint(
        config.resume, output_dir / "checkpoints", config.trust_checkpoint_owner
    )
    if ranks.rank == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    return found


def script() -> NoReturn:
    """`main` as a process of its own."""
    run_command(main)


if __name__ == "__main__":
    script()
