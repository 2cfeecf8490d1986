"""Dry-run one rank of a training step on fake tensors, without GPUs: `python -m expertmesh.sharding rehearse`,
whose flags are in `rehearse_flags.py`.

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
from dataclasses import replace
from typing import Any

from ....moe.util.terminal import folded
from ...config.train_config import TrainConfig
from ..coverage import not_modelled
from ..imbalance import GivenRouting, read_imbalance
from ..memory import NEAR
from ..planner.hardware import Hardware, chosen_hardware, products_in
from ..planner.model_config import read_config
from ..planner.search import Cluster


def dry_run(arguments: argparse.Namespace, config: TrainConfig) -> int:
    """Run and print what `read_flags` has read; exit code 0, or 1 where it does not fit.

    Raises:
        ExpertMeshError: the hardware or the model is not there, or what the dry run has found to fail.
    """
    hardware = _hardware(arguments, config)
    routing = _routing(arguments, config)
    ranks = _ranks(arguments, config, routing)
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
            config, model_config, arguments.gpus, rank, not arguments.every_layer, routing, arguments.gpus_per_node
        )
        account = account_of(rehearsed, config, hardware, arguments.gpus, arguments.gpus_per_node, rank)
        accounts.append(account)
        orders[rank] = calls(rehearsed.step.events)
        routing = rehearsed.routing
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
    print_account(largest, config, where, hardware, routing, arguments.gpus)
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


def _routing(arguments: argparse.Namespace, config: TrainConfig) -> GivenRouting:
    # of several ranks the most loaded one is to be neither the first nor the last, where there are others
    loaded = min(1, config.ep_size - 1) if arguments.ranks == "all" else arguments.rank % config.ep_size
    return GivenRouting(arguments.samples_per_row, busiest=read_imbalance(arguments.imbalance), loaded=loaded)


def _ranks(arguments: argparse.Namespace, config: TrainConfig, routing: GivenRouting) -> list[int]:
    if arguments.ranks == "one":
        return [arguments.rank]
    firsts = range(0, arguments.gpus, arguments.gpus // config.pp_size)
    # a stage waits for the most loaded of its ranks, which holds the most, too
    most_loaded = [first + routing.loaded for first in firsts] if routing.busiest != 1 else []
    return list(dict.fromkeys([0, arguments.gpus - 1, *most_loaded, *firsts]))
