"""What happens before the first step, on several ranks: who goes first, and who waits where."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.process_place import ProcessPlace
from expertmesh.sharding.runtime import agreement
from expertmesh.training.planning import rank_memory
from expertmesh.training.start import inputs
from expertmesh.training.tasks.registry import task_of
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs, tell_with_forecast


def forecast_while_others_wait(model: Path) -> str:
    """Rank 0 measures until the others have come to where nobody waits in a collective."""
    engine = expertmesh.load(str(model), use_cpu=True)
    ranks, came = engine.ranks, f"{agreement._MEETINGS}/came"
    dist.barrier()
    before = ranks.store.add(came, 0)

    def asked(*arguments: Any) -> Any:
        for _ in range(6000):
            if ranks.store.add(came, 0) - before == ranks.world_size - 1:
                raise ExpertMeshError("the others wait for this rank at the store")
            time.sleep(0.01)
        raise ValueError("the others are in a collective")

    dist.barrier()
    with mock.patch.object(rank_memory, "_asked", asked):
        known = (engine.source, engine.topology, engine.kernel, engine.config)
        arguments: Any = (*known, SimpleNamespace(training=None), ranks, engine.batch_maker)
        found = rank_memory.forecast_rank(*arguments)
    return found.why_not


def test_a_forecast_may_take_longer_than_a_collective(ranks: RankPool, tiny_model: Path) -> None:
    whys = set(ranks.run(forecast_while_others_wait, 2, tiny_model))
    assert whys == {"the others wait for this rank at the store"}, "a mistake in words, without its class"


@pytest.mark.slow
def test_a_micro_batch_is_forecast_no_larger_than_the_data(runs: Runs) -> None:
    """50 samples: a micro-batch of 5,000 holds as much memory as one of 50, and more than one of 2."""
    held = {}
    for size in (2, 50, 5000):
        printed = runs(1, f"--preview --per-device-train-batch-size {size}", call=tell_with_forecast).printed
        (held[size],) = re.findall(r"^memory per rank, forecast: (.*), on top of", printed, re.MULTILINE)
    assert held[2] != held[50] == held[5000]


def turn_of_this_rank(model: Path, ranks_per_node: int) -> int:
    """When this rank reads its data, as on nodes of so many ranks."""
    engine = expertmesh.load(str(model), use_cpu=True)
    ranks = engine.ranks
    place = ProcessPlace(ranks.rank, ranks.world_size, ranks.rank % ranks_per_node)

    def read(*arguments: Any, **more: Any) -> int:
        return ranks.store.add("reads", 1)

    with mock.patch.object(inputs, "_read", read), mock.patch.object(inputs, "process_place", return_value=place):
        turn: Any = inputs.read_inputs(engine.config, engine.source, ranks, task_of(engine.config).check)
    return int(turn)


def test_the_first_rank_of_each_node_reads_the_data_first(ranks: RankPool, tiny_model: Path) -> None:
    turns = ranks.run(turn_of_this_rank, 4, tiny_model, 2)
    assert turns[0] == 1
    assert turns[2] == 2
    assert {turns[1], turns[3]} == {3, 4}
    assert ranks.run(turn_of_this_rank, 2, tiny_model, 2)[0] == 1
