"""What the planner says of pipelines: whose layers are where, what a stage holds, how long ranks wait."""

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.pipeline.balance import cut_stages
from expertmesh.sharding.pipeline.schedule import make_schedule
from expertmesh.sharding.pipeline.survey import survey
from expertmesh.sharding.pipeline.timeline import Costs, Timetable, bubble
from expertmesh.sharding.stages import Stages
from expertmesh.sharding.topology import Axis, Topology
from expertmesh.training.banner import pipeline_lines
from expertmesh.training.cluster.commands import main
from expertmesh.training.planning.memory import Memory
from expertmesh.training.planning.planner.cost import _stage_times, step_time, step_times, tokens_per_second
from expertmesh.training.planning.planner.hardware import Device, Hardware, Link
from expertmesh.training.planning.planner.peak_memory import _peak_of_rank, fullest, least_held, peak
from expertmesh.training.planning.planner.pipelines import pipeline_seconds
from expertmesh.training.planning.planner.search import Cluster, Plan, Tried, search
from expertmesh.training.planning.planner.setting import Setting
from expertmesh.training.planning.planner.step_order import Act, PlannedRun
from expertmesh.training.planning.planner.traffic import step_traffic
from expertmesh.training.planning.rank_memory import ChosenPipeline, Forecast, NoForecast
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.cached import CachedMeasure
from expertmesh.training.planning.rehearsal.run_setting import setting_of
from tests.sharding.planned import flags_of, tiny_run
from tests.tiny import tiny_config

EIGHT_LAYERS: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128}
# so slow that nothing but matmuls counts
SLOW = Hardware("slow", Device(1e7, 1e6, 1e11, 8e10), Link(1e12, 0), Link(1e12, 0))


def run_of(world_size: int, sizes: dict[str, Any] | None = None, **flags: Any) -> PlannedRun:
    settings = {"gradient_accumulation_steps": 8, "bf16": True, **flags}
    return tiny_run(world_size, settings, EIGHT_LAYERS | (sizes or {}), "cuda")


@pytest.mark.sample(4)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (4, 2)])
def test_each_rank_holds_what_it_does_in_a_run(tied: bool, pp: int, chunks: int) -> None:
    sizes = {"tie_word_embeddings": tied}
    run = run_of(pp, sizes, pp_size=pp, pipeline_chunks=chunks)
    model = build_rehearsed(flags_of(), tiny_config(**EIGHT_LAYERS, **sizes), "cpu")
    found = survey(model, torch.bfloat16)
    assert run.all_stages == cut_stages(found, pp, chunks, None)
    stages = Stages(found, run.all_stages, pp)
    for each in run.by_pp_rank:
        here = [p.numel() for name, p in model.named_parameters() if each.pp_rank in stages.pp_ranks(name)]
        assert sum(unit.stored for unit in each.units.values()) == 4 * sum(here)
    shared = [t for t in step_traffic(run) if t.what == "shared parameters"]
    assert len(shared) == tied


@pytest.mark.slow
def test_stages_together_compute_what_one_rank_does() -> None:
    def computed(acts: tuple[Act, ...] | list[Act]) -> list[tuple[int, str, bool]]:
        return [(act.layer, str(act.span), act.is_backward) for act in acts if act.layer is not None]

    whole = run_of(1, pp_size=1)
    for chunks in (1, 2):
        run = run_of(2, pp_size=2, pipeline_chunks=chunks)
        parts = [replace(run, pp_rank=stage % 2).acts_of(stage) for stage in range(len(run.all_stages))]
        forward = list(chain.from_iterable(forward for forward, _ in parts))
        backward = list(chain.from_iterable(backward for _, backward in reversed(parts)))
        assert computed(forward + backward) == computed(whole.acts)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_fullest_rank_is_found(schedule: str) -> None:
    """Of ranks with the same layers the first has the most in flight, and the last the most that waits for its weight
    gradients, which counts where layers are checkpointed."""
    layers = {"pipeline_layers": "2,2,2,2,1", "gradient_checkpointing": "full", "pipeline_schedule": schedule}
    run = run_of(5, {"num_hidden_layers": 9, "intermediate_size": 1024}, pp_size=5, **layers)
    tensors = [_peak_of_rank(each).tensors for each in run.by_pp_rank]
    assert peak(run).tensors == max(tensors)
    assert fullest(run).pp_rank == tensors.index(max(tensors)) == (3 if schedule == "zero-bubble" else 0)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
@pytest.mark.parametrize("micro_batches", [2, 9, 50])
def test_many_rounds_take_as_long_as_all_of_them(schedule: Any, chunks: int, micro_batches: int) -> None:
    forward = [1.0 + 0.1 * (stage % 3) for stage in range(4 * chunks)]
    costs = Costs(forward, [1.7 * seconds for seconds in forward], [0.3] * len(forward), 0.05)
    setting = Setting(8, 2, pp_size=4, chunks=chunks, schedule=schedule, accumulation=micro_batches)
    (complete,) = Timetable(make_schedule(schedule, 4, chunks, micro_batches)).seconds([costs])
    slower = replace(costs, send=0.5)
    found = pipeline_seconds(setting, [costs, slower])
    assert found[0] == pytest.approx(complete, rel=1e-3)
    assert found == [*pipeline_seconds(setting, [costs]), *pipeline_seconds(setting, [slower])]


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "chunks"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_wait_as_long_as_the_bubble_says(pp: int, chunks: int) -> None:
    run = run_of(pp, {"vocab_size": 16}, pp_size=pp, pipeline_chunks=chunks)
    time = step_time(run, SLOW, 8)
    schedule: Any = "1f1b" if chunks == 1 else "interleaved"
    assert time.bubble / time.total == pytest.approx(bubble(schedule, pp, chunks, 8), abs=0.03)
    alone = step_time(run_of(1, {"vocab_size": 16}), SLOW, 8)
    assert time.matrices == pytest.approx(alone.matrices / pp, rel=0.05)
    # as many tokens, by more ranks
    slowdown = tokens_per_second(alone_setting := run_of(1).setting, 1.0) / tokens_per_second(run.setting, 1.0)
    assert slowdown == pytest.approx(pp), alone_setting


def test_the_last_stage_has_the_head() -> None:
    """Also where its rank has another one with the same layers; and runs that are forecast together take what each
    does alone."""
    layers = {"pipeline_chunks": 2, "pipeline_layers": "2,2,2,2"}
    run = run_of(2, {"vocab_size": 16384}, pp_size=2, **layers)
    other = replace(run, setting=replace(run.setting, stage_layers=(2, 2, 3, 1)))
    _, third, _, last = _stage_times(run, SLOW, 8, {})
    assert last.forward > 1.5 * third.forward
    assert step_times([run, other], SLOW, 8) == [step_time(run, SLOW, 8), step_time(other, SLOW, 8)]


def test_without_a_pipeline_nothing_waits() -> None:
    run = run_of(4, ep_size=2)
    assert run.cuts is None
    assert step_time(run, SLOW, 8).bubble == 0
    assert run.layers == list(range(8))
    assert not [traffic for traffic in step_traffic(run) if traffic.group == "pp"]


@pytest.mark.release
def test_memory_grows_with_the_micro_batches_in_flight() -> None:
    def activations(micro_batches: int, **flags: Any) -> float:
        return peak(run_of(4, pp_size=4, gradient_accumulation_steps=micro_batches, **flags)).memory.activations

    held = [activations(number) for number in (1, 2, 4, 8, 16)]
    assert held[0] < held[1] < held[2] == held[3] == held[4]
    # the first rank keeps four micro-batches of its two layers
    run = run_of(4, pp_size=4)
    kind = run.measured.kinds[0]
    assert held[2] >= 3 * 2 * (kind.kept - kind.kept_casts)
    assert activations(8, pipeline_chunks=2) > held[3]
    assert activations(8, pipeline_schedule="zero-bubble") >= held[3]


def test_groups_of_a_pipeline() -> None:
    setting = Setting(16, 2, pp_size=2)
    axes: tuple[Axis, ...] = ("pp", "stage", "ep", "dp", "world")
    found = {axis: list(setting.group(axis)) for axis in axes}
    assert found == {
        "pp": [0, 8],
        "stage": list(range(8)),
        "ep": [0, 1],
        "dp": [0, 2, 4, 6],
        "world": list(range(16)),
    }


def tiny_search(tried: Tried, between: float, accumulation: int = 16) -> list[Setting]:
    """The settings on two nodes of two GPUs, best first."""
    config = flags_of(bf16=True, gradient_accumulation_steps=accumulation)
    model_config = tiny_config(**EIGHT_LAYERS)
    measure = CachedMeasure(config, model_config.to_dict(), lambda: model_config, "cuda", is_kept=False)
    machine = Hardware("two nodes", Device(1e12, 1e12, 1e12, 8e10), Link(1e12, 0), Link(between, 0))
    plans = search(measure, setting_of(config, 4), tried, Cluster(machine, 2, 8e10))
    return [plan.setting for plan in plans]


@pytest.mark.release
def test_a_slow_network_asks_for_a_pipeline() -> None:
    assert tiny_search(Tried((1,), pp_size=None, chunks=1), between=1e6)[0].pp_size == 2
    tried = tiny_search(Tried((1,), pp_size=None), between=1e12)
    assert {(s.pp_size, s.chunks) for s in tried} == {(1, 1), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)}
    # four micro-batches of eight sequences, or two of twice as many
    by_batch = tiny_search(Tried((1, 2), 8, None, 1), between=1e12)
    assert {(s.pp_size, s.micro_batch, s.accumulation) for s in by_batch} == {
        *((1, 1, 2), (1, 2, 1), (2, 1, 4), (2, 2, 2), (4, 1, 8), (4, 2, 4))
    }


def test_what_cannot_fit_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what no layer's computation could make fit, only as many are as it takes to know which holds the least."""
    config, model_config = flags_of(bf16=True), tiny_config(**EIGHT_LAYERS)
    measure = CachedMeasure(config, model_config.to_dict(), lambda: model_config, "cuda", is_kept=False)
    base, tried = setting_of(config, 4), Tried((1, 2, 4))

    def plans(memory: float, **changes: Any) -> list[Plan]:
        machine = Hardware("a node", Device(1e12, 1e12, 1e12, memory), Link(1e12, 0), Link(1e12, 0))
        return search(measure, base, replace(tried, **changes), Cluster(machine, 4, memory))

    large = plans(8e10)
    assert len(large) > 20
    least = {each.setting: least_held(measure.parameters, each.setting) for each in large}
    assert all(0 < least[each.setting] <= each.memory.total for each in large)
    # micro-batches in between follow from the smallest and the largest, and are told like these
    assert {each.setting.micro_batch for each in large} == {1, 2, 4}
    between = sorted(least.values())[len(least) // 2]
    known = {each.setting: each.memory for each in large}
    for memory in (between, 1.0):
        found = plans(memory)
        assert len(found) < len(large)
        assert all(known[each.setting] == each.memory for each in found)
        assert min(memory.total for memory in known.values()) == min(each.memory.total for each in found)
    assert plans(1.0, only_fitting=True) == []


def test_too_few_layers_for_the_stages() -> None:
    with pytest.raises(
        ExpertMeshError, match="--pp-size 4 --pipeline-chunks 4: 16 stages need 16 decoder layers or more"
    ):
        tiny_search(Tried((1,), pp_size=4, chunks=4), between=1e12)


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


def engine_of(pp: int, micro_batches: int) -> Any:
    layers = tuple(range(2 * stage, 2 * stage + 2) for stage in range(pp))
    pipeline = SimpleNamespace(stages=SimpleNamespace(layers=layers, number=pp, pp_size=pp), schedule="1f1b", chunks=1)
    config = SimpleNamespace(micro_batches=lambda world_size: micro_batches, pipeline_layers=None)
    return SimpleNamespace(model=SimpleNamespace(pipeline=pipeline), config=config, topology=Topology(8, 1, pp_size=pp))


def test_what_a_run_says_of_its_stages() -> None:
    unknown = NoForecast("no reason")
    (line,) = pipeline_lines(engine_of(4, 8), unknown)
    assert line == (
        "pipeline: 4 stages of 2, 2, 2 and 2 layers (balanced by floating point operations); 1f1b (without a "
        "forecast), bubble 27%"
    )
    why, balance = "by forecast zero-bubble gains less than 1%", "balanced by forecast seconds"
    chosen = ChosenPipeline("1f1b", (2,) * 4, why, balance)
    known = Forecast("update", Memory(), Memory(), 0.0, 1.0, chosen)
    line, warning = pipeline_lines(engine_of(4, 2), known)
    assert f"2 layers ({balance}); 1f1b ({why}), bubble " in line
    assert warning == (
        "warning: --pp-size 4 with 2 micro-batches: ranks wait for each other 60% of the time (the bubble); raise "
        "--gradient-accumulation-steps"
    )
    whole: Any = SimpleNamespace(model=object(), config=None)
    assert pipeline_lines(whole, unknown) == []
