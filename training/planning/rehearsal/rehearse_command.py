"""Dry-run one rank of a training step on fake tensors, without GPUs: `python -m expertmesh.sharding rehearse`.

The real code of one rank (build, shard, forward, backward, clipping, optimizer step) runs with tensors that hold no
memory: no GPU is needed, and no weights. Says whether it fits, what memory is for and when it peaks, what is sent, how
long a step would take, and what would fail. Rates are those that others attained; what NCCL and CUDA take is assumed,
and printed.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....moe.util.errors import ExpertMeshError
from ....moe.util.parser import Parser, refuse_gone, tell_without_effect
from ....moe.util.terminal import folded
from ....sharding.topology import Topology, check_sizes
from ...config.train_config import TrainConfig, parse_config
from ..coverage import check_covered, not_modelled
from ..imbalance import add_imbalance_flags, read_imbalance
from ..memory import NEAR
from ..planner.hardware import Hardware, products_in
from ..planner.hardware_flags import add_hardware_flags, check_positive, chosen_hardware
from ..planner.model_config import read_config
from ..planner.search import Cluster
from .given_routing import Told

_DESCRIPTION = """\
Dry-run one rank on fake tensors, without GPUs. No weights are needed: --model
is a directory with config.json, that file, or a hub id. The real code of a
training step runs. Prints whether it fits, what memory is for and when it
peaks, what is sent, how long a step would take, and what would fail. Rates are
those that others attained; what NCCL and CUDA take is assumed."""

_EPILOG = """\
All options of train_ep.py are taken too; those that do not change a step have
no effect, and what is not modelled is said.

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
        help="all: one rank of each kind (the first and the last, and of each pipeline stage the first and the most "
        "loaded), and whether their collectives match",
    )
    add_imbalance_flags(parser)
    parser.add_argument("--samples-per-row", type=int, default=8, help="with --packing: samples per sequence")
    parser.add_argument("--every-layer", action="store_true", help="run all layers, also identical ones")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 where it does not fit.

    Raises:
        ExpertMeshError: a mistake in the flags, or what the dry run has found to fail.
    """
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    refuse_gone(rest, GONE)
    asked = parse_config([*rest, "--dataset", "none"], list(parser._option_string_actions))
    if asked.without_effect:
        print(folded(f"note: {'; '.join(asked.without_effect)}"), file=sys.stderr)
    config = asked.settled()
    _check(arguments, config)
    if arguments.ranks == "all":
        tell_without_effect(parser, arguments, "with --ranks all", "rank")
    if not config.packing:
        tell_without_effect(parser, arguments, "without --packing", "samples_per_row", "flash_attention")
    hardware = _hardware(arguments, config)
    told = _told(arguments, config)
    ranks = _ranks(arguments, config, told)
    model_config, where = read_config(config.model)

    # from here on torch is needed
    from ..tables import print_account
    from .collective_order import Call, calls, check_order
    from .rank_summary import Account, account_of, slowest_of_stages
    from .world import rehearse

    warnings.filterwarnings("ignore")
    started = time.time()
    if config.pp_size > 1:
        config = _settled(config, model_config, arguments, hardware)
    accounts: list[Account] = []
    orders: dict[int, list[Call]] = {}
    for rank in ranks:
        rehearsed = rehearse(
            config, model_config, arguments.gpus, rank, not arguments.every_layer, told, arguments.gpus_per_node
        )
        account = account_of(rehearsed, config, hardware, arguments.gpus, arguments.gpus_per_node, rank)
        accounts.append(account)
        orders[rank] = calls(rehearsed.step.events)
        told = rehearsed.told
        del rehearsed
    ranks_per_stage = arguments.gpus // config.pp_size
    compared = check_order(orders, ranks_per_stage)
    stages = slowest_of_stages(part.stages for account in accounts if (part := account.ledger.pipeline))
    accounts = [account.among(stages, hardware) for account in accounts]
    largest = max(accounts, key=lambda account: account.fit.total)
    if arguments.json:
        for line in not_modelled(config, rehearsed=True):
            print(folded(f"note: {line}"), file=sys.stderr)
        print(json.dumps([account.as_json() for account in accounts], indent=1))
        return 0 if largest.fit.is_enough else 1
    print_account(largest, config, where, hardware, told, arguments.gpus)
    if len(ranks) > 1:
        figures = "; ".join(
            f"{account.rank}: {account.fit.total / 2**30:,.1f} GiB, {account.ledger.seconds:,.3f} s"
            for account in accounts
        )
        print(
            f"ranks run: {figures}; shown: the largest. A step takes as long as the slowest of them, "
            f"{max(account.ledger.seconds for account in accounts):,.3f} s. "
            f"Their {compared:,} collectives have the same order."
        )
    print(f"dry run took {time.time() - started:.0f} s")
    return 0 if largest.fit.is_enough else 1


def _check(arguments: argparse.Namespace, config: TrainConfig) -> None:
    check_positive(arguments, "gpus", "gpus_per_node", "samples_per_row")
    if not 0 <= arguments.rank < arguments.gpus:
        raise ExpertMeshError(
            f"--rank {arguments.rank}: of {arguments.gpus} GPUs the ranks are 0 to {arguments.gpus - 1}"
        )
    sizes = (config.cp_size, config.pp_size, config.tp_size)
    # the model's experts are not known yet: against them the dry run checks again
    check_sizes(Topology(arguments.gpus, config.ep_size, config.dense_shard, *sizes), num_experts=None)
    check_covered(config)


def _hardware(arguments: argparse.Namespace, config: TrainConfig) -> Hardware:
    """The hardware, with the rate of matmuls in the compute dtype."""
    return products_in(chosen_hardware(arguments), config.bf16, config.tf32, config.in_fp8)


def _settled(config: TrainConfig, model_config: Any, arguments: argparse.Namespace, hardware: Hardware) -> TrainConfig:
    """The settings with what a run would choose of what they leave open, for full sequences of --max-seq-length."""
    from ..rank_memory import choose_pipeline
    from .run_setting import planned

    if config.pipeline_schedule is not None and config.pipeline_layers is not None:
        return config
    node = config.ranks_per_node or arguments.gpus_per_node
    busiest = read_imbalance(arguments.imbalance)
    run = planned(config, model_config, arguments.gpus, imbalance=busiest, ranks_per_node=node)
    cluster = Cluster(hardware, arguments.gpus_per_node, NEAR * hardware.device.memory)
    return replace(config, **choose_pipeline(run, cluster, config)[1].left_open(config))


def _told(arguments: argparse.Namespace, config: TrainConfig) -> Told:
    # of several ranks the most loaded one is to be neither the first nor the last, where there are others
    loaded = min(1, config.ep_size - 1) if arguments.ranks == "all" else arguments.rank % config.ep_size
    return Told(arguments.samples_per_row, busiest=read_imbalance(arguments.imbalance), loaded=loaded)


def _ranks(arguments: argparse.Namespace, config: TrainConfig, told: Told) -> list[int]:
    if arguments.ranks == "one":
        return [arguments.rank]
    firsts = range(0, arguments.gpus, arguments.gpus // config.pp_size)
    # a stage waits for the most loaded of its ranks, which holds the most, too
    most_loaded = [first + told.loaded for first in firsts] if told.busiest != 1 else []
    return list(dict.fromkeys([0, arguments.gpus - 1, *most_loaded, *firsts]))
