"""Dry-run one rank of a training step on fake tensors, without GPUs: `python -m expertmesh.sharding rehearse`,
whose flags are in `rehearse_flags.py`.

The real code of one rank (build, shard, forward, backward, clipping, optimizer step) runs with tensors that hold no
memory: no GPU is needed, and no weights. Says whether it fits, what memory is for and when it peaks, what is sent, what
each part of a step computes, and what would fail. How long a step would take the planner says. Rates are those that
others attained; what NCCL and CUDA take is assumed, and printed.
"""

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict, replace
from typing import Any

from ....moe.util.terminal import folded
from ....sharding.topology import Topology, check_sizes
from ...config.train_config import TrainConfig
from ..coverage import not_modelled
from ..imbalance import GivenRouting, imbalance_of, read_imbalance
from ..memory import NEAR
from ..planner.hardware import Hardware, chosen_hardware, products_in
from ..planner.model_config import read_config
from ..planner.search import Cluster, Plan
from ..planner.step_order import PlannedRun, planned_run


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
    from .rank_summary import Account, account_of
    from .world import rehearse

    warnings.filterwarnings("ignore")
    started = time.time()
    config, plan, loops = _planned(config, model_config, arguments, hardware)
    accounts: list[Account] = []
    orders: dict[int, list[Call]] = {}
    for rank in ranks:
        rehearsed = rehearse(config, model_config, arguments.gpus, rank, routing, arguments.gpus_per_node, loops)
        accounts.append(account_of(rehearsed, config, hardware, arguments.gpus, rank))
        orders[rank] = calls(rehearsed.recorder.events)
        routing = rehearsed.routing
        del rehearsed
    compared = check_order(orders, ranks_per_stage=arguments.gpus // config.pp_size)
    largest = max(accounts, key=lambda account: account.fit.total)
    if arguments.json:
        for line in not_modelled(config, rehearsed=True):
            print(folded(f"note: {line}"), file=sys.stderr)
        time_of = {
            "time": asdict(plan.time),
            "seconds": plan.time.total,
            "tokens_per_second": plan.tokens_per_second,
            "mfu": plan.share_of_peak(hardware),
        }
        print(json.dumps([account.as_json() | time_of for account in accounts], indent=1))
        return 0 if largest.fit.is_enough else 1
    print_account(largest, plan, config, where, routing)
    if len(ranks) > 1:
        figures = "; ".join(f"{account.rank}: {account.fit.total / 2**30:,.1f} GiB" for account in accounts)
        print(f"ranks run: {figures}; shown: the largest. Their {compared:,} collectives have the same order.")
    print(f"dry run took {time.time() - started:.0f} s")
    return 0 if largest.fit.is_enough else 1


def _hardware(arguments: argparse.Namespace, config: TrainConfig) -> Hardware:
    """The hardware, with the rate of matmuls in the compute dtype."""
    return products_in(chosen_hardware(arguments), config.bf16, config.tf32, config.in_fp8)


def _planned(
    config: TrainConfig, model_config: Any, arguments: argparse.Namespace, hardware: Hardware
) -> tuple[TrainConfig, Plan, list[Any]]:
    """The settings with what a run would choose of what they leave open, for full sequences of --max-seq-length; the
    planner's forecast of them; and predictions of the model's functions that loop over tokens."""
    from ..planner.stage_costs import balanced
    from ..rank_memory import choose_pipeline
    from .cached import CachedMeasure
    from .run_setting import setting_of

    measure = CachedMeasure(config, model_config.to_dict(), lambda: model_config, "cuda")
    busiest = imbalance_of(read_imbalance(arguments.imbalance), measure.parameters.num_experts)
    topology = Topology(
        arguments.gpus, config.ep_size, config.dense_shard, config.cp_size, config.pp_size, config.tp_size
    )
    check_sizes(topology, measure.parameters.num_experts)
    node = config.ranks_per_node or arguments.gpus_per_node
    cluster = Cluster(hardware, arguments.gpus_per_node, hardware.device.memory)

    def run_of(config: TrainConfig) -> PlannedRun:
        return planned_run(measure, setting_of(config, arguments.gpus, imbalance=busiest, ranks_per_node=node))

    run = run_of(config)
    if config.pp_size > 1 and (config.pipeline_schedule is None or config.pipeline_layers is None):
        within = replace(cluster, memory=NEAR * cluster.memory)
        config = replace(config, **choose_pipeline(run, within, config)[1].left_open(config))
        run = run_of(config)
    measure.save()
    plan = Plan(*balanced(run, hardware, cluster.gpus_per_node, cluster.memory), cluster)
    return config, plan, measure.loops(run.setting.workload(measure.parameters))


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
