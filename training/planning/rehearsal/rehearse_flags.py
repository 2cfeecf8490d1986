"""The flags of `python -m expertmesh.sharding rehearse`, and the run that they ask for. What runs it is not imported:
that would take `--help` longer than all else."""

import argparse
import sys
from collections.abc import Sequence

from ....moe.util.errors import ExpertMeshError
from ....moe.util.parser import Parser, refuse_gone, tell_without_effect
from ....moe.util.terminal import folded
from ....sharding.topology import Topology, check_sizes
from ...config.train_config import TrainConfig, given_settings, parse_config
from ..coverage import check_covered
from ..imbalance import add_imbalance_flags
from ..planner.hardware import MOST, add_hardware_flags, check_positive, tell_nodes

_DESCRIPTION = """\
Dry-run one rank on fake tensors, without GPUs. No weights are needed: --model
is a directory with config.json, that file, or a hub id. Prints whether it
fits, what memory is for, what is sent, how long a step takes, and what fails."""

_EPILOG = """\
All options of train_ep.py are taken too; those that do not change a step have
no effect, and the output lists what is not modelled.

examples:
  python -m expertmesh.sharding rehearse --model DIR --gpus 256 --ep-size 64
  python -m expertmesh.sharding rehearse --config configs/mixtral_8x7b.yaml \\
      --gpus 8"""

GONE = {
    "--routing": "--imbalance RUN/metrics.jsonl takes the load of the busiest expert from a run",
    "--timeline": "--json has the memory at every layer and phase; --profile shows when a real step does what",
}


def build_parser() -> Parser:
    """The parser of the flags that train_ep.py lacks."""
    parser = Parser(
        prog="python -m expertmesh.sharding rehearse",
        usage="%(prog)s --model DIR [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add_hardware_flags(parser)
    parser.add_argument("--rank", type=int, default=0, help="rank to run (default: 0)")
    parser.add_argument(
        "--ranks",
        choices=["one", "all"],
        default="one",
        help="all: one rank of each kind, and whether their collectives match",
    )
    add_imbalance_flags(parser)
    parser.add_argument("--samples-per-row", type=int, default=8, help="with --packing: samples per sequence")
    parser.add_argument(
        "--every-layer",
        action="store_true",
        help="run all layers, not few of each kind (takes up to a minute)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, TrainConfig]:
    """The flags that train_ep.py lacks, and the run; what of them has no effect is told.

    Raises:
        ExpertMeshError: a mistake in the flags, or there is no forecast of such a run.
    """
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    refuse_gone(rest, GONE)
    given = given_settings(rest, own := list(parser._option_string_actions))
    asked = parse_config(rest if given.all.get("dataset") else [*rest, "--dataset", "none"], own)
    if unheeded := [*asked.without_effect, *asked.without_effect_on("cuda")]:
        print(folded(f"note: {'; '.join(unheeded)}"), file=sys.stderr)
    config = asked.settled()
    _check(arguments, config)
    if arguments.ranks == "all":
        tell_without_effect(parser, arguments, "with --ranks all", "rank")
    if not config.packing:
        tell_without_effect(parser, arguments, "without --packing", "samples_per_row", "flash_attention")
    return arguments, config


def _check(arguments: argparse.Namespace, config: TrainConfig) -> None:
    check_positive(arguments, "gpus", most=MOST)
    check_positive(arguments, "gpus_per_node", "samples_per_row")
    tell_nodes(arguments.gpus, arguments.gpus_per_node)
    if not 0 <= arguments.rank < arguments.gpus:
        raise ExpertMeshError(
            f"--rank {arguments.rank}: of {arguments.gpus} GPUs the ranks are 0 to {arguments.gpus - 1}"
        )
    sizes = (config.cp_size, config.pp_size, config.tp_size)
    # the model's experts are not known yet: against them the dry run checks again
    check_sizes(Topology(arguments.gpus, config.ep_size, config.dense_shard, *sizes), num_experts=None)
    check_covered(config)
