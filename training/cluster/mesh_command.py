"""Print the process groups of a parallel layout, and try them: `python -m expertmesh.sharding mesh`, whose flags are in
`commands.py`."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from ...moe.util.parser import tell_without_effect
from ...moe.util.process_place import process_place
from ...moe.util.terminal import folded, terminal_width
from ...sharding.pipeline.balance import cut_stages
from ...sharding.topology import Topology, check_sizes, check_tp_nodes, nodes_of_equal_size
from ..planning.columns import Column, open_console, print_table
from ..planning.planner.facts import Cuts
from ..planning.planner.hardware import MOST, check_positive, gpus_per_node, save_measured, tell_nodes
from .layout_picture import MOST_RANKS, layout_picture
from .mesh_picture import picture, ranks_of


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


def mesh(arguments: argparse.Namespace) -> int:
    """Print which ranks form which group, and with --check, whether they work; returns the exit code.

    Raises:
        ExpertMeshError: the flags do not go together, or a group does not answer.
    """
    place = process_place()
    rank, torchrun_world = place.rank, place.world_size
    of_all = ("world_size", "num_experts", "pipeline_chunks", "num_layers", "hidden_size")
    check_positive(arguments, *of_all, most=MOST)
    check_positive(arguments, "gpus_per_node", "timeout")
    world = torchrun_world if arguments.world_size is None else arguments.world_size
    if arguments.check and world != torchrun_world:
        raise ExpertMeshError(
            f"--world-size {world}: --check runs under torchrun, which has started {torchrun_world} "
            f"rank{'s' * (torchrun_world > 1)}; leave --world-size out"
        )
    if arguments.json is not None and not arguments.check:
        raise ExpertMeshError(f"--json {arguments.json}: needs the rates that --check measures; add --check")
    if arguments.picture is not None and world > MOST_RANKS:
        raise ExpertMeshError(f"--picture: draws at most {MOST_RANKS} ranks; this layout has {world}")
    if rank == 0:
        if not arguments.check:
            names = ("hidden_size", "timeout", "use_cpu")
            tell_without_effect(arguments.parser, arguments, "without --check", *names)
        if arguments.pp_size == 1:
            tell_without_effect(arguments.parser, arguments, "at --pp-size 1", "pipeline_chunks", "num_layers")
    sizes = (arguments.cp_size, arguments.pp_size, arguments.tp_size)
    topology = Topology(world, arguments.ep_size, arguments.dense_shard, *sizes)
    check_sizes(topology, arguments.num_experts)
    here = place.local_world_size if arguments.gpus_per_node is None and torchrun_world > 1 else None
    if here is None:
        here = gpus_per_node(world, arguments.gpus_per_node, "--world-size")
        if rank == 0:
            tell_nodes(world, arguments.gpus_per_node, "--world-size")
    check_tp_nodes(topology, nodes_of_equal_size(world, here))
    if rank == 0:
        layers = _layers_by_pp_index(arguments)
        lines = picture(topology, here, arguments.num_experts, terminal_width(), layers)
        print(folded("\n".join(lines)), flush=True)
        if arguments.picture is not None:
            with _writing("--picture", arguments.picture), whole(arguments.picture) as partial:
                drawn = layout_picture(topology, here, arguments.num_experts, layers)
                partial.write_text(drawn, encoding="utf-8")
    return _check(arguments, topology, here) if arguments.check else 0


def _layers_by_pp_index(arguments: argparse.Namespace) -> list[list[range]]:
    """The decoder layers of each stage of each pp index, where all layers take equally long.

    Raises:
        ExpertMeshError: there are fewer layers than stages.
    """
    pp_size, chunks, num_layers = arguments.pp_size, arguments.pipeline_chunks, arguments.num_layers
    if pp_size == 1:
        return []
    alike = Cuts("the model", (1.0,) * num_layers + (0.0,), ())
    stages = cut_stages(alike, pp_size, chunks, None)
    return [list(stages[pp_rank::pp_size]) for pp_rank in range(pp_size)]


def _check(arguments: argparse.Namespace, topology: Topology, gpus_per_node: int) -> int:
    from ...sharding.mesh import build_mesh
    from ...sharding.runtime.process import device_type, end_process_group, start_process_group
    from .check import check_groups, measured_hardware

    ranks = start_process_group(arguments.use_cpu, arguments.timeout)
    mesh = build_mesh(device_type(arguments.use_cpu), topology, arguments.timeout)
    row_bytes = arguments.hidden_size * (2 if ranks.device.type == "cuda" else 4)
    speeds = check_groups(mesh, row_bytes, ranks.device, gpus_per_node)
    hardware = measured_hardware(speeds, gpus_per_node, ranks.device)
    if ranks.rank == 0:
        print_speeds(speeds, row_bytes)
        if arguments.json is not None:
            with _writing("--json", arguments.json):
                save_measured(hardware, arguments.json)
    end_process_group()
    return 0


def print_speeds(speeds: Sequence[Any], row_bytes: int) -> None:
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
