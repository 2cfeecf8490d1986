"""Fine-tune a Hugging Face mixture-of-experts model with expert parallelism.

    torchrun --nproc-per-node 8 train_ep.py --model DIR --dataset data.jsonl --ep-size 8
    python train_ep.py --model DIR --dataset data.jsonl            # one process

`--help` lists the flags.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoints import Checkpoint, ModelSource, export_model, load_model, open_checkpoint, open_source, resolve_model
from moe import ExpertMeshError, KernelChoice, build_model, choose_kernel
from sharding import (
    Mesh,
    Ranks,
    Topology,
    build_mesh,
    check_ep_size,
    end_process_group,
    is_expert,
    materialize,
    parallelize,
    raise_together,
    read_environment,
    start_process_group,
)
from training import RunLog, TrainConfig, data_order, load_samples, number_of_steps, parse_config, train
from training.data import Sample


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code is 0, or 2 after a mistake of the user's, reported once a node."""
    _, world_size, local_rank = read_environment()
    try:
        config = parse_config(argv)
        source = open_source(resolve_model(config.model))
        check_ep_size(config.ep_size, world_size, source.shape.num_experts)
        ranks = start_process_group(config.use_cpu, config.ddp_timeout)
        try:
            run(config, source, ranks)
        except ExpertMeshError:
            end_process_group()  # every rank raised it together
            raise
        end_process_group()
        return 0
    except ExpertMeshError as error:
        if local_rank == 0:
            print(f"train_ep.py: error: {error}", file=sys.stderr, flush=True)
        return 2


def run(config: TrainConfig, source: ModelSource, ranks: Ranks) -> None:
    """Load, train, export."""
    output_dir = prepare_output(config, ranks)
    samples = read_data(config, source, ranks)
    topology = Topology(ranks.world_size, config.ep_size, config.dense_shard)
    mesh = build_mesh(ranks.device.type, topology)
    kernel = choose_kernel(config.expert_kernel, ranks.device.type)
    model = build_model(source.family, source.config, kernel.kernel, config.attn_implementation)
    order = data_order(config, len(samples), ranks.world_size)

    with RunLog(config, output_dir, number_of_steps(config, order), ranks.device.type == "cpu") as log:
        log.line(facts(model, source, topology, kernel, config, order.global_batch_size))
        checkpoint = shard_and_load(model, source, mesh, config, ranks.device)
        torch.manual_seed(config.seed + ranks.rank)
        train(model, samples, order, config, mesh, ranks, log)
        if config.export:
            export_model(model, checkpoint, topology, output_dir / "hf", config.shard_bytes)
            log.line(f"exported to {output_dir / 'hf'}")


def prepare_output(config: TrainConfig, ranks: Ranks) -> Path:
    """Make the output directory, refusing one that holds another run's results."""
    output_dir = Path(config.output_dir)
    with raise_together():
        if ranks.rank == 0:
            taken = [name for name in ("hf", "metrics.jsonl") if (output_dir / name).exists()]
            if taken and not config.overwrite_output_dir:
                raise ExpertMeshError(
                    f"--output-dir {output_dir}: already holds {' and '.join(taken)}; "
                    "choose another, or replace them with --overwrite-output-dir"
                )
            try:
                output_dir.mkdir(parents=True, exist_ok=True)
                config.save(output_dir / "config.yaml")
            except OSError as error:
                raise ExpertMeshError(f"--output-dir {output_dir}: cannot be written: {error.strerror}") from error
    return output_dir


def read_data(config: TrainConfig, source: ModelSource, ranks: Ranks) -> Sequence[Sample]:
    """The tokenised samples. Rank 0 goes first and fills the cache that the others then read."""
    samples: Sequence[Sample] = []
    if not config.dataset:
        return samples
    for first in (True, False):
        with raise_together():
            if first == (ranks.rank == 0):
                tokenizer = load_tokenizer(config, source)
                samples = load_samples(
                    config.dataset,
                    tokenizer,
                    config.prompt_column,
                    config.response_column,
                    config.prompt_template,
                    config.max_seq_length,
                )
    return samples


def load_tokenizer(config: TrainConfig, source: ModelSource) -> Any:
    """The model's tokenizer or the one asked for; its ids must fit the model's vocabulary."""
    from transformers import AutoTokenizer

    where = config.tokenizer or str(source.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        raise ExpertMeshError(f"{where}: no tokenizer there ({error}); name one with --tokenizer") from error
    if len(tokenizer) > source.config.vocab_size:
        raise ExpertMeshError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, the model only {source.config.vocab_size}"
        )
    return tokenizer


def shard_and_load(
    model: Any, source: ModelSource, mesh: Mesh, config: TrainConfig, device: torch.device
) -> Checkpoint:
    """Put every parameter on its rank and read each rank's part; gives the checkpoint they came from."""
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with raise_together():
        checkpoint = open_checkpoint(source, parameters)
    compute_dtype = torch.bfloat16 if config.bf16 else torch.float32
    parallelize(model, mesh, compute_dtype, config.gradient_checkpointing)
    materialize(model, device)
    load_model(model, checkpoint, mesh.topology)
    return checkpoint


def facts(
    model: Any, source: ModelSource, topology: Topology, kernel: KernelChoice, config: TrainConfig, global_batch: int
) -> str:
    """What is about to run, in three lines."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if is_expert(name, model))
    active = total - experts + experts * source.shape.top_k // source.shape.num_experts
    world, local_experts = topology.world_size, source.shape.num_experts // topology.ep_size
    checkpointing = ", activation checkpointing" if config.gradient_checkpointing else ""
    return (
        f"{source.path}: {source.family.model_type}, {total / 1e6:,.1f} M parameters, "
        f"{active / 1e6:,.1f} M active a token\n"
        f"{world} ranks: dp {topology.dp_size} x ep {topology.ep_size}, {local_experts} experts a rank, "
        f"dense shard {topology.dense_shard}; global batch {global_batch} rows = {world} ranks "
        f"x {config.per_device_train_batch_size} rows x {config.gradient_accumulation_steps} forwards\n"
        f"{'bf16' if config.bf16 else 'fp32'}, expert kernel {kernel.name} ({kernel.why}), "
        f"attention {config.attn_implementation}{checkpointing}"
    )


if __name__ == "__main__":
    sys.exit(main())
