"""Training throughput, memory and traffic of expert parallelism against FSDP alone and against transformers' own:

    torchrun --nproc-per-node 4 -m benchmarks.throughput                            # as in docs, on CPU
    torchrun --nproc-per-node 8 -m benchmarks.throughput --model DIR --dtype bf16   # any model, on GPUs

Complete training steps (forward, backward, clipping, AdamW) of the variants of `benchmarks.variants`, on the same
weights and data. In every round each variant runs in processes of its own, made for it and ended after it: its peak
memory is nobody else's, and none finds what another has warmed. Variants take turns, so other load on the machine
affects all; a ratio is the median over rounds of the ratio within a round. All steps are on one batch, which the model
is soon learning by heart: losses of all variants must fall, and agree at every step to --loss-tolerance, or the run
aborts: 1e-4 in fp32, 5e-3 where variants round to bf16 in different places. With --profile each variant takes a step
more in its first round, after those that are timed, and writes a trace of it.
"""

import argparse
import ctypes
import gc
import json
import logging
import math
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.load_memory import MB, resident, restart_peak
from benchmarks.throughput_tables import Case, Figures, Result, cases_of, draw, judge, print_tables, short
from benchmarks.traffic import KINDS, CountTraffic
from benchmarks.variants import Work, build_variant, parse_variant
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.experts.model_layers import moe_shape
from expertmesh.moe.hf_model.build import count_parameters
from expertmesh.moe.hf_model.counts import seen_pairs, training_flops
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.process_place import process_place
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.moe.util.threads import on_one_thread
from expertmesh.sharding.runtime.allocator import let_segments_grow
from expertmesh.sharding.runtime.process import Ranks, end_process_group, start_process_group
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.environment import cpu_model
from expertmesh.training.model_setup.compiling import compilation

PRELOADED = [
    "transformers.models.mixtral.modeling_mixtral",
    "torch.distributed.fsdp",
    "accelerate",
    "benchmarks.variants",
]

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "pure-bf16": 5e-3}
"""Relative difference between variants' losses that roundings explain, by --dtype."""


@dataclass(frozen=True)
class Setting:
    """A model and a batch that all variants are run on."""

    work: Work
    case: Case
    parameters: int


@ends_with_reader
def main() -> int:
    # torchrun ends its ranks by SIGTERM, and so does `timeout`; the scratch directory must go all the same
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # as train_ep.py has it; for variants, whose processes inherit it
    let_segments_grow(os.environ)
    try:
        arguments = parse_arguments()
        ranks = start_process_group(use_cpu=True, timeout_seconds=arguments.timeout)
        with scratch_directory() as scratch:
            peak_flops = measure_peak(arguments, ranks)
            values = arguments.values or [None]
            settings = [make_setting(v, arguments, scratch, ranks, peak_flops) for v in values]
            results = run_rounds(settings, arguments, ranks)
            failed = ranks.rank == 0 and not report(settings, results, arguments)
        end_process_group()
        return int(failed)
    except ExpertMeshError as error:
        if process_place().local_rank == 0:
            print(f"benchmarks.throughput: error: {error}", file=sys.stderr, flush=True)
        return 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a trace of a step of each variant here")
    parser.add_argument("--timeout", type=int, default=900, help="time limit per variant and round, in seconds")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--picture", type=Path, help="also draw them here, as SVG")
    arguments = parser.parse_args()
    if arguments.loss_tolerance is None:
        arguments.loss_tolerance = TOLERANCE[arguments.dtype]
    if bool(arguments.sweep) != bool(arguments.values):
        raise ExpertMeshError("--sweep and --values: give both, or none")
    if arguments.warm_up < 1 or arguments.steps < 1 or arguments.rounds < 1:
        raise ExpertMeshError("--warm-up, --steps and --rounds: must be 1 or more; traffic is counted while warming up")
    for variant in arguments.variants or []:
        parse_variant(variant)
    for file in (arguments.json, arguments.picture):
        if file is not None and not file.absolute().parent.is_dir():
            raise ExpertMeshError(f"{file}: there is no directory {file.absolute().parent} to write it to")
    # where the project's targets on a CPU are set
    free = (
        *("variants", "rounds", "warm_up", "steps", "timeout", "json", "picture", "use_cpu", "loss_tolerance"),
        "profile",
    )
    is_default = all(v == parser.get_default(name) for name, v in vars(arguments).items() if name not in free)
    on_cpu = arguments.use_cpu or not torch.cuda.is_available()
    arguments.at_target = is_default and on_cpu and os.environ.get("WORLD_SIZE") == "4"
    return arguments


def all_variants(world_size: int, num_experts: int) -> list[str]:
    sizes = [n for n in range(2, world_size + 1) if world_size % n == 0 and num_experts % n == 0]
    expert_parallel = [variant for n in sizes for variant in (f"hf-ep={n}", f"ours-ep={n}")]
    return ["hf-fsdp", "ours-ep=1", *expert_parallel]


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """One a node, for models with random weights."""
    name = [f"expertmesh-throughput-{os.getpid()}"]
    dist.broadcast_object_list(name)
    path = Path(tempfile.gettempdir()) / name[0]
    try:
        yield path
    finally:
        if process_place().local_rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def measure_peak(arguments: argparse.Namespace, ranks: Ranks) -> float | None:
    """Floating point operations per second of CPU time of this machine in large fp32 matmuls; None where the
    variants compute otherwise. On rank 0, while the others wait."""
    if arguments.dtype != "fp32" or not (arguments.use_cpu or not torch.cuda.is_available()):
        return None
    found = [_peak_of_matmuls() if ranks.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


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


def make_setting(
    value: int | None,
    arguments: argparse.Namespace,
    scratch: Path,
    ranks: Ranks,
    peak_flops: float | None,
) -> Setting:
    """The model (made and saved, where there is none) and the work of one value of the sweep."""
    arguments = argparse.Namespace(**vars(arguments))
    if arguments.sweep == "tokens":
        arguments.rows, arguments.seq_length = divide_rows(value or 0, arguments.seq_length)
    if arguments.sweep == "experts":
        arguments.experts = value
    model = Path(arguments.model)
    if not (arguments.model and model.is_dir()):
        model = scratch / f"model-{value}"
        if process_place().local_rank == 0:
            in_own_process(save_random_model, model, arguments)
        dist.barrier()
    source = open_source(model)
    meta: Any = source.build()
    counts = count_parameters(meta)
    rows, length = arguments.rows * ranks.world_size, arguments.seq_length
    pairs = seen_pairs(counts.attention, [range(length)] * rows)
    flops = training_flops(counts, source.config, rows * length, rows * (length - 1), pairs)
    work = Work(
        model,
        arguments.rows,
        length,
        arguments.dtype == "bf16",
        arguments.dtype == "pure-bf16",
        arguments.routing == "balanced",
        arguments.router_aux_loss_coef,
        arguments.learning_rate,
        arguments.max_grad_norm,
        arguments.gradient_checkpointing,
        not arguments.keep_gathered,
        arguments.compile,
        arguments.malloc,
        arguments.use_cpu,
    )
    bytes_a_number = 4 if arguments.dtype == "fp32" else 2
    layers = source.config.num_hidden_layers
    case = Case(value, moe_shape(meta), layers, rows * length, ranks.world_size, flops, bytes_a_number, peak_flops)
    return Setting(work, case, counts.total)


def divide_rows(tokens: int, seq_length: int) -> tuple[int, int]:
    """Sequences of seq_length tokens that make up so many tokens, or one shorter sequence."""
    if tokens > seq_length and tokens % seq_length:
        raise ExpertMeshError(f"--values {tokens}: is more than --seq-length {seq_length} and no multiple of it")
    return (tokens // seq_length, seq_length) if tokens > seq_length else (1, tokens)


def save_random_model(path: Path, arguments: argparse.Namespace) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // 64,
        num_key_value_heads=max(1, arguments.hidden_size // 256),
        num_local_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        max_position_embeddings=max(arguments.seq_length, 32),
    )
    if arguments.model:
        config = AutoConfig.from_pretrained(arguments.model)
    on_gpu = torch.cuda.is_available() and not arguments.use_cpu
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if arguments.dtype == "pure-bf16" else torch.float32
        )
    model.save_pretrained(path)


def in_own_process(function: Any, *args: Any) -> None:
    process = context().Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise ExpertMeshError(f"{function.__name__} ended with code {process.exitcode}see its message above")


def context() -> Any:
    """Processes come from a server that has imported everything and holds no model."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def run_rounds(settings: list[Setting], arguments: argparse.Namespace, ranks: Ranks) -> list[Result]:
    """Variants that gave no figures once are left out from then on."""
    results = []
    for setting in settings:
        variants = arguments.variants or all_variants(ranks.world_size, setting.case.shape.num_experts)
        results += [(setting, Result(setting.case, variant, [])) for variant in variants]
    for number in range(arguments.rounds):
        for setting, result in results:
            if any(figures.problem for figures in result.rounds):
                continue
            figures = run_variant(result.variant, setting.work, arguments, arguments.profile if number == 0 else None)
            result.rounds.append(figures)
            if ranks.rank == 0:
                where = f"{arguments.sweep} {setting.case.value}, " if arguments.sweep else ""
                said = figures.problem or short(figures)
                print(f"round {number + 1}, {where}{result.variant}: {said}", file=sys.stderr, flush=True)
    return [result for _, result in results]


def run_variant(variant: str, work: Work, arguments: argparse.Namespace, profile: Path | None) -> Figures:
    """Run in one process per rank, which is ended when that of another rank has failed."""
    ours, theirs = context().Pipe()
    process = context().Process(
        target=measure, args=(theirs, variant, work, arguments.warm_up, arguments.steps, arguments.timeout, profile)
    )
    process.start()
    theirs.close()
    found: Figures | None = None
    deadline = time.monotonic() + arguments.timeout
    while True:
        if found is None and ours.poll(0.5):
            found = receive(ours, process)
        if found is None and time.monotonic() > deadline:
            found = Figures(problem=f"took more than --timeout {arguments.timeout} s")
        failed = int(found is not None and found.problem is not None)
        state = torch.tensor([failed, int(found is None)])
        dist.all_reduce(state)
        if state[0] > 0:
            process.kill()
        if state[0] > 0 or state[1] == 0:
            break
    process.join()
    everybody: list[Figures | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    problems = [f for f in everybody if f is not None and f.problem]
    return problems[0] if problems else next(f for f in everybody if f is not None)


def receive(connection: Connection, process: Any) -> Figures:
    try:
        found: Figures = connection.recv()
        return found
    except EOFError:
        process.join()
        hint = "; was it out of memory?" if process.exitcode == -9 else ""
        return Figures(problem=f"the process ended with code {process.exitcode}{hint}")


def measure(
    connection: Connection,
    name: str,
    work: Work,
    warm_up: int,
    num_steps: int,
    timeout: int,
    profile: Path | None,
) -> None:
    """What a process of one variant does; it sends `Figures`, the same on every rank."""
    try:
        end_with_parent()
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        ranks = start_process_group(work.cpu, timeout)
        connection.send(take_figures(name, work, warm_up, num_steps, ranks, profile))
        end_process_group()
    except torch.OutOfMemoryError:
        connection.send(Figures(problem="out of GPU memory"))
    except Exception:
        connection.send(Figures(problem=traceback.format_exc()))


def take_figures(
    name: str, work: Work, warm_up: int, num_steps: int, ranks: Ranks, profile: Path | None = None
) -> Figures:
    base = resident("VmRSS")
    variant = build_variant(name, work, ranks)
    vocabulary = variant.model.config.vocab_size
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        restart_peak()
    traffic = CountTraffic()
    losses, seconds, used = [], [], []
    batch = make_batch(work, vocabulary, ranks)
    for step in range(warm_up + num_steps):
        settle(ranks.device)
        begin, used_before = time.perf_counter(), processor_use()
        if step == 0:
            with traffic:
                losses.append(variant.make_step(batch))
        else:
            losses.append(variant.make_step(batch))
        settle(ranks.device)
        seconds.append(time.perf_counter() - begin)
        used.append(processor_use() - used_before)
    if work.compile and compilation().graphs == 0:
        raise ExpertMeshError(f"{name}: --compile compiled nothing")
    if profile is not None:
        write_trace(profile / f"{name}.rank-{ranks.rank}.json", lambda: variant.make_step(batch))
    peak = torch.cuda.max_memory_allocated() if ranks.device.type == "cuda" else resident("VmHWM")

    highest = torch.tensor([peak, base], dtype=torch.float64)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    counted = torch.tensor([[traffic.sent[k], traffic.calls[k]] for k in KINDS], dtype=torch.float64)
    used_3 = torch.stack(used, dim=1)
    dist.all_reduce(counted)
    dist.all_reduce(used_3)
    counted /= ranks.world_size
    cpu_seconds, system_seconds, faults = used_3[:, warm_up:].tolist()
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
    return Figures(
        seconds[warm_up:],
        cpu_seconds,
        system_seconds,
        faults,
        losses,
        float(highest[0]) / MB,
        float(highest[1]) / MB,
        dict(zip(KINDS, counted[:, 0].tolist(), strict=True)),
        dict(zip(KINDS, counted[:, 1].tolist(), strict=True)),
        device,
    )


def write_trace(file: Path, step: Callable[[], object]) -> None:
    """Profile one step, for Chrome's or Perfetto's viewer."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profiler:
        step()
    with whole(file) as partial:
        profiler.export_chrome_trace(str(partial))


def processor_use() -> torch.Tensor:
    """Use of the CPU by this process so far: seconds of CPU time, those of them in the OS kernel, minor page faults."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return torch.tensor([use.ru_utime + use.ru_stime, use.ru_stime, use.ru_minflt], dtype=torch.float64)


def end_with_parent() -> None:
    """The parent of a variant's process is the forkserver, which may outlive the rank that asked for it."""
    end_by_signal = 1  # PR_SET_PDEATHSIG in sys/prctl.h
    ctypes.CDLL(None).prctl(end_by_signal, signal.SIGKILL)


def make_batch(work: Work, vocabulary: int, ranks: Ranks) -> Batch:
    """Random tokens, the same for every variant, other ones on each rank."""
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens_BS = torch.randint(0, vocabulary, (work.rows, work.seq_length), generator=generator)
    rows = [[Sample(row, [True] * len(row))] for row in tokens_BS.tolist()]
    return collate(rows).to(ranks.device)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def report(settings: list[Setting], results: list[Result], arguments: argparse.Namespace) -> bool:
    """Write and print everything; whether the run counts."""
    complete = [r for r in results if not any(f.problem for f in r.rounds)]
    problems = {r.variant: r.rounds[-1].problem for r in results if r not in complete}
    aborted = why_aborted(complete, arguments.loss_tolerance)
    headers = {setting.case: describe(setting, arguments, complete) for setting in settings}
    if arguments.json:
        content = {
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "aborted": aborted,
            "settings": list(headers.values()),
            "results": [asdict(result) for result in results],
        }
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(content, indent=1))
    for variant, problem in problems.items():
        print(f"{variant} gave no figures:\n{problem}", flush=True)
    if aborted:
        print(f"aborted: {aborted}", flush=True)
        return False
    for case, header in headers.items():
        agreement = largest_difference([r for r in complete if r.case == case])[0]
        print(f"\n{header}\nlosses of all variants agree: the largest relative difference is {agreement:.0e}")
        print_tables([r for r in complete if r.case == case])
    if arguments.at_target:
        print("", *judge(complete), sep="\n", flush=True)
    if arguments.picture:
        with whole(arguments.picture) as partial:
            partial.write_text(draw(complete, next(iter(headers.values())), arguments.sweep))
    return not problems


def why_aborted(results: list[Result], tolerance: float) -> str | None:
    """Why no figure of these means anything; None if they do."""
    if not results:
        return "no variant finished"
    for case in cases_of(results):
        mine = [result for result in results if result.case == case]
        difference, where = largest_difference(mine)
        if difference > tolerance:
            return (
                f"{where} differs from {mine[0].variant} by {difference:.1e} in the loss, allowed are {tolerance:.0e}"
            )
        first, *_, last = mine[0].rounds[0].losses
        if first - last < 10 * tolerance * first:
            moved = f"the loss went from {first:.6f} to {last:.6f}"
            return f"{moved}: too little to compare how the variants train; raise --learning-rate"
    return None


def largest_difference(results: list[Result]) -> tuple[float, str]:
    """Between the losses of any step of any variant and round and those of the first one's first round, relative, and
    where it is; infinite when a loss is not finite."""
    expected = results[0].rounds[0].losses
    found = [(0.0, "")]
    for result in results:
        for number, figures in enumerate(result.rounds):
            for step, (a, b) in enumerate(zip(figures.losses, expected, strict=True)):
                difference = abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf
                found.append((difference, f"{result.variant}, round {number + 1}, step {step + 1},"))
    return max(found)


def describe(setting: Setting, arguments: argparse.Namespace, results: list[Result]) -> str:
    devices = sorted({figures.device for result in results for figures in result.rounds})
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    work, case = setting.work, setting.case
    mallocs = {
        "as-is": "ours settles malloc, transformers does not",
        "plain": "plain malloc",
        "settled": "malloc settled",
    }
    said = [
        f"{case.world_size} ranks on {', '.join(devices)} ({cpu_model()}, {os.cpu_count()} cores)",
        f"{arguments.dtype}",
        f"{setting.parameters / 1e6:,.1f} M parameters: {case.layers} layers, hidden {case.shape.model_width}, expert "
        f"width {case.shape.expert_width}, {case.shape.num_experts} experts, top-{case.shape.top_k}",
        f"{work.rows} x {work.seq_length} tokens per rank",
        f"{arguments.routing} routing",
        f"aux loss {work.aux_loss:g}",
        f"clip {work.max_grad_norm:g}",
        f"AdamW, learning rate {work.learning_rate:g}",
        f"checkpointing {work.gradient_checkpointing}",
    ]
    said += ["ours not resharded after forward"] * (not work.reshard_after_forward)
    said += ["torch.compile of ours by region, of transformers' complete model"] * work.compile
    if "cpu" in devices:
        said += [mallocs[work.malloc]]
    if case.peak_flops is not None:
        said += [f"floor: the FLOPs at {case.peak_flops / 1e9:,.0f} GFLOP/s of CPU time, measured here"]
    said += [versions, f"Python {platform.python_version()}"]
    said += [f"{arguments.rounds} rounds of {arguments.steps} steps after {arguments.warm_up} of warm-up, interleaved"]
    return "; ".join(said)


if __name__ == "__main__":
    sys.exit(main())
