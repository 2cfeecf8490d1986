"""Training throughput, memory and traffic of expert parallelism against FSDP alone and against transformers' own:

    python -m benchmarks.throughput --ranks 4                            # as in docs, on CPU
    python -m benchmarks.throughput --ranks 8 --model DIR --dtype bf16   # any model, on GPUs

Complete training steps (forward, backward, clipping, AdamW) of the variants of `benchmarks.variants`, on the same
weights and data. In every round each variant runs on ranks of its own, started for it and ended after it: its peak
memory is nobody else's, and none finds what another has warmed. Variants take turns, so other load on the machine
affects all; a ratio is the median over rounds of the ratio within a round. All steps are on one batch, which the model
is soon learning by heart: losses of all variants must fall, and agree at every step to --loss-tolerance, or the run
aborts: 1e-4 in fp32, 5e-3 where variants round to bf16 in different places.
"""

import argparse
import gc
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import arms
from benchmarks.arms import Arm, Figures, Rounds
from benchmarks.throughput_tables import Case, print_tables
from benchmarks.traffic import KINDS, CountTraffic
from benchmarks.variants import arm_of, parse_variant
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.model_layers import moe_shape
from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.moe.hf_model.counts import seen_pairs, training_flops
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.moe.util.threads import on_one_thread
from expertmesh.sharding.runtime.allocator import let_segments_grow
from expertmesh.sharding.runtime.process import join_process_group
from expertmesh.training.model_setup.compiling import compilation

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "pure-bf16": 5e-3}
"""Relative difference between variants' losses that roundings explain, by --dtype."""


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    # as train_ep.py has it; for the ranks, which inherit it
    let_segments_grow(os.environ)
    try:
        arguments = parse_arguments(given)
        if arguments.worker is not None:
            return arms.work(arguments, arms_of(arguments), partial(take_figures, arguments))
        peak_flops, found = measure_peak(arguments), []
        for flags in flags_of_sweep(arguments):
            found.append(of_value(parse_arguments([*given, *flags]), [*given, *flags], peak_flops))
        arms.write_json(arguments.json, found[0] if len(found) == 1 else found)
        return int(any(each["aborted"] or each["failed"] for each in found))
    except ExpertMeshError as error:
        print(f"benchmarks.throughput: error: {error}", file=sys.stderr, flush=True)
        return 2


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", default="", help="a model directory, or a config.json: random weights; else sizes:")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=1792)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1, help="sequences per rank")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--variants", nargs="+", help="hf-fsdp, ours-ep=N, hf-ep=N; hf-ours=N when asked for")
    parser.add_argument("--routing", choices=("natural", "balanced"), default="natural", help="balanced: forced")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "pure-bf16"), default="fp32", help="bf16: fp32 parameters")
    parser.add_argument("--router-aux-loss-coef", type=float, default=0.001)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--gradient-checkpointing", choices=("none", "full", "selective"), default="none")
    parser.add_argument("--keep-gathered", action="store_true", help="ours: no resharding after forward")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--malloc",
        choices=("as-is", "plain", "settled"),
        default="as-is",
        help="on a CPU: which variants use train_ep.py's malloc settings: ours (as-is), none (plain), all (settled)",
    )
    parser.add_argument("--use-cpu", action="store_true", help="stay on the CPU even if there is a GPU")
    parser.add_argument("--sweep", choices=("tokens", "experts"), help="over --values, instead of one setting")
    parser.add_argument("--values", type=int, nargs="+", help="values of the sweep: tokens per rank, or experts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="untimed steps per variant and round")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per variant and round")
    tolerances = ", ".join(f"{dtype} {tolerance:g}" for dtype, tolerance in TOLERANCE.items())
    parser.add_argument("--loss-tolerance", type=float, help=f"relative (default: {tolerances})")
    parser.add_argument("--timeout", type=int, default=900, help="time limit per variant and round, in seconds")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.loss_tolerance is None:
        arguments.loss_tolerance = TOLERANCE[arguments.dtype]
    if bool(arguments.sweep) != bool(arguments.values):
        raise ExpertMeshError("--sweep and --values: give both, or none")
    if arguments.warm_up < 1 or arguments.steps < 1 or arguments.rounds < 1:
        raise ExpertMeshError("--warm-up, --steps and --rounds: must be 1 or more; traffic is counted while warming up")
    for variant in arguments.variants or []:
        parse_variant(variant)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ExpertMeshError(f"{arguments.json}: there is no directory {arguments.json.absolute().parent}")
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
    """Floating point operations per second of CPU time of this machine in large fp32 matmuls; None where the
    variants compute otherwise."""
    is_cpu = arguments.use_cpu or not torch.cuda.is_available()
    return _peak_of_matmuls() if is_cpu and arguments.dtype == "fp32" else None


def _peak_of_matmuls() -> float:
    """On one thread: of the fastest of a few calls."""
    n = 1024
    a_MK, b_KN, best = torch.randn(n, n), torch.randn(n, n), math.inf
    with on_one_thread():
        for _ in range(6):
            begin = time.thread_time()
            torch.mm(a_MK, b_KN)
            best = min(best, time.thread_time() - begin)
    return 2 * n**3 / best


def of_value(arguments: argparse.Namespace, argv: Sequence[str], peak_flops: float | None) -> dict[str, Any]:
    """Measure the variants in one setting, and print it; what --json keeps."""
    case: list[Case] = []

    def save_model(path: Path) -> None:
        # in a process of its own, which gives a GPU's memory back
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(save_random_model, (path, arguments))
        case.append(case_of(path, arguments, peak_flops))

    start = partial(arms.on_ranks, timeout=arguments.timeout)
    variants = arms_of(arguments)
    taken = arms.in_turn("benchmarks.throughput", argv, variants, arguments.rounds, save_model, start, may_fail=True)
    for variant, problem in taken.failed.items():
        print(f"{variant} gave no figures: {problem}", flush=True)
    aborted = why_aborted(taken.found, arguments.loss_tolerance)
    header = describe(arguments, case[0], taken.found)
    if aborted:
        print(f"aborted: {aborted}", flush=True)
    else:
        agreement = arms.largest_difference(taken.found)[0]
        print(f"\n{header}\nlosses of all variants agree: the largest relative difference is {agreement:.0e}")
        print_tables(case[0], taken.found)
    results = [{"variant": name, "rounds": [asdict(one) for one in rounds]} for name, rounds in taken.found.items()]
    return {"setting": header, "aborted": aborted, "results": results, "failed": taken.failed}


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
            model = arms.random_mixtral(
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
    ranks = join_process_group(arguments.use_cpu, arguments.timeout)
    device = ranks.device
    base = arms.held_now(device)
    made = arm.made(path)
    gc.collect()
    arms.begin_peak(device)
    vocabulary = made.model.config.vocab_size
    sequences = arms.random_sequences(arguments.rows, arguments.seq_length, vocabulary, seed=ranks.rank)
    batch, traffic = arms.batch_of(*sequences).to(device), CountTraffic()
    warm_up = arguments.warm_up
    figures = arms.steps_of(lambda: made.step([batch]), arguments.steps, device, warm_up, first_within=traffic)
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
    if not rounds:
        return "no variant finished"
    losses = next(iter(rounds.values()))[0].losses
    if losses[0] - losses[-1] < 10 * tolerance * losses[0]:
        moved = f"the loss went from {losses[0]:.6f} to {losses[-1]:.6f}"
        return f"{moved}: too little to compare how the variants train; raise --learning-rate"
    return arms.disagreement(rounds, tolerance)


def describe(arguments: argparse.Namespace, case: Case, rounds: Rounds) -> str:
    devices = sorted({figures.more["device"] for of in rounds.values() for figures in of})
    mallocs = {
        "as-is": "ours settles malloc, transformers does not",
        "plain": "plain malloc",
        "settled": "malloc settled",
    }
    said = [
        f"{case.world_size} ranks on {', '.join(devices)} ({arms.machine()})",
        f"{arguments.dtype}",
        f"{case.parameters / 1e6:,.1f} M parameters: {case.layers} layers, hidden {case.shape.model_width}, expert "
        f"width {case.shape.expert_width}, {case.shape.num_experts} experts, top-{case.shape.top_k}",
        f"{arguments.rows} x {arguments.seq_length} tokens per rank",
        f"{arguments.routing} routing",
        f"aux loss {arguments.router_aux_loss_coef:g}",
        f"clip {arguments.max_grad_norm:g}",
        f"AdamW, learning rate {arguments.learning_rate:g}",
        f"checkpointing {arguments.gradient_checkpointing}",
    ]
    said += ["ours not resharded after forward"] * arguments.keep_gathered
    said += ["torch.compile of ours by region, of transformers' complete model"] * arguments.compile
    said += [mallocs[arguments.malloc]] * ("cpu" in devices)
    if case.peak_flops is not None:
        said += [f"floor: the FLOPs at {case.peak_flops / 1e9:,.0f} GFLOP/s of CPU time, measured here"]
    said += [f"transformers {version('transformers')}, Python {platform.python_version()}"]
    said += [f"{arguments.rounds} rounds of {arguments.steps} steps after {arguments.warm_up} of warm-up, interleaved"]
    return "; ".join(said)


if __name__ == "__main__":
    sys.exit(main())
