"""Which schedule and which stages a pipeline has: in a run as told, or the default; in a plan by forecast."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from expertmesh.sharding.pipeline.balance import StageCosts, StageMemory, balanced_ranks, balanced_stages, cut_stages
from expertmesh.training.cluster.commands import main
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning import plan_command
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.facts import Cuts
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.rank_memory import _forecast_alone
from expertmesh.training.planning.rehearsal import rehearse_command
from tests.sharding.planned import ByFormula, cluster_of, flags_of
from tests.sharding.test_planner_pipelines import EIGHT_LAYERS, PLENTY, asked_of
from tests.tiers import tiered
from tests.tiny import tiny_config

WIDE = EIGHT_LAYERS | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}


class Uneven(ByFormula):
    """Two layers have four times the operations of the others, and take as long."""

    def cuts(self, config: TrainConfig) -> Cuts:
        return Cuts("Mixtral", (1.0,) * (self.said["num_hidden_layers"] - 2) + (4.0, 4.0, 0.5), ())

    def by_operations(self, config: TrainConfig) -> str:
        stages = cut_stages(self.cuts(config), config.pp_size, config.pipeline_chunks, None)
        return ",".join(str(len(each)) for each in stages)


def by_formula() -> Uneven:
    return Uneven(tiny_config(**WIDE).to_dict())


@pytest.mark.parametrize(
    ("flags", "schedule", "layers"),
    [
        ({}, "1f1b", None),
        ({"pipeline_chunks": 2}, "interleaved", None),
        ({"pipeline_schedule": "zero-bubble", "pipeline_layers": "1,2,2,7"}, "zero-bubble", "1,2,2,7"),
    ],
    ids=["default", "several stages per rank", "as told"],
)
@pytest.mark.parametrize("memory", [PLENTY, 1.0])
def test_a_run_searches_nothing(memory: float, flags: dict[str, Any], schedule: str, layers: str | None) -> None:
    """Whatever would be faster, or fit, its forecast is of what it is told, or else of the default."""
    forecasts, asked = by_formula(), asked_of(4, memory, pp_size=4, **flags)
    layers = layers or forecasts.by_operations(asked.config)
    _forecast_alone(forecasts, asked)
    found = {(each.config.schedule_name, each.config.pipeline_layers) for each in forecasts.questions}
    assert found == {("1f1b", None), (schedule, layers)}, "one stage of all layers, and ranks of the pipeline"
    assert forecasts.with_stages(asked.config) == replace(asked.config, pipeline_layers=layers)
    alone = flags_of()
    assert forecasts.with_stages(alone) is alone


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


@pytest.mark.parametrize("schedule", tiered(slow=["interleaved"], release=["1f1b", "zero-bubble"]))
def test_plan_and_dry_run_and_run_tell_one_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    """To the byte, of the rank that holds the most; and plan and dry run the same seconds."""
    tiny_config(**EIGHT_LAYERS | {"hidden_size": 128, "vocab_size": 4096}).save_pretrained(tmp_path)
    chunks = "2" if schedule == "interleaved" else "1"
    both = ["--model", str(tmp_path), "--gpus", "4", "--pp-size", "2", "--ep-size", "2", "--imbalance", "1"]
    both += ["--gradient-accumulation-steps", "8", "--pipeline-schedule", schedule, "--pipeline-chunks", chunks]
    both += ["--gradient-checkpointing", "full", "--per-device-train-batch-size", "1", "--max-seq-length", "256"]
    assert main(["plan", *both, "--dense-shard", "full", "--json"]) == 0
    best, *others = json.loads(capsys.readouterr().out)
    assert (best["is_estimate"], others) == (False, [])
    layers = ["--pipeline-layers", ",".join(map(str, best["stage_layers"]))]
    found = []
    for rank in ("0", "2"):
        assert main(["rehearse", *both, *layers, "--bf16", "--rank", rank, "--samples-per-row", "1", "--json"]) == 0
        found += json.loads(capsys.readouterr().out)
    fullest = max(found, key=lambda account: account["memory"]["peak"])
    assert best["memory"]["total"] == round(fullest["needed_bytes"])
    assert best["seconds"]["total"] == pytest.approx(found[0]["seconds"])
    flags: dict[str, Any] = dict(ep_size=2, pp_size=2, pipeline_chunks=int(chunks), gradient_accumulation_steps=8)
    flags |= dict(gradient_checkpointing="full", per_device_train_batch_size=1, max_seq_length=256, bf16=True)
    config, model_config = (
        flags_of(**flags, pipeline_schedule=schedule, pipeline_layers=layers[1]),
        tiny_config(**EIGHT_LAYERS | {"hidden_size": 128, "vocab_size": 4096}),
    )
    asked = Asked(config, 4, cluster_of(), 0, GivenRouting(samples=1))
    forecasts = Forecasts(model_config.to_dict(), lambda: model_config, is_kept=False)
    held = _forecast_alone(forecasts, asked)
    assert round(held.memory.total) == best["memory"]["total"]


def test_what_is_in_host_memory_is_not_held_on_a_gpu() -> None:
    config = flags_of(offload=True, gradient_checkpointing="full")
    asked = Asked(config, 2, cluster_of(), 0, GivenRouting(samples=1))
    held = _forecast_alone(by_formula(), asked)
    assert held.memory.lasting == 0
    assert held.memory.total == pytest.approx(by_formula().account(asked).fit(PLENTY).total)


def test_a_dry_run_has_the_stages_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that `plan` found and launches, in a dry run of that command; the default in one that leaves them open."""
    tiny_config(**WIDE | {"num_hidden_layers": 10, "vocab_size": 8192}).save_pretrained(tmp_path)
    forecasts = Uneven(json.loads((tmp_path / "config.json").read_text()))
    monkeypatch.setattr(plan_command, "_forecasts", lambda *_: forecasts)
    batch = ["--gradient-accumulation-steps", "8", "--pp-size", "4", "--pipeline-chunks", "1"]
    plan = ["plan", "--model", str(tmp_path), "--gpus", "4", "--imbalance", "1", "--seq-length", "32", "--top", "1"]
    plan += ["--micro-batch", "2", "--gradient-checkpointing", "none", *batch]
    assert main([*plan, "--json"]) == 0
    best, *_ = json.loads(capsys.readouterr().out)
    told = ",".join(map(str, best["stage_layers"]))
    assert main(plan) == 0
    printed = capsys.readouterr().out
    assert f"--pipeline-layers {told}" in printed
    assert f"--pipeline-schedule {best['schedule']}" in printed
    default = forecasts.by_operations(asked_of(4, pp_size=4).config)
    assert default != told
    seen = Uneven(forecasts.said, lambda asked: "seen" if asked.config.pp_size > 1 else None)
    monkeypatch.setattr(rehearse_command, "Forecasts", lambda *_, **__: seen)
    dry = ["rehearse", "--model", str(tmp_path), "--gpus", "4", *batch, "--bf16", "--max-seq-length", "32"]
    dry += ["--per-device-train-batch-size", "2", "--pipeline-schedule", best["schedule"]]
    for layers, expected in (([], default), (["--pipeline-layers", told], told)):
        assert main([*dry, *layers]) == 2
        assert "seen" in capsys.readouterr().err
        assert seen.questions.pop().config.pipeline_layers == expected
