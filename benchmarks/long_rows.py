"""Memory and time with context parallelism: `python -m benchmarks.long_rows --ranks 4`.

Whole training steps (forward, backward, clipping, AdamW) of a random Mixtral on the same global batch, one sequence
per rank, at --cp-size 1, 2 and 4, in turn in every round; every expert gets as many tokens as any other. At cp N, a
step is N micro-batches of one sequence per N ranks. Losses must agree or the run aborts.

    activations   most bytes of tensors at once in one forward and backward, less those with one token per rank:
                  gathered parameters and gradients do not depend on the length; of the rank with most
    tokens/CPU-s  of all ranks together; steadier than wall time where ranks share cores
    evenness      CPU time of the rank with least over that of the rank with most, in one step

Transformers' own context parallelism, by accelerate's ParallelismConfig, are torch's context_parallel, which knows the
attention kernels of GPUs alone (on a CPU: "_scaled_dot_product_flash_attention_for_cpu does not have a sharding
strategy registered"), and DeepSpeed's: none is a variant here.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.plan_accuracy import balance_routing
from benchmarks.workers import measured_by_workers, random_mixtral
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.sharding.mesh import Mesh, build_mesh
from expertmesh.sharding.runtime.process import Ranks, end_process_group, start_process_group
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import DataOrder
from expertmesh.training.engine.assembly import assemble, place
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.planning.columns import Column, open_console, print_table
from expertmesh.training.planning.rehearsal.live_memory import LiveTensors
from expertmesh.training.steps.step import compute_gradients, train_step

NO_LOSSES = LossWeights(0.0, 0.0)
TOLERANCE = 1e-4
"""Of losses, between variants."""


@dataclass
class Figures:
    """Figures of one variant at one length. activations: bytes. cpu_seconds: of each step, rank by rank."""

    activations: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[list[float]] = field(default_factory=list)


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ep-size", type=int, default=4)
    parser.add_argument("--cp-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="tokens a row")
    parser.add_argument("--gradient-checkpointing", choices=["none", "full", "selective"], default="none")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=448)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return measure(arguments.worker, arguments)
    print_figures(measured_by_workers("benchmarks.long_rows", arguments, save_model))
    return 0


def save_model(path: Path, arguments: argparse.Namespace) -> None:
    longest = max(arguments.lengths)
    random_mixtral(
        arguments, num_key_value_heads=4, num_local_experts=8, max_position_embeddings=longest
    ).save_pretrained(path)


@dataclass(frozen=True)
class Variant:
    """One --cp-size: a model on the ranks, its optimizer and its mesh."""

    model: Any
    optimizer: torch.optim.Optimizer
    mesh: Mesh

    def batches(self, rows: Sequence[Sequence[int]], ranks: Ranks) -> list[Batch]:
        """This rank's part of a global batch, in micro-batches of one sequence."""
        topology = self.mesh.topology
        order = DataOrder(len(rows), topology.data_size, 1, topology.cp_size, seed=0)
        forwards = order.micro_batches(0, topology.data_index(ranks.rank))
        samples = [[[Sample.of_prompt(list(rows[row]), 0)] for row in forward] for forward in forwards]
        return [collate(forward, self.mesh.cp_group).to(ranks.device) for forward in samples]


def build_variant(directory: Path, cp_size: int, arguments: argparse.Namespace, ranks: Ranks) -> Variant:
    device = ranks.device.type
    source = open_source(directory / "model")
    config = TrainConfig(
        model="-",
        dataset=["-"],
        ep_size=arguments.ep_size,
        cp_size=cp_size,
        attn_implementation="sdpa",
        cross_entropy="chunked",
        gradient_checkpointing=arguments.gradient_checkpointing,
        bf16=device == "cuda",
        learning_rate=1e-5,
    )
    model = assemble(config, source, device).model
    # natural routing of one sequence would give another load in every variant
    balance_routing(model)
    mesh = build_mesh(device, Topology(ranks.world_size, arguments.ep_size, "full", cp_size))
    place(config, model, source, mesh, ranks.device)
    return Variant(model, build_optimizer(model.train(), config, mesh), mesh)


def measure(directory: Path, arguments: argparse.Namespace) -> int:
    """On each rank: at each length the variants in turn, round after round."""
    ranks = start_process_group(use_cpu=not torch.cuda.is_available(), timeout_seconds=600)
    variants = {cp_size: build_variant(directory, cp_size, arguments, ranks) for cp_size in arguments.cp_sizes}
    generator = torch.Generator().manual_seed(0)
    found: dict[int, dict[int, Figures]] = {}
    for length in arguments.lengths:
        rows = torch.randint(0, arguments.vocabulary, (ranks.world_size, length), generator=generator).tolist()
        figures = {cp_size: Figures(activations_of(variant, rows, ranks)) for cp_size, variant in variants.items()}
        for step in range(-1, arguments.rounds):  # the first round only warms up
            for cp_size, variant in variants.items():
                take_step(variant, variant.batches(rows, ranks), figures[cp_size] if step >= 0 else Figures(), ranks)
        found[length] = figures
    if ranks.rank == 0:
        parameters = sum(p.numel() for p in variants[arguments.cp_sizes[0]].model.parameters()) / 1e6
        setting = (
            f"{ranks.world_size} ranks, ep {arguments.ep_size}, {ranks.device.type}, {parameters:.1f} M parameters "
            f"({arguments.layers} layers of width {arguments.hidden_size}), {arguments.gradient_checkpointing} "
            f"checkpointing, one sequence per rank and step, torch {torch.__version__}, {os.cpu_count()} cores; median "
            f"of {arguments.rounds} rounds, variants interleaved"
        )
        lengths = {
            length: {cp: vars(figures) for cp, figures in variants.items()} for length, variants in found.items()
        }
        (directory / "figures.json").write_text(json.dumps({"setting": setting, "lengths": lengths}))
    end_process_group()
    return 0


def activations_of(variant: Variant, rows: Sequence[Sequence[int]], ranks: Ranks) -> int:
    """Bytes, on the rank that holds most."""
    peaks = []
    for some in ([row[: ranks.world_size] for row in rows], rows):
        (batch, *_) = variant.batches(some, ranks)
        with LiveTensors([]) as live:
            compute_gradients(variant.model, [batch], NO_LOSSES)
        variant.optimizer.zero_grad()
        peaks.append(live.peak)
    most = torch.tensor(peaks[1] - peaks[0], device=ranks.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def take_step(variant: Variant, batches: list[Batch], figures: Figures, ranks: Ranks) -> None:
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result = train_step(variant.model, variant.optimizer, batches, variant.mesh, NO_LOSSES, 1.0)
    spent = torch.zeros(ranks.world_size, dtype=torch.float64, device=ranks.device)
    spent[ranks.rank] = time.process_time() - cpu_begin
    dist.all_reduce(spent)
    figures.losses.append(result.loss)
    figures.seconds.append(time.perf_counter() - begin)
    figures.cpu_seconds.append(spent.tolist())


def print_figures(figures: dict[str, Any]) -> None:
    """
    Raises:
        SystemExit: variants have computed different losses.
    """
    print(figures["setting"])
    table: dict[str, list[str]] = {
        name: []
        for name in (
            "tokens a row",
            "cp",
            "activations\nper rank, MB",
            "x cp 1",
            "tokens/\nCPU-s",
            "x  cp 1",
            "evenness",
        )
    }
    for length, variants in figures["lengths"].items():
        first, *_ = variants.values()
        for cp_size, f in variants.items():
            off = [abs(a / b - 1) for a, b in zip(f["losses"], first["losses"], strict=True)]
            if not all(one <= TOLERANCE for one in off):  # not true of NaN either
                raise SystemExit(
                    f"aborted: with sequences of {length} tokens losses at cp {cp_size} are off by "
                    f"{', '.join(f'{one:.2%}' for one in off)}"
                )
            speeds, of_first = speeds_of(f, int(length)), speeds_of(first, int(length))
            ratio = statistics.median(a / b for a, b in zip(speeds, of_first, strict=True))
            evenness = statistics.median(min(step) / max(step) for step in f["cpu_seconds"])
            cells = (
                *(f"{int(length):,}", cp_size, f"{f['activations'] / 1e6:,.1f}"),
                f"{f['activations'] / first['activations']:.3f}",
                *(f"{statistics.median(speeds):,.0f}", f"{ratio:.2f}", f"{evenness:.2f}"),
            )
            for column, cell in zip(table.values(), cells, strict=True):
                column.append(cell)
    print_table(open_console(), [Column(name, cells) for name, cells in table.items()])


def speeds_of(variant: dict[str, Any], length: int) -> list[float]:
    """Tokens per CPU-second, step by step."""
    return [len(step) * length / sum(step) for step in variant["cpu_seconds"]]


if __name__ == "__main__":
    sys.exit(main())
