"""Plan a run and check a cluster: `python -m expertmesh.sharding ...`.

plan --model DIR --gpus 16 --seq-length 4096       what fits, what it costs, how to start it
rehearse --model DIR --gpus 16 --ep-size 8 ...     the real step of one rank, without a GPU
mesh --world-size 16 --ep-size 8                   which ranks form which group
mesh --ep-size 8 --check                           under torchrun: whether the groups work, and how fast
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ...moe.util.command import run_command
from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import Parser, tell_without_effect
from ...moe.util.terminal import ends_with_reader, folded, terminal_width
from ...sharding.pipeline.balance import cut_stages
from ...sharding.topology import Topology, check_sizes, check_tp_nodes, nodes_of_equal_size
from ...sharding.torchrun import read_environment, tell_mistake
from ..config.other_tools import answer
from .columns import Column, open_console, print_table
from .planner.hardware import save_measured
from .planner.hardware_flags import check_positive
from .planner.measured import ModelCuts
from .planner.mesh_picture import picture, ranks_of

_EXAMPLES = """\
examples:
  python -m expertmesh.sharding plan --model DIR --gpus 16 --seq-length 4096
  python -m expertmesh.sharding rehearse --model DIR --gpus 16 --ep-size 8
  python -m expertmesh.sharding mesh --world-size 16 --ep-size 8
  torchrun --nproc-per-node 8 -m expertmesh.sharding mesh --ep-size 8 --check"""


class _ClusterParser(Parser):
    """Knows other tools' names for its flags."""

    def instead_of(self, name: str, values: Sequence[str]) -> str | None:
        instead = answer(name.replace("-", "_"), values, exactly=False) or ""
        named = re.findall(r"--[\w-]+", instead)
        return instead if named and set(named) <= self._option_string_actions.keys() else None


def build_parser() -> Parser:
    parser = _ClusterParser(
        prog="python -m expertmesh.sharding", description="Plan a run and check a cluster.", epilog=_EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    # their flags are their own and train_ep.py's, and are read where those are
    commands.add_parser("plan", help="memory, traffic and speed of every parallel layout; needs no weights")
    commands.add_parser("rehearse", help="dry-run one rank on fake tensors, without GPUs")

    mesh: Parser = commands.add_parser(
        "mesh",
        usage="%(prog)s --ep-size N [options]",
        help="which ranks form which group; with --check, whether they work",
        description="Which ranks form which process group; with --check, whether they work.",
    )
    mesh.add_argument("--world-size", "--gpus", type=int, help="number of ranks (default: torchrun's)")
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
        if given[:1] == ["plan"]:
            from .plan_command import main as plan

            return plan(given[1:])
        if given[:1] == ["rehearse"]:
            from .rehearsal.rehearse_command import main as rehearse

            return rehearse(given[1:])
        return _mesh(build_parser().parse_args(given))
    except ExpertMeshError as error:
        return tell_mistake(f"sharding: error: {' '.join(str(error).split())}")


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
    from ...sharding.mesh import build_mesh
    from ...sharding.runtime.process import device_type, end_process_group, start_process_group
    from .planner.check import check_groups, measured_hardware

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
