"""Data, tensor and pipeline parallelism on one model: `python -m benchmarks.three_d`.

Whole training steps (forward, backward, clipping, AdamW) of a random Mixtral in fp32 on one global batch, in
micro-batches of two sequences, laid out in several ways that take turns, round after round:

    one rank               what the others are compared with
    DP                     2 ranks, each with all but the experts, which are always sharded (--dense-shard hybrid)
    FSDP                   2 ranks, everything sharded
    TP                     2 ranks of --tp-size 2
    TP, complete logits    the same with --no-loss-parallel
    TP 4                   4 ranks of --tp-size 4
    2 x 2 x 2              8 ranks: --pp-size 2, --tp-size 2, and two groups that read sequences of their own

Every turn begins at the same weights. Losses must agree to five digits at every step or the run aborts.

    parameters   bytes as they are held between steps, of the rank with most
    peak         most bytes of tensors at once in a step, with parameters and optimizer state; of the rank with most
    activations  the same, less the peak with few tokens per sequence: gathered parameters and gradients do not
                 depend on the length
    x            of the first variant, the median over rounds of the ratio within a round. Ranks share this machine's
                 cores: CPU-seconds are of all ranks together
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workers import random_mixtral
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.runtime.process import end_process_group, start_process_group
from expertmesh.sharding.state import local_tensor
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import DataOrder
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.environment import cpu_model
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.columns import Column, open_console, print_table
from expertmesh.training.planning.rehearsal.live_memory import LiveTensors
from expertmesh.training.steps.step import train_step

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "DP": (2, {"dense_shard": "hybrid"}),
    "FSDP": (2, {}),
    "TP": (2, {"tp_size": 2}),
    "TP, complete logits": (2, {"tp_size": 2, "loss_parallel": False}),
    "TP 4": (4, {"tp_size": 4}),
    "2 x 2 x 2": (8, {"pp_size": 2, "tp_size": 2}),
}
"""Ranks and flags."""
MICRO_BATCH = 2
FEW = 8
"""Tokens of a short sequence, which the groups divide."""
TOLERANCE = 1e-5
NO_LOSSES = LossWeights(0.0, 0.0)


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--sequences", type=int, default=8, help="of a global batch")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--intermediate-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="in each turn; the first is not timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        directory, name = arguments.worker
        return measure(Path(directory), name, arguments)
    with tempfile.TemporaryDirectory() as directory:
        random_mixtral(arguments, num_key_value_heads=4, num_local_experts=8).save_pretrained(f"{directory}/model")
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.variants}
        for _ in range(arguments.rounds):
            for name, figures in turns.items():
                figures.append(take_turn(name, Path(directory)))
    print_figures(turns, arguments)
    return 0


def take_turn(name: str, directory: Path) -> dict[str, Any]:
    """Figures of the steps of one variant, on ranks of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(VARIANTS[name][0]), "-m", "benchmarks.three_d", *sys.argv[1:], "--worker", str(directory), name]
    subprocess.run(command, check=True, timeout=1800, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads((directory / "figures.json").read_text())
    return found


def measure(directory: Path, name: str, arguments: argparse.Namespace) -> int:
    """On each rank: the steps, then one with long sequences and one with short ones for the activations."""
    ranks = start_process_group(use_cpu=True, timeout_seconds=600)
    _, flags = VARIANTS[name]
    config = TrainConfig(model="-", dataset=["-"], cross_entropy="chunked", learning_rate=1e-3, **flags)
    source = open_source(directory / "model")
    model = assemble(config, source, "cpu").model
    mesh = build_mesh("cpu", config.topology(ranks.world_size))
    place(config, model, source, mesh, ranks.device)
    optimizer = build_optimizer(model.train(), config, mesh)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.sequences, arguments.seq_length)
    sequences = torch.randint(0, arguments.vocabulary, shape, generator=generator).tolist()
    order = DataOrder(arguments.sequences, mesh.topology.data_size, MICRO_BATCH, 1, 0, None, arguments.sequences)
    forwards = order.micro_batches(0, mesh.topology.data_index(ranks.rank))

    def step(length: int) -> float:
        batches: list[Batch] = [
            collate([[Sample.of_prompt(sequences[number][:length], 0)] for number in forward], mesh.cp_group)
            for forward in forwards
        ]
        return train_step(model, optimizer, batches, mesh, NO_LOSSES, 1.0).loss

    losses, seconds, cpu_seconds = [], [], []
    for _ in range(arguments.steps):
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        losses.append(step(arguments.seq_length))
        spent = torch.tensor(time.process_time() - cpu_begin, dtype=torch.float64)
        dist.all_reduce(spent)
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(float(spent))
    parameters = [each for each in model.parameters() if not each.is_meta]
    state = [each for of_one in optimizer.state.values() for each in of_one.values()]
    peaks = []
    for length in (arguments.seq_length, FEW):
        with LiveTensors([*parameters, *state]) as live:
            step(length)
        peaks.append(live.peak)
    held = sum(local_tensor(each.detach()).nbytes for each in parameters)
    most = torch.tensor([held, peaks[0], peaks[0] - peaks[1]])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if ranks.rank == 0:
        figures = {"losses": losses, **dict(zip(("parameters", "peak", "activations"), most.tolist(), strict=True))}
        # the first step also makes what lasts
        figures |= {"seconds": sum(seconds[1:]), "cpu_seconds": sum(cpu_seconds[1:])}
        (directory / "figures.json").write_text(json.dumps(figures))
    end_process_group()
    return 0


def print_figures(turns: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    """
    Raises:
        SystemExit: variants have computed different losses.
    """
    first = next(iter(turns.values()))
    for name, figures in turns.items():
        pairs = [pair for turn in figures for pair in zip(turn["losses"], first[0]["losses"], strict=True)]
        if not all(abs(loss / expected - 1) <= TOLERANCE for loss, expected in pairs):  # not true of NaN either
            raise SystemExit(f"aborted: {name}: losses differ by more than {TOLERANCE:.0e}: {pairs}")
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, torch {torch.__version__}, fp32; {arguments.layers} layers of width "
        f"{arguments.hidden_size}, 8 experts of {arguments.intermediate_size}, top-2, vocabulary "
        f"{arguments.vocabulary:,}; {arguments.sequences} sequences of {arguments.seq_length} tokens per step; "
        f"{arguments.steps} steps in a turn, the first not timed, {arguments.rounds} rounds, medians"
    )
    columns = {
        "": list(turns),
        "ranks": [str(VARIANTS[name][0]) for name in turns],
        f"loss after\n{arguments.steps - 1} steps": [f"{figures[0]['losses'][-1]:.5f}" for figures in turns.values()],
        "parameters\nper rank, MB": [f"{figures[0]['parameters'] / 1e6:,.1f}" for figures in turns.values()],
        "peak\nper rank, MB": [f"{figures[0]['peak'] / 1e6:,.1f}" for figures in turns.values()],
        "activations\nper rank, MB": [f"{figures[0]['activations'] / 1e6:,.1f}" for figures in turns.values()],
        "x ": [f"{figures[0]['activations'] / first[0]['activations']:.2f}" for figures in turns.values()],
        "tokens/s\nx": [_gain(figures, first, "seconds") for figures in turns.values()],
        "tokens/CPU-s\nx": [_gain(figures, first, "cpu_seconds") for figures in turns.values()],
    }
    print_table(open_console(), [Column(name, cells, is_text=not name) for name, cells in columns.items()])


def _gain(figures: list[dict[str, Any]], first: list[dict[str, Any]], what: str) -> str:
    """How much less time the same tokens take."""
    return f"{statistics.median(of_first[what] / own[what] for own, of_first in zip(figures, first, strict=True)):.2f}"


if __name__ == "__main__":
    sys.exit(main())
