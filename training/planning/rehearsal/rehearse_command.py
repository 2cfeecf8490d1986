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
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ....moe.util.terminal import folded
from ...config.train_config import TrainConfig
from ..coverage import not_modelled
from ..imbalance import GivenRouting, imbalance_of, read_imbalance
from ..memory import NEAR
from ..planner.hardware import Hardware, chosen_hardware, gpus_per_node, products_in
from ..planner.model_config import find_config
from ..planner.search import Cluster, Plan
from ..planner.setting import Setting
from ..planner.stage_costs import balanced
from ..planner.step_order import PlannedRun, planned_run
from .cached import CachedMeasure
from .run_setting import setting_of


def dry_run(arguments: argparse.Namespace, config: TrainConfig) -> int:
    """Run and print what `read_flags` has read; exit code 0, or 1 where it does not fit.

    Raises:
        ExpertMeshError: the hardware or the model is not there, or what the dry run has found to fail.
    """
    hardware = _hardware(arguments, config)
    routing = _routing(arguments, config)
    ranks = _ranks(arguments, config, routing)
    file, where = find_config(config.model), config.model
    model_config = file.load()

    # from here on torch is needed
    from ..tables import print_account
    from .collective_order import Call, calls, check_order
    from .rank_summary import Account, account_of
    from .world import rehearse

    warnings.filterwarnings("ignore")
    started = time.time()
    here = gpus_per_node(arguments.gpus, arguments.gpus_per_node)
    cluster = Cluster(hardware, here, hardware.device.memory)
    planner = _Planner(config, file.content, model_config, arguments, cluster)
    config = planner.settled()
    accounts: list[Account] = []
    orders: dict[int, list[Call]] = {}
    for rank in ranks:
        rehearsed = rehearse(config, model_config, arguments.gpus, rank, routing, here)
        accounts.append(account_of(rehearsed, config, hardware, arguments.gpus, rank))
        orders[rank] = calls(rehearsed.recorder.events)
        routing = rehearsed.routing
        del rehearsed
    plan = planner.plan(config)
    even = planner.plan(config, imbalance=1.0) if arguments.imbalance is None else None
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
            "balanced_tokens_per_second": (even or plan).tokens_per_second,
        }
        print(json.dumps([account.as_json() | time_of for account in accounts], indent=1))
        return 0 if largest.fit.is_enough else 1
    print_account(largest, plan, config, where, routing, even)
    if len(ranks) > 1:
        figures = "; ".join(f"{account.rank}: {account.fit.total / 2**30:,.1f} GiB" for account in accounts)
        print(f"ranks run: {figures}; shown: the largest. Their {compared:,} collectives have the same order.")
    print(f"dry run took {time.time() - started:.0f} s")
    return 0 if largest.fit.is_enough else 1


def _hardware(arguments: argparse.Namespace, config: TrainConfig) -> Hardware:
    """The hardware, with the rate of matmuls in the compute dtype."""
    return products_in(chosen_hardware(arguments), config.bf16, config.tf32, config.in_fp8)


@dataclass(frozen=True)
class _Planner:
    """What the planner says of the run, for full sequences of --max-seq-length. config: as it was asked for. said: in
    the model's config.json."""

    config: TrainConfig
    said: dict[str, Any]
    model_config: Any
    arguments: argparse.Namespace
    cluster: Cluster

    @cached_property
    def measure(self) -> CachedMeasure:
        return CachedMeasure(self.config, self.said, lambda: self.model_config, "cuda")

    def setting(self, config: TrainConfig, imbalance: float | None = None) -> Setting:
        given = read_imbalance(self.arguments.imbalance) if imbalance is None else imbalance
        busiest = imbalance_of(given, self.measure.parameters.num_experts)
        node = config.ranks_per_node or self.cluster.gpus_per_node
        return setting_of(config, self.arguments.gpus, imbalance=busiest, ranks_per_node=node)

    def run(self, config: TrainConfig, imbalance: float | None = None) -> PlannedRun:
        return planned_run(self.measure, self.setting(config, imbalance))

    def settled(self) -> TrainConfig:
        """The settings with what a run would choose of what they leave open of a pipeline."""
        from ..rank_memory import choose_pipeline

        config = self.config
        if config.pp_size == 1 or None not in (config.pipeline_schedule, config.pipeline_layers):
            return config
        within = replace(self.cluster, memory=NEAR * self.cluster.memory)
        return replace(config, **choose_pipeline(self.run(config), within, config)[1].left_open(config))

    def plan(self, config: TrainConfig, imbalance: float | None = None) -> Plan:
        """imbalance: in place of what was asked for."""
        cluster = self.cluster
        found = balanced(self.run(config, imbalance), cluster.hardware, cluster.gpus_per_node, cluster.memory)
        self.measure.save()
        return Plan(*found, cluster)


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
