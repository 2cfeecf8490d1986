"""What a pipeline's bubble costs: `python -m benchmarks.pipeline --pp-size 2 --micro-batches 8`.

Whole training steps (forward, backward, clipping, AdamW) of one random Mixtral on one rank, and of the same one cut
into stages on --pp-size ranks, a thread each, in turn in every round. A pipeline without any other cost takes the one
rank's time divided by the stages, times 1 + (stages - 1) / micro-batches where stages take equally long.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workers import random_mixtral
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.pipeline.pipeline import pipeline_of
from expertmesh.sharding.pipeline.timeline import bubble
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.environment import cpu_model
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.steps.step import train_step


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp-size", type=int, default=2)
    parser.add_argument("--pipeline-schedule", default="1f1b")
    parser.add_argument("--pipeline-chunks", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=896)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="measured in each turn, after one that is not")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        return measure(arguments.worker, arguments)
    with tempfile.TemporaryDirectory() as directory:
        random_mixtral(arguments, num_key_value_heads=4, num_local_experts=8).save_pretrained(f"{directory}/model")
        turns = {pp_size: [take_turn(pp_size, Path(directory))] for pp_size in (1, arguments.pp_size)}
        for _ in range(1, arguments.rounds):
            for pp_size, figures in turns.items():
                figures.append(take_turn(pp_size, Path(directory)))
    losses = [figures["loss"] for of_size in turns.values() for figures in of_size]
    if not all(abs(loss - losses[0]) <= 1e-5 * abs(losses[0]) for loss in losses):  # not true of NaN either
        print(f"the losses differ: {losses}", file=sys.stderr)
        return 1
    print_table(turns, arguments)
    return 0


def take_turn(pp_size: int, directory: Path) -> dict[str, Any]:
    """Figures of some steps on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pp_size)]
    command += ["-m", "benchmarks.pipeline", *sys.argv[1:], "--worker", str(directory)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads((directory / "figures.json").read_text())
    return found


def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """On each rank: steps, as a pipeline where there are several ranks."""
    ranks = start_process_group(use_cpu=True, timeout_seconds=300)
    cut: dict[str, Any] = {}
    if ranks.world_size > 1:
        cut = {
            "pp_size": ranks.world_size,
            "pipeline_schedule": arguments.pipeline_schedule,
            "pipeline_chunks": arguments.pipeline_chunks,
        }
    config = TrainConfig(model="-", dataset=["-"], cross_entropy="chunked", learning_rate=1e-5, **cut)
    source = open_source(directory / "model")
    model = assemble(config, source, "cpu").model
    mesh = build_mesh("cpu", config.topology(ranks.world_size))
    place(config, model, source, mesh, ranks.device)
    optimizer = build_optimizer(model.train(), config, mesh)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.micro_batches, arguments.seq_length)
    tokens = torch.randint(0, arguments.vocabulary, shape, generator=generator).tolist()
    batches = [collate([[Sample(row, [True] * len(row))]]) for row in tokens]
    seconds, cpu_seconds, loss = [], [], 0.0
    for step in range(-1, arguments.steps):
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        loss = train_step(model, optimizer, batches, mesh, LossWeights(0.0, 0.0), 1.0).loss
        dist.barrier()
        spent = torch.tensor(time.process_time() - cpu_begin, dtype=torch.float64)
        elapsed = time.perf_counter() - begin
        dist.all_reduce(spent)
        if step >= 0:
            seconds.append(elapsed)
            cpu_seconds.append(float(spent))
    if ranks.rank == 0:
        pipeline = pipeline_of(model)
        layers = [] if pipeline is None else [len(part) for part in pipeline.stages.layers]
        figures = {"seconds": seconds, "cpu": cpu_seconds, "loss": loss, "layers": layers}
        (directory / "figures.json").write_text(json.dumps(figures))
    end_process_group()
    return 0


def print_table(turns: dict[int, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    pp_size, micro_batches = arguments.pp_size, arguments.micro_batches
    layers = ", ".join(map(str, turns[pp_size][0]["layers"]))
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, torch {torch.__version__}; {pp_size} stages of {layers} layers on as "
        f"many ranks of one thread, {micro_batches} micro-batches of {arguments.seq_length} tokens, width "
        f"{arguments.hidden_size}; medians of {arguments.rounds} rounds of {arguments.steps} steps, in turn"
    )
    print(f"{'':<12}{'seconds/step':>14}{'CPU-s/step':>12}{'loss':>12}")
    for size, figures in turns.items():
        name = "one rank" if size == 1 else f"pp {size}"
        spent = (median_of(figures, "seconds"), median_of(figures, "cpu"))
        print(f"{name:<12}{spent[0]:>14.3f}{spent[1]:>12.3f}{figures[0]['loss']:>12.6f}")
    expected = 1 / (1 - bubble(arguments.pipeline_schedule, pp_size, arguments.pipeline_chunks, micro_batches))
    ratios = [
        statistics.median(cut["seconds"]) / (statistics.median(whole["seconds"]) / pp_size * expected)
        for whole, cut in zip(turns[1], turns[pp_size], strict=True)
    ]
    told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(
        f"pp {pp_size} over one rank's time / {pp_size} x {expected:.4f} (the bubble of {arguments.pipeline_schedule} "
        f"with equal stages): {statistics.median(ratios):.3f} (rounds: {told})"
    )


def median_of(figures: list[dict[str, Any]], what: str) -> float:
    """Over all rounds' steps."""
    return statistics.median(value for turn in figures for value in turn[what])


if __name__ == "__main__":
    sys.exit(main())
