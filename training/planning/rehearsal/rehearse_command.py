"""Dry-run one rank of a training step on fake tensors, without GPUs: `python -m expertmesh.sharding rehearse`,
whose flags are in `rehearse_flags.py`.

The real code of one rank (build, shard, forward, backward, clipping, optimizer step) runs with tensors that hold no
memory: no GPU is needed, and no weights. Says whether it fits, what memory is for and when it peaks, what is sent, what
each part of a step computes, how long a step takes, and what would fail. Rates are those that others attained; what
NCCL and CUDA take is assumed, and printed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ....moe.util.terminal import folded
from ...config.train_config import TrainConfig
from ..coverage import not_modelled
from ..imbalance import GivenRouting, imbalance_of, read_image_tokens, read_imbalance
from ..planner.account import Account
from ..planner.asked import Asked
from ..planner.costs import Cluster
from ..planner.forecasts import Forecasts
from ..planner.hardware import chosen_hardware, gpus_per_node, products_in
from ..planner.model_config import find_config
from ..planner.pipelines import dry_run_pipeline, pipelined
from ..planner.search import Plan
from ..progress import DryRuns
from ..tables import print_account


def dry_run(arguments: argparse.Namespace, config: TrainConfig) -> int:
    """Run and print what `read_flags` has read; exit code 0, or 1 where it does not fit.

    Raises:
        ExpertMeshError: the hardware or the model is not there, or what the dry run has found to fail.
    """
    hardware = products_in(chosen_hardware(arguments), config.bf16, config.tf32, config.in_fp8)
    cluster = Cluster(hardware, gpus_per_node(arguments.gpus, arguments.gpus_per_node), hardware.device.memory)
    routing = _routing(arguments, config)
    file = find_config(config.model)
    started = time.time()
    with DryRuns() as progress:
        forecasts = Forecasts(file.content, file.load, tell=progress)
        plans, even, compared = _dry_run(arguments, config, forecasts, cluster, routing, file.load)
    largest = max(plans, key=lambda plan: plan.fit.total)
    if arguments.json:
        for line in not_modelled(config):
            print(folded(f"note: {line}"), file=sys.stderr)
        print(json.dumps([_as_json(plan, even or plan) for plan in plans], indent=1))
        return 0 if largest.fits else 1
    print_account(largest, config.model, routing, even)
    if len(plans) > 1:
        figures = "; ".join(f"{plan.account.rank}: {plan.fit.total / 2**30:,.1f} GiB" for plan in plans)
        print(f"ranks run: {figures}; shown: the largest. Their {compared:,} collectives have the same order.")
    print(f"dry run took {time.time() - started:.0f} s")
    return 0 if largest.fits else 1


def _dry_run(
    arguments: argparse.Namespace,
    config: TrainConfig,
    forecasts: Forecasts,
    cluster: Cluster,
    routing: GivenRouting,
    load: Callable[[], Any],
) -> tuple[list[Plan], Plan | None, int]:
    """Each rank's plan; that of the largest with balanced routing, where no imbalance was given; and how many
    collectives of several ranks were compared.

    Raises:
        ExpertMeshError: a dry run fails.
    """
    facts = forecasts.facts(config)
    imbalance_of(routing.busiest, facts.num_experts)
    config = forecasts.with_stages(config)
    asked = Asked(config, arguments.gpus, cluster, 0, routing)
    ranks = [replace(asked, rank=rank) for rank in _ranks(arguments, config, routing)]
    evenly = replace(ranks[0], routing=replace(routing, busiest=1.0))
    pipeline = step = None
    if config.pp_size > 1:
        pipeline, step = dry_run_pipeline(forecasts, pipelined(forecasts, asked))
    if len(ranks) == 1 and not arguments.every_layer:
        # side by side with what is asked for below
        beside = [evenly] if arguments.imbalance is None and step is None else []
        accounts, compared = forecasts.all_accounts([*ranks, *beside])[:1], 0
    else:
        accounts, compared = _in_order(forecasts, ranks, load(), arguments.every_layer)
    if pipeline is not None:
        # whoever tells of the step, it takes as long, and the mean rank needs as much
        accounts = [replace(account, time=pipeline.time, needed=pipeline.needed) for account in accounts]
    plans = [Plan(config, arguments.gpus, cluster, account, facts) for account in accounts]
    if arguments.imbalance is not None:
        return plans, None, compared
    account = forecasts.account(evenly) if step is None else pipelined(forecasts, evenly, step.longer).account()
    return plans, replace(max(plans, key=lambda plan: plan.fit.total), account=account), compared


def _as_json(plan: Plan, even: Plan) -> dict[str, Any]:
    return plan.account.as_json(plan.cluster.memory) | {
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.share_of_peak,
        "balanced_tokens_per_second": even.tokens_per_second,
    }


def _in_order(
    forecasts: Forecasts, asked: Sequence[Asked], model_config: Any, every_layer: bool
) -> tuple[list[Account], int]:
    """Accounts of several ranks, and how many of their collectives were compared.

    Raises:
        ExpertMeshError: a dry run fails, or the ranks' collectives differ.
    """
    # from here on torch is needed
    from .collective_order import check_order
    from .engine import account_of
    from .recorder import Event

    accounts: list[Account] = []
    orders: dict[int, list[Event]] = {}
    for each in asked:
        orders[each.rank] = []
        settled = forecasts.settled(each)
        facts = forecasts.facts(settled.config)
        accounts.append(account_of(settled, model_config, facts, every_layer, orders[each.rank]))
    return accounts, check_order(orders, ranks_per_stage=asked[0].topology.ranks_per_stage)


def _routing(arguments: argparse.Namespace, config: TrainConfig) -> GivenRouting:
    # of several ranks the most loaded one is to be neither the first nor the last, where there are others
    loaded = min(1, config.ep_size - 1) if arguments.ranks == "all" else arguments.rank % config.ep_size
    return GivenRouting(
        arguments.samples_per_row,
        busiest=read_imbalance(arguments.imbalance),
        loaded=loaded,
        image_tokens=read_image_tokens(arguments.image_tokens, config),
    )


def _ranks(arguments: argparse.Namespace, config: TrainConfig, routing: GivenRouting) -> list[int]:
    if arguments.ranks == "one":
        return [arguments.rank]
    firsts = range(0, arguments.gpus, arguments.gpus // config.pp_size)
    # a stage waits for the most loaded of its ranks, which holds the most, too
    most_loaded = [first + routing.loaded for first in firsts] if routing.busiest != 1 else []
    return list(dict.fromkeys([0, arguments.gpus - 1, *most_loaded, *firsts]))
