"""What a run chooses of a pipeline's settings that were left open."""

from dataclasses import replace
from typing import Any

import pytest

from expertmesh.training.foresight.planner.cost import step_time
from expertmesh.training.foresight.planner.peak_memory import peak
from expertmesh.training.foresight.planner.schedule_choice import choose_schedule
from expertmesh.training.foresight.planner.search import Cluster
from expertmesh.training.foresight.planner.step_order import PlannedRun
from expertmesh.training.foresight.rank_memory import ChosenPipeline, NoForecast, choose_pipeline
from tests.sharding.planned import flags_of
from tests.sharding.test_planner_pipelines import SLOW, run_of

PLENTY = 1e15


def scheduled(run: PlannedRun, schedule: Any) -> PlannedRun:
    return replace(run, setting=replace(run.setting, schedule=schedule))


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_fastest_that_fits_is_taken(chunks: int) -> None:
    """With checkpointing what waits for its weight gradients is more than what is in flight."""
    settings = {"pp_size": 4, "pipeline_chunks": chunks, "gradient_checkpointing": "full"}
    run = run_of(4, {"intermediate_size": 1024}, **settings)
    name = "1f1b" if chunks == 1 else "interleaved"
    plain, queued = scheduled(run, name), scheduled(run, "zero-bubble")
    seconds = [step_time(each, SLOW, 8).total for each in (plain, queued)]
    held = [peak(each).memory.total for each in (plain, queued)]
    assert seconds[1] < seconds[0]
    assert held[1] > held[0]

    chosen = choose_schedule(run, Cluster(SLOW, 8, PLENTY))
    assert chosen.run.setting.schedule == "zero-bubble"
    assert chosen.peak == peak(queued)
    assert chosen.why == f"by forecast {seconds[0] / seconds[1] - 1:.1%} faster than {name}"

    chosen = choose_schedule(run, Cluster(SLOW, 8, sum(held) / 2))
    assert chosen.run.setting.schedule == name
    assert chosen.peak == peak(plain)
    assert chosen.why == f"by forecast zero-bubble would take {held[1] / 2**30:,.1f} GiB per rank"

    chosen = choose_schedule(run, Cluster(SLOW, 8, held[0] / 2))
    assert chosen.run.setting.schedule == name
    assert chosen.why == "none fits by forecast, and this one holds the least"

    # what was asked for is not argued with
    chosen = choose_schedule(run, Cluster(SLOW, 8, held[0] / 2), asked="zero-bubble")
    assert (chosen.run.setting.schedule, chosen.why) == ("zero-bubble", "as asked")


@pytest.mark.parametrize(
    ("flags", "can_queue"),
    [({"adapter": "lora", "lora_rank": 4}, True), ({}, False)],
    ids=["adapters", "another package's kernel"],
)
def test_no_queue_without_weight_gradients_that_can_wait(flags: dict[str, Any], can_queue: bool) -> None:
    chosen = choose_schedule(run_of(2, pp_size=2, **flags), Cluster(SLOW, 8, PLENTY), can_queue=can_queue)
    assert chosen.run.setting.schedule == "1f1b"
    assert chosen.why == "no expert weight gradients can wait for zero-bubble"


def test_no_queue_where_it_gains_nothing() -> None:
    """Of many micro-batches the bubble is a small part."""
    chosen = choose_schedule(run_of(2, pp_size=2, gradient_accumulation_steps=256), Cluster(SLOW, 8, PLENTY))
    assert (chosen.run.setting.schedule, chosen.why) == ("1f1b", "by forecast zero-bubble gains less than 1%")


def test_settings_with_what_was_chosen() -> None:
    config = flags_of(pp_size=2)
    assert NoForecast("no reason").settled(config) == config
    assert config.schedule_name == "1f1b"
    _, chosen = choose_pipeline(run_of(2, {"intermediate_size": 1024}, pp_size=2), Cluster(SLOW, 8, PLENTY), config)
    assert chosen.settled(config).schedule_name == "zero-bubble"
    assert ChosenPipeline("1f1b", "as asked").settled(config).schedule_name == "1f1b"
