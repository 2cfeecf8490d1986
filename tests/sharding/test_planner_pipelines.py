"""What forecasts say of pipelines: whose layers are where, what a stage holds, how long ranks wait."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.pipeline.schedule import make_schedule
from expertmesh.sharding.pipeline.timeline import Timetable, bubble
from expertmesh.sharding.topology import Topology
from expertmesh.training.cluster.commands import main
from expertmesh.training.planning.memory import NEAR
from expertmesh.training.planning.planner.account import LayerCosts
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.planner.pipelines import PlannedPipeline, one_stage, pipelined
from expertmesh.training.run.banner import pipeline_lines
from tests.sharding.planned import ByFormula, cluster_of, flags_of, tiny_forecasts
from tests.tiny import tiny_config

EIGHT_LAYERS: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
PLENTY = 1e15


def asked_of(world_size: int, limit: float = PLENTY, **flags: Any) -> Asked:
    """limit: of what a rank is to hold."""
    settings = {"gradient_accumulation_steps": 8, "bf16": True, **flags}
    return Asked(flags_of(**settings), world_size, cluster_of(limit / NEAR))


def step_of(
    world_size: int, sizes: dict[str, Any] | None = None, limit: float = PLENTY, costs: Any = None, **flags: Any
) -> PlannedPipeline:
    """By a formula. costs: of a layer, and of what is around them, in place of the formula's."""
    forecasts = ByFormula(tiny_config(**(EIGHT_LAYERS | (sizes or {}))).to_dict())
    step = pipelined(forecasts, asked_of(world_size, limit, **flags))
    return step if costs is None else replace(step, whole=replace(step.whole, layer_costs=costs))


EQUAL = {"0": LayerCosts(1.0, 2.0, 1.0, 1000.0, 500.0)}
"""Nothing around the layers."""
QUEUED = {"0": replace(EQUAL["0"], queued=1e12)}
"""More than experts' weights."""
HEAD = EQUAL | {"after": LayerCosts(2.0, 4.0)}


def cut(step: PlannedPipeline) -> list[int]:
    return list(map(len, step.stages))


def test_the_step_of_one_stage() -> None:
    """Of all layers on the ranks of a stage, with micro-batches of as many tokens, of which two tell all."""
    asked = replace(asked_of(8, pp_size=4, pipeline_chunks=2, ep_size=2, pipeline_layers="1,1,1,1,1,1,1,1"), rank=5)
    one = one_stage(asked)
    assert (one.world_size, one.rank, one.config.pp_size, one.config.pipeline_layers) == (2, 0, 1, None)
    assert one.config.micro_batches(2) == 2
    assert one.config.ep_size == 2


def test_stages_are_cut_by_seconds() -> None:
    """A head that takes as long as two layers leaves its stage two fewer; what was asked for stays."""
    assert cut(step_of(4, pp_size=4, costs=EQUAL)) == [2, 2, 2, 2]
    assert cut(step_of(2, {"num_hidden_layers": 10}, pp_size=2, costs=HEAD)) == [6, 4]
    assert cut(step_of(2, {"num_hidden_layers": 10}, pp_size=2, costs=HEAD, pipeline_layers="3,7")) == [3, 7]
    before, after = step_of(2, pp_size=2, costs=EQUAL | {"root": LayerCosts(2.0, 2.0)}).around
    assert before == after == LayerCosts(1.0, 1.0), "the embedding and the head are as large"


def test_a_first_stage_that_would_not_fit_gets_fewer_layers() -> None:
    """It keeps the most micro-batches in flight."""
    sizes: dict[str, Any] = {"num_hidden_layers": 12}
    costs = {"0": LayerCosts(1.0, 2.0, 1.0, 2.0**20, 0.0)}
    by_time = step_of(4, sizes, pp_size=4, costs=costs)
    assert cut(by_time) == [3, 3, 3, 3]
    most = [max(held.total for held in by_time.held(by_time.stages))]
    for limit in (0.9 * most[0], 0.0):
        by_memory = step_of(4, sizes, limit, pp_size=4, costs=costs)
        stages = by_memory.stages
        assert len(stages[0]) < 3 < len(stages[-1])
        most.append(max(held.total for held in by_memory.held(stages)))
    assert most[2] <= most[1] <= 0.9 * most[0]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
@pytest.mark.parametrize("micro_batches", [4, 9, 50])
def test_many_rounds_take_as_long_as_all_of_them(schedule: Any, chunks: int, micro_batches: int) -> None:
    flags = {"pipeline_schedule": schedule, "pipeline_chunks": chunks, "gradient_accumulation_steps": micro_batches}
    step = step_of(4, pp_size=4, costs=HEAD, **flags)
    stages = step.stages
    (complete,) = Timetable(make_schedule(schedule, 4, chunks, micro_batches)).seconds([step._costs(stages)])
    assert step.seconds(stages) == pytest.approx(complete, rel=1e-3)


@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_wait_as_long_as_the_bubble_says(pp: int, chunks: int) -> None:
    """Where all stages take as long, and sending next to nothing."""
    schedule: Any = "1f1b" if chunks == 1 else "interleaved"
    step = step_of(pp, pp_size=pp, pipeline_chunks=chunks, costs=EQUAL, pipeline_schedule=schedule)
    seconds, ideal = step.seconds(step.stages), 8 * 8 * 3.0 / pp
    assert 1 - ideal / seconds == pytest.approx(bubble(schedule, pp, chunks, 8), abs=0.01)
    account = replace(step, whole=replace(step.whole)).account()
    assert account.time.bubble >= 0
    assert account.time.total - account.time.update == pytest.approx(
        max(seconds, account.time.total - account.time.update)
    )


def test_a_queue_of_weight_gradients_fills_the_bubble() -> None:
    """Which is of experts that are trained."""

    def seconds(schedule: str, **flags: Any) -> float:
        step = step_of(4, pp_size=4, costs=EQUAL, pipeline_schedule=schedule, **flags)
        return step.seconds(step.stages)

    assert seconds("zero-bubble") < 0.9 * seconds("1f1b")
    assert seconds("zero-bubble", adapter="lora") >= 0.99 * seconds("1f1b", adapter="lora")


def test_what_stages_keep_is_what_is_in_flight() -> None:
    """The first rank has as many micro-batches as there are stages on the way, the last one; interleaved, more; and in
    a queue what weight gradients are computed of waits too."""

    def activations(schedule: str, number: int = 8, chunks: int = 1) -> list[float]:
        flags: dict[str, Any] = {
            "gradient_accumulation_steps": number,
            "pipeline_chunks": chunks,
            "pipeline_schedule": schedule,
        }
        step = step_of(4, pp_size=4, costs=QUEUED, **flags)
        return [held.activations for held in step.held(step.stages)]

    assert activations("1f1b") == [4 * 2000, 3 * 2000, 2 * 2000, 1 * 2000]
    assert activations("1f1b", 2) == [2 * 2000, 2 * 2000, 2 * 2000, 1 * 2000]
    assert activations("1f1b", 64) == activations("1f1b")
    assert activations("interleaved", chunks=2)[0] > activations("1f1b")[0]
    queued = activations("zero-bubble")
    assert all(more >= plain for more, plain in zip(queued, activations("1f1b"), strict=True))
    assert queued[-1] > activations("1f1b")[-1]


def test_what_lasts_is_of_a_ranks_own_layers() -> None:
    """And of what stands at the ends, which the first and the last stage have."""
    step = step_of(4, {"vocab_size": 16384}, pp_size=2, costs=EQUAL, pipeline_layers="2,6")
    first, last = step.held(step.stages)
    # two ranks a stage, fp32 parameters
    layer = step.facts.kinds[0].dense.stored + step.facts.kinds[0].experts.stored
    end = 4 * 16384 * 64
    assert [held.parameters for held in (first, last)] == pytest.approx(
        [(n * layer + end) / 2 for n in (2, 6)], rel=0.01
    )
    assert first.total < last.total
    assert step.account().rank == 2, "which holds the most"
    assert step.account().layers == (6, 8)


def test_an_account_is_of_the_whole_step() -> None:
    """Of as many micro-batches as there are, of a rank's share of the layers."""
    one = step_of(4, pp_size=4)
    account, whole = one.account(), one.whole
    assert (account.forwards, whole.forwards) == (8, 2)
    assert account.stages == "2,2,2,2"
    assert account.needed == pytest.approx(whole.needed * 4 / 4)
    assert sum(each.total for each in account.sent) == pytest.approx(sum(each.total for each in whole.sent) * 4 / 4)
    assert account.time.kernels - account.time.update == pytest.approx((whole.time.kernels - whole.time.update) * 4 / 4)
    assert account.time.bubble > 0


def test_too_few_layers_for_the_stages() -> None:
    with pytest.raises(
        ExpertMeshError, match="--pp-size 4 --pipeline-chunks 4: 16 stages need 16 decoder layers or more"
    ):
        _ = step_of(4, pp_size=4, pipeline_chunks=4).stages


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [{}, {"gradient_checkpointing": "full"}, {"pipeline_schedule": "zero-bubble"}],
    ids=["none", "full", "zero-bubble"],
)
def test_memory_is_nearly_that_of_a_dry_run_of_the_pipeline(flags: dict[str, Any]) -> None:
    """What lasts is exact. Of the rest the estimate takes what one stage of all layers has at its peak: the last stage
    gathers less than that. And of what waits for its weight gradients it takes all that experts read and write, of
    which they keep a part: with zero-bubble it is high."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256}
    forecasts = tiny_forecasts(sizes, "cuda")
    asked = asked_of(2, pp_size=2, max_seq_length=256, **flags)
    step = pipelined(forecasts, asked)
    stages = step.stages
    config = replace(asked.config, pipeline_layers=",".join(str(len(stage)) for stage in stages))
    for rank, estimated in enumerate(step.held(stages)):
        real = forecasts.account(replace(asked, config=config, rank=rank)).memory.kinds
        assert estimated.lasting == pytest.approx(real.lasting, rel=0.01)
        most = 1.25 if config.schedule_name == "zero-bubble" else 1.1
        assert 0.98 * real.total <= estimated.total <= most * real.total


def test_a_picture_says_which_ranks_hold_which_layers(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ["mesh", "--world-size", "16", "--ep-size", "2", "--pp-size", "2"]
    assert main([*mesh, "--pipeline-chunks", "2", "--num-layers", "10"]) == 0
    out = capsys.readouterr().out
    assert "16 ranks = pp 2 x dp 4 x ep 2, 8 per node, 2 nodes" in out
    assert "pp 1 dp 3   14  15   node 1" in out
    assert "pp: 8 groups of 2 (layers' results, from each to the next), 8 of them cross nodes" in out
    assert "pp 0: layers 0-2, 5-7 on ranks 0 to 7" in out or "pp 0: layers 0-1, " in out
    assert "dense: 2 groups of 8" in out
    assert main([*mesh, "--num-layers", "1"]) == 2
    assert "--pp-size 2: 2 stages need 2 decoder layers or more; the model has 1" in capsys.readouterr().err
    assert main(["mesh", "--world-size", "16", "--ep-size", "2", "--pp-size", "3"]) == 2
    assert "--pp-size 3 does not divide the 16 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pp-size", "3"], "--pp-size 3 does not divide the 8 ranks; use 1, 2, 4 or 8"),
        (["--pp-size", "0"], "--pp-size 0: must be 1 or more"),
        (["--pipeline-layers", "4,4"], "--pipeline-layers 4,4: --pp-size 1 has no pipeline; give --pp-size"),
        (["--global-batch-size", "0"], "--global-batch-size 0: must be 1 or more"),
        (
            ["--pp-size", "2", "--pipeline-schedule", "interleaved", "--pipeline-chunks", "1"],
            "needs several stages per rank",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(tmp_path: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    tiny_config(**EIGHT_LAYERS).save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def engine_of(pp: int, micro_batches: int, told: str | None = None) -> Any:
    layers = tuple(range(2 * stage, 2 * stage + 2) for stage in range(pp))
    pipeline = SimpleNamespace(stages=SimpleNamespace(layers=layers, number=pp, pp_size=pp), schedule="1f1b", chunks=1)
    config = SimpleNamespace(micro_batches=lambda world_size: micro_batches, pipeline_layers=told)
    return SimpleNamespace(model=SimpleNamespace(pipeline=pipeline), config=config, topology=Topology(8, 1, pp_size=pp))


def test_what_a_run_says_of_its_stages() -> None:
    (line,) = pipeline_lines(engine_of(4, 8))
    assert line == (
        "pipeline: 4 stages of 2, 2, 2 and 2 layers (balanced by floating point operations); 1f1b, bubble 27%"
    )
    line, warning = pipeline_lines(engine_of(4, 2, "2,2,2,2"))
    assert "2 layers (as asked); 1f1b, bubble " in line
    assert warning == (
        "warning: --pp-size 4 with 2 micro-batches: ranks wait for each other 60% of the time (the bubble); raise "
        "--gradient-accumulation-steps"
    )
    whole: Any = SimpleNamespace(model=object(), config=None)
    assert pipeline_lines(whole) == []
