"""Bytes a step against those that real ranks send."""

from typing import Any

import pytest
from torch import distributed as dist

from benchmarks.plan_accuracy import build_run, full_batch
from benchmarks.traffic import CountTraffic
from sharding.planner.setting import Setting
from sharding.planner.traffic import (
    step_traffic,
)
from tests.distributed.pool import RankPool
from tests.sharding.planned import ODD_SIZES, cpu_setting, model_shape
from tests.tiny import tiny_config
from training.balance import LossWeights
from training.step import train_step


def count(setting: Setting, changes: dict[str, Any], balance: float) -> dict[str, float]:
    """What this rank sends in a step, the first one's set-up left out."""
    config = tiny_config(**changes)
    import torch

    model, optimizer, mesh = build_run(config, setting, torch.device("cpu"))
    batches = [full_batch(setting, config.vocab_size, seed=dist.get_rank())] * setting.accumulation
    weights = LossWeights(balance, 0.0)
    train_step(model, optimizer, batches, mesh, weights, 1.0)
    with CountTraffic() as counted:
        train_step(model, optimizer, batches, mesh, weights, 1.0)
    return dict(counted.sent)


@pytest.mark.parametrize(
    ("setting", "changes", "balance"),
    [
        (cpu_setting(4, 1), {}, 0.0),
        (cpu_setting(4, 2), ODD_SIZES, 0.01),
        (cpu_setting(4, 4, checkpointing="full"), {}, 0.0),
        (cpu_setting(4, 2, dense_shard="hybrid", accumulation=2), {}, 0.0),
        (cpu_setting(2, 1, checkpointing="full"), ODD_SIZES, 0.0),
    ],
    ids=["ep1", "ep2-odd-sizes-balanced", "ep4-full", "ep2-hybrid-accumulated", "ep1-full-odd-sizes"],
)
def test_bytes_are_exact(ranks: RankPool, setting: Setting, changes: dict[str, Any], balance: float) -> None:
    expected: dict[str, float] = {}
    for traffic in step_traffic(model_shape(**changes), setting, balance > 0):
        expected[traffic.kind] = expected.get(traffic.kind, 0) + traffic.total
    for sent in ranks.run(count, setting.world_size, setting, changes, balance):
        assert {kind: n for kind, n in sent.items() if n} == pytest.approx(expected, abs=2, rel=0)
