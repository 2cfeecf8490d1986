"""Fine-tune a Hugging Face mixture-of-experts model with expert parallelism.

    torchrun --nproc-per-node 8 train_ep.py --model DIR --dataset data.jsonl --ep-size 8
    python train_ep.py --model DIR --dataset data.jsonl            # one process

`--help` lists the flags.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoints import (
    ModelSource,
    Saver,
    export_model,
    find_checkpoint,
    open_source,
    resolve_model,
    shard_and_load,
    write_errors,
)
from moe import ExpertMeshError, KernelChoice, build_model, choose_kernel
from sharding import (
    Ranks,
    Topology,
    build_mesh,
    check_ep_size,
    device_type,
    end_process_group,
    is_expert,
    raise_together,
    read_environment,
    start_process_group,
)
from training import (
    DataFormat,
    Run,
    RunLog,
    TrainConfig,
    check_schedule,
    data_order,
    load_samples,
    loss_weights,
    number_of_steps,
    parse_config,
    train,
)
from training.data import Samples

STOPPED = 75
"""Exit code after a signal stopped the run with a checkpoint saved: "try again later", EX_TEMPFAIL of sysexits.h."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code is 0, 2 after a mistake of the user's (reported once a node), or STOPPED."""
    _, _, local_rank = read_environment()
    try:
        config = parse_config(argv)
        ranks = start_process_group(config.use_cpu, config.ddp_timeout)
        try:
            finished = run(config, ranks)
        except ExpertMeshError:
            end_process_group()  # every rank raised it together
            raise
        end_process_group()
        return 0 if finished else STOPPED
    except ExpertMeshError as error:
        if local_rank == 0:
            print(f"train_ep.py: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2


def run(config: TrainConfig, ranks: Ranks) -> bool:
    """Check everything that was asked for, load, train, export. False: stopped by a signal before the last step."""
    compute_dtype = torch.bfloat16 if config.bf16 else torch.float32
    with raise_together():
        source = open_source(resolve_model(config.model))
        check_ep_size(config.ep_size, ranks.world_size, source.shape.num_experts)
        kernel = choose_kernel(
            config.expert_kernel,
            ranks.device.type,
            source.shape.model_width,
            source.shape.expert_width,
            compute_dtype,
        )
        model = build_model(source.family, source.config, kernel.kernel, config.attn_implementation)
        if config.optim == "adamw_bf16":
            model.to(torch.bfloat16)
    topology = Topology(ranks.world_size, config.ep_size, config.dense_shard)
    output_dir = prepare_output(config, ranks)
    tokenizer, samples = read_data(config, source, ranks)
    order = data_order(config, len(samples) if samples else 0, ranks.world_size)
    check_schedule(config, number_of_steps(config, order), evaluates=False)
    if ranks.rank == 0:
        print(facts(model, source, topology, kernel, config, samples, order.global_batch_size), flush=True)

    log = RunLog(config, output_dir, number_of_steps(config, order), ranks.device.type == "cpu")
    mesh = build_mesh(ranks.device.type, topology, config.ddp_timeout)
    resume_from = find_resume(config, output_dir, ranks)
    checkpoint = shard_and_load(
        model,
        source,
        mesh,
        ranks.device,
        compute_dtype,
        config.gradient_checkpointing,
        read_weights=resume_from is None,
        offload=config.offload,
    )
    torch.manual_seed(config.seed + ranks.rank)
    own_tokenizer = tokenizer if config.tokenizer else None
    saver = None
    if config.save_steps > 0:
        keep, in_background = config.save_total_limit, config.async_save
        if ranks.rank == 0 and not config.resume:
            shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
        saver = Saver(output_dir / "checkpoints", checkpoint, own_tokenizer, keep, in_background)
    with log:
        if samples is not None:
            weights = loss_weights(config, source)
            finished = train(Run(config, model, samples, order, weights, mesh, ranks, log, saver), resume_from)
            if not finished:
                kept = "--resume auto goes on from here" if saver else "nothing was saved, as --save-steps is 0"
                log.line(f"stopped by a signal; {kept} (exit code {STOPPED})")
                return False
        if config.export:
            export_model(model, checkpoint, topology, output_dir / "hf", config.shard_bytes, own_tokenizer)
            log.line(f"exported to {output_dir / 'hf'}")
    return True


def find_resume(config: TrainConfig, output_dir: Path, ranks: Ranks) -> Path | None:
    """The checkpoint to go on from; None to start from the model."""
    if not config.resume:
        return None
    found, warnings = find_checkpoint(config.resume, output_dir / "checkpoints", config.trust_checkpoint_owner)
    if ranks.rank == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    return found


def prepare_output(config: TrainConfig, ranks: Ranks) -> Path:
    """Make the output directory, refusing one that holds another run's results."""
    output_dir = Path(config.output_dir)
    with raise_together(), write_errors(output_dir):
        if ranks.rank == 0:
            taken = [name for name in ("hf", "metrics.jsonl", "config.yaml") if (output_dir / name).exists()]
            taken += [path.name for path in (output_dir / "checkpoints").glob("step-*")]
            if taken and not config.overwrite_output_dir and not config.resume:
                raise ExpertMeshError(
                    f"--output-dir {output_dir}: already holds {', '.join(taken)}; "
                    "choose another, go on with --resume auto, or replace them with --overwrite-output-dir"
                )
            output_dir.mkdir(parents=True, exist_ok=True)
    return output_dir


def read_data(config: TrainConfig, source: ModelSource, ranks: Ranks) -> tuple[Any, Samples | None]:
    """Tokenizer and tokenised samples. Rank 0 goes first and fills the cache that the others then read."""
    import datasets

    tokenizer, samples = None, None
    if ranks.rank > 0:
        datasets.disable_progress_bars()
    for first in (True, False):
        with raise_together():
            if first == (ranks.rank == 0):
                if config.tokenizer or config.dataset:
                    tokenizer = load_tokenizer(config, source)
                if config.dataset:
                    data_format = DataFormat(
                        config.prompt_column, config.response_column, config.prompt_template, config.max_seq_length
                    )
                    samples = load_samples(config.dataset, tokenizer, data_format)
    return tokenizer, samples


def load_tokenizer(config: TrainConfig, source: ModelSource) -> Any:
    """The model's tokenizer or the one asked for; its ids must fit the model's vocabulary."""
    from transformers import AutoTokenizer

    where = config.tokenizer or str(source.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        raise ExpertMeshError(f"{where}: no tokenizer there; name one with --tokenizer ({error})") from error
    if len(tokenizer) > source.config.vocab_size:
        raise ExpertMeshError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, the model only {source.config.vocab_size}"
        )
    return tokenizer


def facts(
    model: Any,
    source: ModelSource,
    topology: Topology,
    kernel: KernelChoice,
    config: TrainConfig,
    samples: Samples | None,
    global_batch: int,
) -> str:
    """What is about to run, in a few lines."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if is_expert(name, model))
    active = total - experts + experts * source.shape.top_k // source.shape.num_experts
    world, local_experts = topology.world_size, source.shape.num_experts // topology.ep_size
    checkpointing = ", activation checkpointing" if config.gradient_checkpointing else ""
    lines = [
        f"{source.path}: {source.family.model_type}, {total / 1e6:,.1f} M parameters, "
        f"{active / 1e6:,.1f} M active a token",
        f"{world} ranks: dp {topology.dp_size} x ep {topology.ep_size}, {local_experts} experts a rank, "
        f"dense shard {topology.dense_shard}; global batch {global_batch} rows = {world} ranks "
        f"x {config.per_device_train_batch_size} rows x {config.gradient_accumulation_steps} forwards",
        f"{'bf16' if config.bf16 else 'fp32'}, expert kernel {kernel.name} ({kernel.why}), "
        f"attention {config.attn_implementation}{checkpointing}, optimizer {config.optim}",
    ]
    if config.offload:
        lines.append(
            "parameters, gradients and optimizer state in host memory"
            + ("; without a GPU that saves nothing" if device_type(config.use_cpu) == "cpu" else "")
        )
    if samples is not None:
        lines.append(
            f"{config.dataset}: {len(samples):,} rows; {samples.num_cut:,} cut at {config.max_seq_length} tokens, "
            f"{samples.num_without_target:,} with nothing left to learn"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
