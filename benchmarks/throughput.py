"""Training throughput, memory and traffic of expert parallelism against FSDP alone and against transformers' own:

    python -m benchmarks.throughput --ranks 4                            # as in docs, on CPU
    python -m benchmarks.throughput --ranks 8 --model DIR --dtype bf16   # any model, on GPUs

Complete training steps (forward, backward, clipping, AdamW) of the variants of `benchmarks.variants`, on the same
weights and data. All steps are on one batch, which the model is soon learning by heart: losses of all variants must
fall, and agree at every step, or the run aborts: to 1e-4 in fp32, to 5e-3 where variants round to bf16 in different
places.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import MB, Arm, Benchmark, Figures, Rounds, code_of, ratio
from benchmarks.commands import command, parser_of, print_rows, settings_line, write_json
from benchmarks.small_models import random_mixtral
from benchmarks.traffic import KINDS, CountTraffic
from benchmarks.variants import arm_of, parse_variant
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.model_layers import moe_shape
from expertmesh.moe.experts.shape import MoEShape
from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.moe.hf_model.counts import seen_pairs, training_flops
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.threads import on_one_thread
from expertmesh.sharding.runtime.allocator import let_segments_grow
from expertmesh.sharding.runtime.process import join_process_group
from expertmesh.training.model_setup.compiling import compilation
from expertmesh.training.monitoring.meter import peak_tflops

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "pure-bf16": 5e-3}
"""Relative difference between variants' losses that roundings explain, by --dtype."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    # as train_ep.py has it; for the ranks, which inherit it
    let_segments_grow(os.environ)
    arguments = parse_arguments(given)
    if arms.worker() is not None:
        return benchmark_of(None).main(arguments, given)
    benchmark = benchmark_of(measure_peak(arguments))
    sweep = [[*given, *flags] for flags in flags_of_sweep(arguments)]
    found = [benchmark.compare(parse_arguments(words), words) for words in sweep]
    write_json(arguments.json, found[0] if len(found) == 1 else found)
    return max(map(code_of, found))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    sizes = dict(hidden_size=512, intermediate_size=1792, layers=8, experts=8, top_k=2, vocabulary=8192)
    of_step = dict(rows=1, seq_length=256, gradient_checkpointing="none")
    parser = parser_of(__doc__, ranks=4, steps=3, rounds=3, json=None, **of_step, **sizes)
    parser.add_argument("--model", default="", help="a model directory, or a config.json: random weights; else sizes")
    parser.add_argument("--variants", nargs="+", help="hf-fsdp, ours-ep=N, hf-ep=N; hf-ours=N when asked for")
    parser.add_argument("--routing", choices=("natural", "balanced"), default="natural", help="balanced: forced")
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32", help="bf16: fp32 parameters")
    parser.add_argument("--router-aux-loss-coef", type=float, default=0.001)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--compile", action="store_true", help="ours by region, of transformers' the complete model")
    parser.add_argument(
        "--malloc",
        choices=("as-is", "plain", "settled"),
        default="as-is",
        help="on a CPU: which variants use train_ep.py's malloc settings: ours (as-is), none (plain), all (settled)",
    )
    parser.add_argument("--use-cpu", action="store_true", help="stay on the CPU even if there is a GPU")
    parser.add_argument("--sweep", choices=("tokens", "experts"), help="over --values, instead of one setting")
    parser.add_argument("--values", type=int, nargs="+", help="values of the sweep: tokens per rank, or experts")
    arguments = parser.parse_args(argv)
    if bool(arguments.sweep) != bool(arguments.values):
        raise ExpertMeshError("--sweep and --values: give both, or none")
    if arguments.steps < 1 or arguments.rounds < 1:
        raise ExpertMeshError("--steps and --rounds: must be 1 or more")
    for variant in arguments.variants or []:
        parse_variant(variant)
    return arguments


def flags_of_sweep(arguments: argparse.Namespace) -> list[list[str]]:
    """For each value what it changes, as flags."""
    if arguments.sweep == "experts":
        return [["--experts", str(value)] for value in arguments.values]
    if arguments.sweep == "tokens":
        rows = [divide_rows(value, arguments.seq_length) for value in arguments.values]
        return [["--rows", str(number), "--seq-length", str(length)] for number, length in rows]
    return [[]]


def divide_rows(tokens: int, seq_length: int) -> tuple[int, int]:
    """Sequences of seq_length tokens that make up so many tokens, or one shorter sequence."""
    if tokens > seq_length and tokens % seq_length:
        raise ExpertMeshError(f"--values {tokens}: is more than --seq-length {seq_length} and no multiple of it")
    return (tokens // seq_length, seq_length) if tokens > seq_length else (1, tokens)


def arms_of(arguments: argparse.Namespace) -> list[Arm]:
    """Those that are asked for, or all that the ranks and --experts allow."""
    ranks = arguments.ranks
    sizes = [n for n in range(2, ranks + 1) if ranks % n == 0 and (arguments.model or arguments.experts % n == 0)]
    expert_parallel = [variant for n in sizes for variant in (f"hf-ep={n}", f"ours-ep={n}")]
    return [arm_of(name, arguments) for name in arguments.variants or ["hf-fsdp", "ours-ep=1", *expert_parallel]]


def measure_peak(arguments: argparse.Namespace) -> float | None:
    """Floating point operations per second of CPU time of this machine in large fp32 matmuls, on one thread, of the
    fastest of a few; None where the variants compute otherwise."""
    if arguments.dtype != "fp32" or (torch.cuda.is_available() and not arguments.use_cpu):
        return None
    n = 1024
    a_MK, b_KN = torch.randn(n, n), torch.randn(n, n)
    with on_one_thread():
        took = arms.timed(lambda: torch.mm(a_MK, b_KN), torch.device("cpu"), repetitions=6)
    return 2 * n**3 / min(one.cpu for one in took)


@dataclass(frozen=True)
class Case:
    """What all variants have in common. tokens: per step of all ranks. flops: needed. parameters: of the model.
    bytes_a_number: of an activation on its way. peak_flops: per second of CPU time, of matmuls."""

    shape: MoEShape
    layers: int
    tokens: int
    world_size: int
    flops: float
    parameters: int
    bytes_a_number: int
    peak_flops: float | None = None

    def all_to_all_theory(self, ep_size: int) -> float:
        """Bytes that a rank sends in one step by expert-parallel layers under even routing: each token to K experts and
        back, and so its gradients."""
        rows = self.shape.top_k * self.tokens / self.world_size
        return self.layers * 4 * rows * self.shape.model_width * self.bytes_a_number * (ep_size - 1) / ep_size

    def rates(self, figures: Sequence[Figures], clock: str) -> list[float]:
        """Tokens per second of each round's median step, by the "seconds" or the "cpu_seconds"."""
        return [self.tokens / statistics.median(getattr(one, clock)) for one in figures]

    def mfu(self, figures: Sequence[Figures]) -> float | None:
        peak = peak_tflops(figures[0].more["device"])
        # the peak is that of bf16
        if peak is None or self.bytes_a_number != 2:
            return None
        rate = statistics.median(self.rates(figures, "seconds"))
        return self.flops / self.tokens * rate / self.world_size / (peak * 1e12)


def benchmark_of(peak_flops: float | None) -> Benchmark:
    """Of the variants in one setting.

    Args:
        peak_flops: see `measure_peak`.
    """
    cases: list[Case] = []

    def save_model(arguments: argparse.Namespace, path: Path) -> None:
        # in a process of its own, which gives a GPU's memory back
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(save_random_model, (path, arguments))
        cases.append(case_of(path, arguments, peak_flops))

    def report(arguments: argparse.Namespace, rounds: Rounds) -> None:
        case, device = cases[-1], next(iter(rounds.values()))[0].more["device"]
        size = f"{case.parameters / 1e6:,.1f} M parameters"
        floor = "" if peak_flops is None else f"; floor: the FLOPs at {peak_flops / 1e9:,.0f} GFLOP/s of CPU time"
        print(f"\n{settings_line(arguments, size, device=device)}{floor}")
        agreement = arms.largest_difference(rounds)[0]
        print(f"losses of all variants agree: the largest relative difference is {agreement:.0e}")
        print_tables(case, rounds)

    def fault(arguments: argparse.Namespace, rounds: Rounds) -> str | None:
        return why_aborted(rounds, TOLERANCE[arguments.dtype])

    return Benchmark("benchmarks.throughput", arms_of, save_model, take_figures, report, fault)


def save_random_model(path: Path, arguments: argparse.Namespace) -> None:
    """Of a directory that has weights, a link to it."""
    if (given := Path(arguments.model)).is_dir() and arguments.model:
        path.symlink_to(given.absolute())
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    on_gpu = torch.cuda.is_available() and not arguments.use_cpu
    dtype = torch.bfloat16 if arguments.dtype == "pure-bf16" else torch.float32
    with torch.device("cuda" if on_gpu else "cpu"):
        if arguments.model:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model), dtype=dtype)
        else:
            model = random_mixtral(
                arguments,
                num_attention_heads=arguments.hidden_size // 64,
                num_key_value_heads=max(1, arguments.hidden_size // 256),
                num_local_experts=arguments.experts,
                num_experts_per_tok=arguments.top_k,
                max_position_embeddings=max(arguments.seq_length, 32),
            ).to(dtype)
    model.save_pretrained(path)


def case_of(path: Path, arguments: argparse.Namespace, peak_flops: float | None) -> Case:
    source = open_source(path)
    meta: Any = source.build()
    counts = count_parameters(meta)
    rows, length = arguments.rows * arguments.ranks, arguments.seq_length
    pairs = seen_pairs(counts.attention, [range(length)] * rows)
    flops = training_flops(counts, source.config, rows * length, rows * (length - 1), pairs)
    bytes_a_number = 4 if arguments.dtype == "fp32" else 2
    layers, shape = source.config.num_hidden_layers, moe_shape(meta)
    return Case(shape, layers, rows * length, arguments.ranks, flops, counts.total, bytes_a_number, peak_flops)


def take_figures(arguments: argparse.Namespace, arm: Arm, path: Path) -> Figures:
    """On each rank: the steps of a variant. `more` has the peak memory of the rank with most, of it what there was
    before the model, what a rank sends by kind of collective and in how many calls, and the device."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ranks = join_process_group(arguments.use_cpu, arms.TIMEOUT)
    device = ranks.device
    base = arms.held_now(device)
    made = arm.made(path)
    gc.collect()
    arms.begin_peak(device)
    vocabulary = made.model.config.vocab_size
    sequences = arms.random_sequences(arguments.rows, arguments.seq_length, vocabulary, seed=ranks.rank)
    batch, traffic = arms.batch_of(*sequences).to(device), CountTraffic()
    figures = arms.steps_of(lambda: made.step([batch]), arguments.steps, device, first_within=[traffic])
    if arguments.compile and compilation().graphs == 0:
        raise ExpertMeshError(f"{arm.name}: --compile compiled nothing")
    counted = arms.gathered((dict(traffic.sent), dict(traffic.calls)))
    sent, calls = (
        {kind: sum(rank[which].get(kind, 0) for rank in counted) / len(counted) for kind in KINDS} for which in (0, 1)
    )
    figures.more = {
        "peak": max(arms.gathered(arms.most_held(device))),
        "base": max(arms.gathered(base)),
        "sent": sent,
        "calls": calls,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    return figures


def why_aborted(rounds: Rounds, tolerance: float) -> str | None:
    """Why no figure of these means anything; None if they do."""
    losses = next(iter(rounds.values()))[0].losses
    if losses[0] - losses[-1] < 10 * tolerance * losses[0]:
        moved = f"the loss went from {losses[0]:.6f} to {losses[-1]:.6f}"
        return f"{moved}: too little to compare how the variants train; raise --learning-rate"
    return arms.disagreement(rounds, tolerance)


def peak_mb(figures: Sequence[Figures]) -> float:
    return statistics.median(one.more["peak"] / MB for one in figures)


def print_tables(case: Case, rounds: Rounds) -> None:
    """Speed, memory and traffic of the variants of one case; on a CPU also where its time goes."""
    # a CPU's seconds depend on what else the machine has to do, those that it computed less so
    by = "cpu_seconds" if next(iter(rounds.values()))[0].more["device"] == "cpu" else "seconds"
    print(f"\ntimes: of {'tokens/s' if by == 'seconds' else 'tokens/CPU-s'}, and in parentheses of memory")
    print_rows([speed(case, name, rounds, by) for name in rounds])
    if by == "cpu_seconds":
        print("\nCPU time and page faults of all ranks per step; floor: that of its FLOPs at the peak of matmuls")
        print_rows([of_cpu(case, name, figures) for name, figures in rounds.items()])
    print("\nsent per rank in the first step, MB (calls); theory: tokens alone, routed evenly")
    print_rows(traffic(case, rounds))


def speed(case: Case, name: str, rounds: Rounds, by: str) -> Mapping[str, str]:
    mine = rounds[name]
    row = {"": name}
    for title, clock in (("tokens/s", "seconds"), ("tokens/CPU-s", "cpu_seconds")):
        rates = case.rates(mine, clock)
        row |= {title: f"{statistics.median(rates):,.1f}", f"of {title}": f"{min(rates):,.1f}-{max(rates):,.1f}"}
    row["peak MB"] = f"{peak_mb(mine):,.0f}"
    for title, other in (("hf-fsdp", "hf-fsdp"), ("ours-ep=1", "ours-ep=1"), ("hf at this ep", f"hf-ep={ep_of(name)}")):
        row[f"times\n{title}"] = ""
        if other in rounds and other != name:
            gain = ratio(case.rates(mine, by), case.rates(rounds[other], by))
            row[f"times\n{title}"] = f"{gain:.2f} ({peak_mb(mine) / peak_mb(rounds[other]):.2f})"
    if (mfu := case.mfu(mine)) is not None:
        row["MFU"] = f"{mfu:.1%}"
    return row


def ep_of(variant: str) -> int:
    return int(variant.partition("=")[2] or 1)


def of_cpu(case: Case, name: str, figures: Sequence[Figures]) -> Mapping[str, str]:
    """Medians over all steps of all rounds."""
    cpu, system, faults = (
        statistics.median(sum(step) for one in figures for step in getattr(one, kind))
        for kind in ("cpu", "system", "faults")
    )
    floor = "" if case.peak_flops is None else f"{case.flops / case.peak_flops / cpu:.0%}"
    of_system = f"{system:.2f} ({system / cpu:.0%})"
    return {
        "": name,
        "CPU-s": f"{cpu:.2f}",
        "in the OS kernel": of_system,
        "page faults": f"{faults:,.0f}",
        "floor": floor,
    }


def traffic(case: Case, rounds: Rounds) -> list[Mapping[str, str]]:
    last = {name: figures[-1].more for name, figures in rounds.items()}
    kinds = [kind for kind in KINDS if any(more["calls"][kind] for more in last.values())]
    rows: list[Mapping[str, str]] = []
    for name, more in last.items():
        sent, calls, theory = more["sent"], more["calls"], case.all_to_all_theory(ep_of(name))
        rows.append(
            {
                "": name,
                **{kind: f"{sent[kind] / MB:,.1f} ({calls[kind]:.0f})" for kind in kinds},
                "all": f"{sum(sent.values()) / MB:,.1f}",
                "all-to-all / theory": f"{sent['all-to-all'] / theory:.4f}" if theory else "",
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
