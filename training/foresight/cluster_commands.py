"""Plan a run and check a cluster: `python -m expertmesh.sharding ...`.

plan --model DIR --gpus 16 --seq-length 4096       what fits, what it costs, how to start it
rehearse --model DIR --gpus 16 --ep-size 8 ...     the real step of one rank, without a GPU
mesh --world-size 16 --ep-size 8                   which ranks form which group
mesh --ep-size 8 --check                           under torchrun: whether the groups work, and how fast
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.console import Console
from rich.text import Text

from expertmesh.moe import ExpertMeshError
from expertmesh.moe.base.command import run_command
from expertmesh.moe.base.parser import Parser, tell_without_effect
from expertmesh.moe.base.sizes import parse_size
from expertmesh.moe.base.terminal import ends_with_reader, folded, terminal_width
from expertmesh.moe.base.whole import whole
from expertmesh.sharding.life.torchrun import read_environment, tell_mistake
from expertmesh.sharding.pipeline.balance import cut_stages
from expertmesh.sharding.pipeline.schedule import ScheduleName
from expertmesh.sharding.place.choices import Dispatch
from expertmesh.sharding.topology import (
    Topology,
    check_divides,
    check_sizes,
    check_tp_nodes,
    nodes_of_equal_size,
)
from expertmesh.training.foresight.columns import Column, open_console, print_table
from expertmesh.training.foresight.imbalance import add_imbalance_flags, imbalance_of, read_imbalance
from expertmesh.training.foresight.planner.hardware import products_in, save_measured
from expertmesh.training.foresight.planner.hardware_flags import add_hardware_flags, check_positive, chosen_hardware
from expertmesh.training.foresight.planner.measured import ModelCuts
from expertmesh.training.foresight.planner.mesh_picture import picture, ranks_of
from expertmesh.training.foresight.planner.model_config import find_config
from expertmesh.training.foresight.planner.plot import draw
from expertmesh.training.foresight.planner.search import (
    MICRO_BATCHES,
    SWEPT,
    Cluster,
    Plan,
    Tried,
    best_first,
    reckon,
    search,
    sweep,
)
from expertmesh.training.foresight.planner.setting import Setting
from expertmesh.training.foresight.tables import print_plans, sweep_columns

TP_SIZES = (2, 4, 8)
"""Ranks of a tensor-parallel group that are tried beside none."""
_EXAMPLES = """\
examples:
  python -m expertmesh.sharding plan --model DIR --gpus 16 --seq-length 4096
  python -m expertmesh.sharding rehearse --model DIR --gpus 16 --ep-size 8
  python -m expertmesh.sharding mesh --world-size 16 --ep-size 8
  torchrun --nproc-per-node 8 -m expertmesh.sharding mesh --ep-size 8 --check"""


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m expertmesh.sharding", description="Plan a run and check a cluster.", epilog=_EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plan: Parser = commands.add_parser(
        "plan",
        usage="%(prog)s --model DIR [options]",
        help="memory, traffic and speed of every parallel layout; needs no weights",
        description="Memory, traffic and speed of every parallel layout, from config.json alone.",
        epilog="All other options are train_ep.py's: --adapter lora --base-dtype nf4, or\n--freeze experts.",
    )
    plan.add_argument("--model", required=True, metavar="DIR", help="directory, config.json, or hub id")
    add_hardware_flags(plan)
    plan.add_argument("--seq-length", type=int, default=4096, help="tokens per sequence")
    plan.add_argument(
        "--micro-batch", type=int, help="sequences per micro-batch, per rank (default: tries 1 to 16; with --sweep 1)"
    )
    plan.add_argument("--gradient-accumulation-steps", type=int, default=1, help="micro-batches per optimizer step")
    plan.add_argument(
        "--global-batch-size",
        type=int,
        help="sequences per optimizer step, in as many micro-batches as each layout needs",
    )
    plan.add_argument(
        "--optimizer", "--optim", default="adamw_torch_fused", metavar="NAME", help="as train_ep.py's --optim"
    )
    plan.add_argument("--fp32", action="store_true", help="compute in fp32, not in bf16")
    plan.add_argument("--tf32", action="store_true", help="with --fp32: matmuls in TF32")
    plan.add_argument(
        "--overlap-chunks", type=int, default=1, help="chunks overlapping all-to-all with expert GEMMs, in EP layouts"
    )
    plan.add_argument(
        "--dispatch",
        choices=get_args(Dispatch),
        default="auto",
        help="how tokens travel to their experts, in EP layouts",
    )
    plan.add_argument(
        "--keep-expert-products",
        type=int,
        default=0,
        help="layers whose first expert GEMMs' outputs selective checkpointing stores",
    )
    plan.add_argument("--cp-size", type=int, default=1, help="context-parallel ranks: each sequence is split over them")
    plan.add_argument(
        "--tp-size",
        default="auto",
        metavar="N,N...",
        help="tensor-parallel ranks, of one node: one number, several to compare, or auto (default): 1, and with one "
        "sequence per group 2, 4 and 8. The model is measured for each until that is cached",
    )
    plan.add_argument(
        "--pp-size",
        type=int,
        help="pipeline-parallel ranks (default: tries those that divide the GPUs, and are no more than micro-batches)",
    )
    plan.add_argument("--pipeline-chunks", type=int, help="stages per pipeline rank (default: tries 1, 2 and 4)")
    plan.add_argument(
        "--pipeline-schedule",
        choices=get_args(ScheduleName),
        help="order of forwards and backwards (default: tries all, 1f1b with one chunk, interleaved with several)",
    )
    plan.add_argument("--pipeline-layers", metavar="N,N...", help="with --pp-size: decoder layers of each stage")
    plan.add_argument(
        "--offload-activations", action="store_true", help="with checkpointing: layers' inputs in host memory"
    )
    add_imbalance_flags(plan)
    plan.add_argument("--top", type=int, default=12, help="lines of the table")
    plan.add_argument("--json", action="store_true", help="print JSON instead of the table")
    plan.add_argument("--sweep", action="store_true", help="8 to 4,096 GPUs, with and without EP, instead of --gpus")
    plan.add_argument("--no-cache", action="store_true", help="measure again, and write nothing to the cache directory")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="with --sweep: also draw it, as SVG")

    # its flags are its own and train_ep.py's, and are read where those are
    commands.add_parser("rehearse", help="dry-run one rank on fake tensors, without GPUs")

    mesh: Parser = commands.add_parser(
        "mesh",
        usage="%(prog)s --ep-size N [options]",
        help="which ranks form which group; with --check, whether they work",
        description="Which ranks form which process group; with --check, whether they work.",
    )
    mesh.add_argument("--world-size", type=int, help="number of ranks (default: torchrun's)")
    mesh.add_argument("--ep-size", type=int, required=True, help="ranks that experts are sharded over")
    mesh.add_argument("--cp-size", type=int, default=1, help="ranks that each sequence is split over")
    mesh.add_argument("--tp-size", type=int, default=1, help="ranks that heads and the vocabulary are divided by")
    mesh.add_argument("--pp-size", type=int, default=1, help="ranks that the decoder layers are distributed over")
    mesh.add_argument("--pipeline-chunks", type=int, default=1, help="stages per pipeline rank")
    mesh.add_argument("--num-layers", type=int, default=32, help="decoder layers, taken to be alike")
    mesh.add_argument(
        "--dense-shard",
        choices=["full", "hybrid"],
        default="full",
        help="non-expert parameters: full FSDP, or sharded within EP and replicated over DP (hybrid)",
    )
    mesh.add_argument("--gpus-per-node", type=int, help="GPUs per node (default: torchrun's ranks per node, else 8)")
    mesh.add_argument("--num-experts", type=int, default=8, help="experts per layer")
    mesh.add_argument("--check", action="store_true", help="under torchrun: exchange tokens in every group")
    mesh.add_argument("--hidden-size", type=int, default=4096, help="with --check: elements per token")
    mesh.add_argument("--timeout", type=int, default=60, help="with --check: seconds after which a group has failed")
    mesh.add_argument("--use-cpu", action="store_true", help="with --check: stay on the CPU, with gloo")
    mesh.add_argument(
        "--json", type=Path, metavar="FILE", help="with --check: write rates for `plan --calibrate` to FILE"
    )
    mesh.set_defaults(parser=mesh)
    return parser


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where nothing fits; 2 after a mistake in the input, or where a group does not answer."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["rehearse"]:
            return _rehearse(given[1:])
        arguments, rest = build_parser().parse_known_args(given)
        if arguments.command == "plan":
            return _plan(arguments, rest)
        if rest:
            raise ExpertMeshError(f"unrecognized arguments: {' '.join(rest)}")
        return _mesh(arguments)
    except ExpertMeshError as error:
        return tell_mistake(f"sharding: error: {' '.join(str(error).split())}")


def _plan(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    check_positive(arguments, "gpus", "gpus_per_node", "seq_length", "gradient_accumulation_steps", "top")
    check_positive(arguments, "overlap_chunks")
    given = ("micro_batch", "global_batch_size", "pp_size", "pipeline_chunks")
    check_positive(arguments, *(name for name in given if getattr(arguments, name) is not None))
    _check_pipeline(arguments)
    read_imbalance(arguments.imbalance)
    if arguments.tf32 and not arguments.fp32:
        raise ExpertMeshError("--tf32: sets how fp32 matmuls run, and this plan is for bf16; add --fp32")
    if arguments.plot is not None and not arguments.plot.absolute().parent.is_dir():
        # better told now than after a sweep
        raise ExpertMeshError(f"--plot {arguments.plot}: cannot be written: No such directory")
    hardware = chosen_hardware(arguments)
    memory = hardware.device.memory
    if arguments.gpu_memory:
        memory = parse_size("--gpu-memory", arguments.gpu_memory)
    # a sweep compares like with like: one number of tokens a GPU
    default = (1,) if arguments.sweep else MICRO_BATCHES
    micro_batches = default if arguments.micro_batch is None else (arguments.micro_batch,)
    measured = _measured(arguments, rest, micro_batches)
    measure, config, _ = measured[0]
    hardware = products_in(hardware, config.bf16, arguments.tf32, config.in_fp8)
    cluster = Cluster(hardware, arguments.gpus_per_node, memory)
    console = open_console()
    if arguments.sweep:
        return _sweep(arguments, measure, _base(arguments, measure, config), micro_batches, cluster, console)
    begun = time.perf_counter()
    plans: list[Plan] = []
    for measure, config, numbers in measured:
        pipeline = arguments.pp_size, arguments.pipeline_chunks, arguments.pipeline_schedule
        tried = Tried(numbers, arguments.global_batch_size, *pipeline)
        try:
            with _naming(arguments.model):
                plans += search(measure, _base(arguments, measure, config), tried, cluster)
        except ExpertMeshError as error:
            if not plans:
                raise
            print(folded(f"left out: --tp-size {config.tp_size}: {error}"), file=sys.stderr)
        measure.save()
    plans = best_first(plans)
    if arguments.json:
        reckon(plans)
        print(json.dumps([plan.as_json() for plan in plans], indent=1))
    else:
        batch, seconds = arguments.global_batch_size, time.perf_counter() - begun
        print_plans(console, arguments.model, measure.parameters, plans, cluster, arguments.top, batch, rest, seconds)
    return 0 if plans[0].fits else 1


def _base(arguments: argparse.Namespace, measure: Any, config: Any) -> Setting:
    """What all settings that are tried have in common."""
    from expertmesh.training.foresight.rehearsal.planning import setting_of

    return setting_of(
        config,
        arguments.gpus,
        ep_size=1,
        seq_length=arguments.seq_length,
        accumulation=arguments.gradient_accumulation_steps,
        tf32=arguments.tf32,
        overlap_chunks=arguments.overlap_chunks,
        dispatch=arguments.dispatch,
        imbalance=imbalance_of(read_imbalance(arguments.imbalance), measure.parameters.num_experts),
        ranks_per_node=config.ranks_per_node or arguments.gpus_per_node,
        pp_size=1,
        chunks=1,
        schedule="1f1b",
    )


def _tp_sizes(asked: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", asked):
        raise ExpertMeshError(f"--tp-size {asked}: must be a number, or several as in 1,2,4")
    return sorted({int(size) for size in asked.split(",")})


_Measured = tuple[Any, Any, Sequence[int]]
"""What `_measure` returns, and the sequences per micro-batch to try."""


def _measured(arguments: argparse.Namespace, rest: Sequence[str], micro_batches: Sequence[int]) -> list[_Measured]:
    """What measures the model for each of the tensor-parallel sizes with which it can be run.

    Raises:
        ExpertMeshError: with none of them; says why not with the largest.
    """
    if arguments.tp_size == "auto":
        return _measured_where_tp_pays(arguments, rest, micro_batches)
    sizes = _tp_sizes(arguments.tp_size)
    if arguments.sweep and len(sizes) > 1:
        raise ExpertMeshError(f"--tp-size {arguments.tp_size}: --sweep compares layouts with one; give one number")
    found: list[_Measured] = []
    for size in sizes:
        try:
            found.append((*_measure(arguments, rest, size), micro_batches))
        except ExpertMeshError as error:
            if not found and size == sizes[-1]:
                raise
            print(folded(f"left out: {error}"), file=sys.stderr)
    return found


def _measured_where_tp_pays(
    arguments: argparse.Namespace, rest: Sequence[str], micro_batches: Sequence[int]
) -> list[_Measured]:
    """What measures the model without tensor parallelism, and, with one sequence per micro-batch, for each size that it
    can have. With two sequences or more half as many ranks per group, or none, compute as many tokens each with fewer
    exchanges.

    Raises:
        ExpertMeshError: the model cannot be run without tensor parallelism.
    """
    found: list[_Measured] = [(*_measure(arguments, rest, 1), micro_batches)]
    if not arguments.sweep and 1 in micro_batches:
        # what a size does not divide, its multiples do not either
        with suppress(ExpertMeshError):
            for size in TP_SIZES:
                found.append((*_measure(arguments, rest, size), (1,)))
    return found


def _measure(arguments: argparse.Namespace, rest: Sequence[str], tp_size: int) -> tuple[Any, Any]:
    """What measures the model, and the flags of train_ep.py with which it would be run.

    Raises:
        ExpertMeshError: there is no such model or flag, or the model cannot be trained so.
    """
    from expertmesh.training import parse_config
    from expertmesh.training.foresight.rehearsal.cached import CachedMeasure

    flags = ["--model", arguments.model, "--dataset", "-", "--optim", arguments.optimizer]
    if arguments.cp_size != 1:
        flags += ["--cp-size", str(arguments.cp_size)]
    if tp_size != 1:
        flags += ["--tp-size", str(tp_size)]
    if arguments.keep_expert_products:
        flags += ["--keep-expert-products", str(arguments.keep_expert_products)]
    if arguments.offload_activations:
        flags.append("--offload-activations")
    if arguments.keep_expert_products or arguments.offload_activations:
        flags += ["--gradient-checkpointing", "selective"]
    for name in ("pp_size", "pipeline_chunks", "pipeline_schedule", "pipeline_layers"):
        if getattr(arguments, name) is not None and arguments.pp_size is not None:
            flags += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    flags += rest
    config = parse_config(flags if arguments.fp32 else [*flags, "--bf16"])
    world_size = max(SWEPT) if arguments.sweep else arguments.gpus
    topology = Topology(world_size // (arguments.pp_size or 1), 1, "full", config.cp_size, 1, config.tp_size)
    check_sizes(topology, num_experts=1)
    ranks_per_node = config.ranks_per_node or arguments.gpus_per_node
    check_tp_nodes(topology, nodes_of_equal_size(topology.world_size, ranks_per_node))
    file = find_config(arguments.model)
    with _naming(arguments.model):
        return CachedMeasure(config, file.content, file.load, "cuda", not arguments.no_cache), config


def _check_pipeline(arguments: argparse.Namespace) -> None:
    """
    Raises:
        ExpertMeshError: a flag of pipelines that does not go with the others.
    """
    if arguments.sweep and (arguments.pp_size or 1) > 1:
        raise ExpertMeshError(
            f"--pp-size {arguments.pp_size}: --sweep compares layouts without pipelines; leave it out"
        )
    if arguments.pipeline_layers is not None and arguments.pp_size is None:
        raise ExpertMeshError("--pipeline-layers: needs --pp-size, to say of how many stages")
    if arguments.pp_size is not None:
        check_divides("--pp-size", arguments.pp_size, arguments.gpus)


@contextmanager
def _naming(model: str) -> Iterator[None]:
    """
    Raises:
        ExpertMeshError: one inside; it names the model, as errors of its file do already.
    """
    try:
        yield
    except ExpertMeshError as error:
        raise ExpertMeshError(str(error) if model in str(error) else f"{model}: {error}") from error


def _rehearse(argv: Sequence[str]) -> int:
    from expertmesh.training.foresight.rehearsal.rehearse_command import main as rehearse

    return rehearse(argv)


def _sweep(
    arguments: argparse.Namespace,
    measure: Any,
    base: Any,
    micro_batches: Sequence[int],
    cluster: Cluster,
    console: Console,
) -> int:
    begun = time.perf_counter()
    with _naming(arguments.model):
        points = sweep(measure, base, micro_batches, cluster)
    measure.save()
    if arguments.json:
        print(json.dumps([{"variant": p.variant, "gpus": p.world_size, **p.plan.as_json()} for p in points], indent=1))
        return 0
    (rows,) = micro_batches
    title = f"{arguments.model}, {cluster.hardware.name}, {rows} x {base.seq_length:,} tokens per GPU"
    console.print(Text(folded(f"{title}: tokens/s per GPU, with the best layout")))
    print_table(console, sweep_columns(points))
    if not all(point.plan.fits for point in points):
        print(folded("GiB: no layout fits; the smallest takes this much"))
    print(f"{len(points)} points in {time.perf_counter() - begun:.1f} s")
    if arguments.plot is not None:
        with _writing("--plot", arguments.plot), whole(arguments.plot) as partial:
            partial.write_text(draw(points, title), encoding="utf-8")
    return 0


@contextmanager
def _writing(flag: str, file: Path) -> Iterator[None]:
    """
    Raises:
        ExpertMeshError: an OSError inside.
    """
    try:
        yield
    except OSError as error:
        raise ExpertMeshError(f"{flag} {file}: cannot be written: {error.strerror}") from error


def _mesh(arguments: argparse.Namespace) -> int:
    rank, torchrun_world, _ = read_environment()
    world = arguments.world_size or torchrun_world
    if arguments.check and world != torchrun_world:
        raise ExpertMeshError(
            f"--world-size {world}: --check runs under torchrun, which has started {torchrun_world} "
            f"rank{'s' * (torchrun_world > 1)}; leave --world-size out"
        )
    if world < 1:
        raise ExpertMeshError(f"--world-size {world}: must be 1 or more")
    if arguments.json is not None and not arguments.check:
        raise ExpertMeshError(f"--json {arguments.json}: has the rates that --check measures; add --check")
    if rank == 0:
        if not arguments.check:
            names = ("hidden_size", "timeout", "use_cpu")
            tell_without_effect(arguments.parser, arguments, "without --check", *names)
        if arguments.pp_size == 1:
            tell_without_effect(arguments.parser, arguments, "at --pp-size 1", "pipeline_chunks", "num_layers")
    sizes = (arguments.cp_size, arguments.pp_size, arguments.tp_size)
    topology = Topology(world, arguments.ep_size, arguments.dense_shard, *sizes)
    check_sizes(topology, arguments.num_experts)
    gpus_per_node = arguments.gpus_per_node or _torchrun_ranks_a_node() or 8
    if gpus_per_node < 1:
        raise ExpertMeshError(f"--gpus-per-node {gpus_per_node}: must be 1 or more")
    check_tp_nodes(topology, nodes_of_equal_size(world, gpus_per_node))
    if rank == 0:
        layers = _layers_by_pp_index(arguments)
        lines = picture(topology, gpus_per_node, arguments.num_experts, terminal_width(), layers)
        print(folded("\n".join(lines)), flush=True)
    return _check(arguments, topology, gpus_per_node) if arguments.check else 0


def _layers_by_pp_index(arguments: argparse.Namespace) -> list[list[range]]:
    """The decoder layers of each stage of each pp index, where all layers take equally long.

    Raises:
        ExpertMeshError: there are fewer layers than stages.
    """
    pp_size, chunks, num_layers = arguments.pp_size, arguments.pipeline_chunks, arguments.num_layers
    if pp_size == 1:
        return []
    check_positive(arguments, "pipeline_chunks", "num_layers")
    alike = ModelCuts("the model", (1.0,) * num_layers + (0.0,), frozenset(), ())
    stages = cut_stages(alike, pp_size, chunks, None)
    return [list(stages[pp_rank::pp_size]) for pp_rank in range(pp_size)]


def _torchrun_ranks_a_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def _check(arguments: argparse.Namespace, topology: Topology, gpus_per_node: int) -> int:
    from expertmesh.sharding import build_mesh, device_type, end_process_group, start_process_group
    from expertmesh.training.foresight.planner.check import check_groups, measured_hardware

    ranks = start_process_group(arguments.use_cpu, arguments.timeout)
    mesh = build_mesh(device_type(arguments.use_cpu), topology, arguments.timeout)
    row_bytes = arguments.hidden_size * (2 if ranks.device.type == "cuda" else 4)
    speeds = check_groups(mesh, row_bytes, ranks.device, gpus_per_node)
    hardware = measured_hardware(speeds, gpus_per_node, ranks.device)
    if ranks.rank == 0:
        _print_speeds(speeds, row_bytes)
        if arguments.json is not None:
            with _writing("--json", arguments.json):
                save_measured(hardware, arguments.json)
    end_process_group()
    return 0


def _print_speeds(speeds: Sequence[Any], row_bytes: int) -> None:
    columns = [
        Column("group", [speed.name for speed in speeds], is_text=True),
        Column("ranks", [ranks_of(speed.ranks, most=8) for speed in speeds], is_text=True),
        Column(f"latency of\n{row_bytes:,} bytes", [f"{speed.latency * 1e6:,.0f} us" for speed in speeds]),
        Column("GB/s\nper rank", [f"{speed.bandwidth / 1e9:,.3f}" for speed in speeds]),
        Column("", ["[red]slow[/]" if speed.is_slow else "" for speed in speeds], is_text=True),
    ]
    print_table(open_console(), columns)
    if any(speed.is_slow for speed in speeds):
        print(folded("slow: below half of its siblings' bandwidth"))


def plan_script() -> NoReturn:
    """`python -m expertmesh.sharding plan` as a process of its own."""
    run_command(lambda: main(["plan", *sys.argv[1:]]))
