"""What a run chooses of a pipeline's settings that were left open."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.pipeline.balance import StageCosts, StageMemory, balanced_ranks, balanced_stages, cut_stages
from expertmesh.training.cluster.commands import main
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.cost import step_time
from expertmesh.training.planning.planner.hardware import preset
from expertmesh.training.planning.planner.peak_memory import peak
from expertmesh.training.planning.planner.schedule_choice import choose_schedule
from expertmesh.training.planning.planner.search import Cluster
from expertmesh.training.planning.planner.stage_costs import balanced
from expertmesh.training.planning.planner.step_order import PlannedRun
from expertmesh.training.planning.rank_memory import ChosenPipeline, NoForecast, choose_pipeline
from expertmesh.training.planning.this_machine import CPU
from tests.sharding.planned import flags_of, tiny_run
from tests.sharding.test_planner_pipelines import EIGHT_LAYERS, SLOW, run_of
from tests.tiny import tiny_config

PLENTY = 1e15


def scheduled(run: PlannedRun, schedule: Any) -> PlannedRun:
    return replace(run, setting=replace(run.setting, schedule=schedule))


@pytest.mark.slow
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

    chosen, why = choose_schedule(run, Cluster(SLOW, 8, PLENTY))
    assert chosen.setting.schedule == "zero-bubble"
    assert chosen.peak == peak(chosen.run)
    assert why == f"by forecast {seconds[0] / seconds[1] - 1:.1%} faster than {name}"

    chosen, why = choose_schedule(run, Cluster(SLOW, 8, sum(held) / 2))
    assert chosen.setting.schedule == name
    assert chosen.peak == peak(chosen.run)
    assert why == f"by forecast zero-bubble would take {held[1] / 2**30:,.1f} GiB per rank"

    chosen, why = choose_schedule(run, Cluster(SLOW, 8, held[0] / 2))
    assert chosen.setting.schedule == name
    assert why == "none fits by forecast, and this one needs the least memory"

    # what was asked for is not argued with
    chosen, why = choose_schedule(run, Cluster(SLOW, 8, held[0] / 2), asked="zero-bubble")
    assert (chosen.setting.schedule, why) == ("zero-bubble", "as asked")


@pytest.mark.release
@pytest.mark.parametrize(
    ("flags", "can_queue"),
    [({"adapter": "lora", "lora_rank": 4}, True), ({}, False)],
    ids=["adapters", "another package's kernel"],
)
def test_no_queue_without_weight_gradients_that_can_wait(flags: dict[str, Any], can_queue: bool) -> None:
    chosen, why = choose_schedule(run_of(2, pp_size=2, **flags), Cluster(SLOW, 8, PLENTY), can_queue=can_queue)
    assert chosen.setting.schedule == "1f1b"
    assert why == "no expert weight gradients can wait for zero-bubble"


@pytest.mark.slow
def test_no_queue_where_it_gains_nothing() -> None:
    """Of many micro-batches the bubble is a small part."""
    chosen, why = choose_schedule(run_of(2, pp_size=2, gradient_accumulation_steps=256), Cluster(SLOW, 8, PLENTY))
    assert (chosen.setting.schedule, why) == ("1f1b", "by forecast zero-bubble gains less than 1%")


def test_settings_with_what_was_chosen() -> None:
    config = flags_of(pp_size=2)
    assert NoForecast("no reason").chosen(config) == {}
    assert config.schedule_name == "1f1b"
    _, chosen = choose_pipeline(run_of(2, {"intermediate_size": 1024}, pp_size=2), Cluster(SLOW, 8, PLENTY), config)
    assert replace(config, **chosen.left_open(config)).schedule_name == "zero-bubble"
    chosen = ChosenPipeline("1f1b", (3, 5), "why", "balance")
    assert chosen.left_open(config) == {"pipeline_schedule": "1f1b", "pipeline_layers": "3,5"}
    # what was asked for is not chosen
    assert chosen.left_open(replace(config, pipeline_schedule="1f1b")) == {"pipeline_layers": "3,5"}


def all_cuts(num_layers: int, number: int, allowed: Sequence[int]) -> list[tuple[range, ...]]:
    ends = [(*(cut + 1 for cut in cuts), num_layers) for cuts in combinations(allowed, number - 1)]
    return [tuple(range(start, end) for start, end in pairwise((0, *each))) for each in ends]


@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_cuts(seed: int) -> None:
    """With every layer, every stage and every limit another one, and some cuts forbidden."""
    random = Random(seed)
    num_layers, number = random.randint(2, 9), random.randint(1, 4)
    number = min(number, num_layers)
    allowed = sorted(random.sample(range(num_layers - 1), random.randint(number - 1, num_layers - 1)))

    def costs() -> StageCosts:
        layers = [[random.choice([0.0, 1.0, random.random()]) for _ in range(num_layers)] for _ in range(number)]
        return StageCosts(layers, [random.choice([0.0, random.random()]) for _ in range(number)])

    def largest(of: StageCosts, stages: tuple[range, ...]) -> float:
        return max(of.of(stage, layers) for stage, layers in enumerate(stages))

    seconds, bytes_held = costs(), costs()
    cuts = all_cuts(num_layers, number, allowed)
    held = sorted(largest(bytes_held, cut) for cut in cuts)
    for memory in (None, StageMemory(bytes_held, random.choice(held) + 1e-9), StageMemory(bytes_held, held[0] / 2 - 1)):
        found = balanced_stages(seconds, allowed, memory)
        assert found in cuts
        fitting = [cut for cut in cuts if memory is None or largest(bytes_held, cut) <= memory.limit]
        by = seconds if fitting else bytes_held
        least = min(largest(by, cut) for cut in fitting or cuts)
        assert largest(by, found) == pytest.approx(least, abs=1e-12)
        if fitting and memory is not None:
            assert largest(bytes_held, found) <= memory.limit

        def squares(cut: tuple[range, ...], by: StageCosts = by) -> float:
            return sum(by.of(stage, layers) ** 2 for stage, layers in enumerate(cut))

        as_good = [cut for cut in fitting or cuts if largest(by, cut) <= least + 1e-12]
        assert squares(found) == pytest.approx(min(map(squares, as_good)), abs=1e-9)


def test_stages_of_a_rank_are_balanced_against_one_another() -> None:
    """The rank of a dear head gets fewer layers in its other stage, and no stage takes longer for it."""

    def slowest(cut: tuple[range, ...]) -> tuple[float, float]:
        taken = [seconds.of(stage, layers) for stage, layers in enumerate(cut)]
        return max(taken), max(sum(taken[rank::4]) for rank in range(4))

    seconds = StageCosts.alike(8, [1.0] * 14, 0.0, 1.1)
    found = balanced_ranks(seconds, range(13), None, 4)
    assert slowest(found) == min(map(slowest, all_cuts(14, 8, range(13))))
    assert (len(found[3]), len(found[7])) == (1, 1)


@pytest.mark.release
def test_a_dear_head_leaves_its_stage_fewer_layers() -> None:
    """Layers of two kinds, and a head that takes as long as two layers: by seconds, not by operations."""
    run = run_of(4, {"vocab_size": 16384, "num_hidden_layers": 12}, pp_size=4)
    cluster = (SLOW, 8)
    by_time, _ = balanced(run, *cluster, PLENTY)
    layers = by_time.setting.stage_layers
    assert layers is not None
    assert sum(layers) == 12
    assert layers[-1] < layers[0]
    # the forecast of no other cut takes less time
    seconds = step_time(by_time, *cluster).total
    for others in ((3, 3, 3, 3), (4, 3, 3, 2), (4, 4, 2, 2), (4, 4, 3, 1)):
        other = replace(run, setting=replace(run.setting, stage_layers=others))
        assert seconds <= step_time(other, *cluster).total * (1 + 1e-9)
    # what was asked for stays
    asked = replace(run, setting=replace(run.setting, stage_layers=(3, 3, 3, 3)))
    assert balanced(asked, *cluster, PLENTY)[0] is asked


@pytest.mark.release
def test_a_first_stage_that_would_not_fit_gets_fewer_layers() -> None:
    """It keeps the most micro-batches in flight."""
    run = run_of(4, {"num_hidden_layers": 12, "hidden_size": 256}, pp_size=4, max_seq_length=512)
    by_time, held = balanced(run, SLOW, 8, PLENTY)
    by_memory, held_then = balanced(run, SLOW, 8, 0.0)
    assert by_time.setting.stage_layers is not None
    assert by_memory.setting.stage_layers is not None
    assert by_memory.setting.stage_layers[0] < by_time.setting.stage_layers[0]
    assert held_then == peak(by_memory)
    assert held_then.memory.total < held.memory.total
    # no other cut holds less, to what is no sum over layers
    for cut in all_cuts(12, 4, range(11)):
        other = replace(run, setting=replace(run.setting, stage_layers=tuple(map(len, cut))))
        assert peak(other).memory.total > 0.99 * held_then.memory.total
    # just enough for the one by seconds, and then too little for it
    assert balanced(run, SLOW, 8, held.memory.total)[0].setting == by_time.setting
    between, held_between = balanced(run, SLOW, 8, (held.memory.total + held_then.memory.total) / 2)
    assert held_between.memory.total <= (held.memory.total + held_then.memory.total) / 2
    assert step_time(between, SLOW, 8).total <= step_time(by_memory, SLOW, 8).total


@pytest.mark.slow
def test_on_a_cpu_stages_do_not_depend_on_what_is_free() -> None:
    run = tiny_run(4, {"pp_size": 4, "gradient_accumulation_steps": 8}, EIGHT_LAYERS, "cpu")
    assert balanced(run, CPU, 4, 0.0)[0].setting == balanced(run, CPU, 4, PLENTY)[0].setting


@pytest.mark.slow
def test_plan_and_dry_run_have_the_stages_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same figures: what `plan` launches is what it has forecast, and what a dry run of that command runs, and
    of one that leaves it open."""
    sizes = EIGHT_LAYERS | {"num_hidden_layers": 10, "vocab_size": 8192}
    tiny_config(**sizes).save_pretrained(tmp_path)
    batch = ["--gradient-accumulation-steps", "8", "--pp-size", "4", "--pipeline-chunks", "1"]
    plan = ["plan", "--model", str(tmp_path), "--gpus", "4", "--imbalance", "1", "--seq-length", "32"]
    assert main([*plan, *batch, "--micro-batch", "2", "--json"]) == 0
    best, *_ = (each for each in json.loads(capsys.readouterr().out) if each["gradient_checkpointing"] == "none")
    config = flags_of(pp_size=4, gradient_accumulation_steps=8, bf16=True, pipeline_schedule=best["schedule"])
    run = run_of(4, sizes, pp_size=4)
    hardware = preset("H100", "infiniband-ndr")
    _, chosen = choose_pipeline(run, Cluster(hardware, 8, PLENTY), config)
    told = ",".join(map(str, best["stage_layers"]))
    assert run.cuts is not None
    assert best["stage_layers"] != [len(stage) for stage in cut_stages(run.cuts, 4, 1, None)]
    assert ",".join(map(str, chosen.layers)) == told
    assert main([*plan, *batch, "--micro-batch", "2", "--top", "1"]) == 0
    assert "--pipeline-layers " in capsys.readouterr().out.replace("\n", "")
    seen: list[TrainConfig] = []

    def rehearse(config: TrainConfig, *_: Any) -> None:
        seen.append(config)
        raise ExpertMeshError("seen")

    dry = ["rehearse", "--model", str(tmp_path), "--gpus", "4", *batch, "--bf16", "--max-seq-length", "32"]
    dry += ["--per-device-train-batch-size", "2", "--pipeline-schedule", best["schedule"]]
    with mock.patch("expertmesh.training.planning.rehearsal.world.rehearse", rehearse):
        assert main(dry) == 2
    assert [each.pipeline_layers for each in seen] == [told]
