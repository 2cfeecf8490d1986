"""Which layouts there are, and which of them a search dry-runs: here by a formula, in which nothing is run."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning import tables
from expertmesh.training.planning.imbalance import GivenRouting
from expertmesh.training.planning.memory import Memory
from expertmesh.training.planning.planner import search as of_search
from expertmesh.training.planning.planner.asked import MICRO_BATCHES, Asked, Tried
from expertmesh.training.planning.planner.clock import StepTime
from expertmesh.training.planning.planner.facts import Held
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.pipelines import one_stage
from expertmesh.training.planning.planner.search import (
    AT_ONCE,
    PIPELINES,
    ROUNDS,
    Estimate,
    Plan,
    Search,
    _is_larger,
    best_first,
    forecast,
    layouts,
    sequences_per_step,
)
from expertmesh.training.planning.tables import launch_line
from tests.sharding import planned
from tests.sharding.planned import H100, SLOWER, ByFormula, cluster_of, flags_of, mixtral_facts, tiny_forecasts
from tests.tiers import tiered
from tests.tiny import tiny_config

SAID: dict[str, Any] = tiny_config(
    num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, vocab_size=32000, num_attention_heads=32,
    num_key_value_heads=8,
).to_dict()  # fmt: skip
"""Mixtral 8x7B."""
WHATEVER = Tried(MICRO_BATCHES, pp_size=None, tp_sizes=None)


def base(**changes: Any) -> TrainConfig:
    settings = {"bf16": True, "max_seq_length": 4096, "global_batch_size": 256, "per_device_train_batch_size": 1}
    return flags_of(**{**settings, **changes})


def of(tried: Tried, world_size: int, per_node: int = 8, said: Any = SAID, **changes: Any) -> list[TrainConfig]:
    return layouts(mixtral_facts(said, base()), base(**changes), tried, world_size, per_node)


def search(tried: Tried, world_size: int, memory: float = H100.device.memory, **changes: Any) -> Search:
    forecasts, given = changes.pop("forecasts", ByFormula(SAID)), base(**changes)
    facts = forecasts.facts(given)
    found = layouts(facts, given, tried, world_size, 8)
    return Search(forecasts, facts, found, world_size, cluster_of(memory), GivenRouting(busiest=None))


def every_plan(searched: Search) -> list[Plan]:
    """All layouts, by the formula that the search asks for some of them alone."""
    found = forecast(ByFormula(SAID), [searched.asked(config) for config in searched.layouts])
    longer: dict[Any, float] = dict.fromkeys(("forward", "backward", "weights"), SLOWER)
    plans = (plan for plan in found if isinstance(plan, Plan))
    return best_first(plan if plan.pipeline is None else plan.if_longer(longer) for plan in plans)


@pytest.mark.parametrize("changes", [{}, {"adapter": "lora", "base_dtype": "nf4"}, {"cp_size": 2, "packing": True}])
def test_every_layout_has_a_launch_line_that_starts_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """One in 23 of them; also beside a file that says what they say, or other values."""
    file = tmp_path / "run.yaml"
    said = {"ep_size": 4, "per_device_train_batch_size": 2, "gradient_checkpointing": "full", "bf16": True}
    file.write_text(yaml.safe_dump(said))
    found = of(WHATEVER, 16, **changes)
    for config in found[::23]:
        launch_line(config, 16, 8)
        launch_line(config, 16, 8, said, str(file))
    monkeypatch.setattr(tables, "_ALWAYS", ("model", "dataset"))
    # as a file's values are to be overridden by those at their defaults, too
    with pytest.raises(AssertionError, match=r"differs in .*'ep_size'"):
        launch_line(of(Tried((1,), ep_size=1), 16, **changes)[0], 16, 8, {}, str(file))


def test_layouts_fill_the_ranks() -> None:
    """Each once: ep sizes divide ranks and experts, hybrid is where it differs from full, and steps are complete."""
    found = of(WHATEVER, 16)
    assert len({str(config) for config in found}) == len(found) > 200
    for config in found:
        stage = 16 // config.pp_size
        assert stage % config.ep_size == SAID["num_local_experts"] % config.ep_size == 0
        assert stage % config.ranks_per_sequence == 0
        assert config.dense_shard == "full" or (1 < config.ep_size < stage and config.ep_size % config.tp_size == 0)
        assert sequences_per_step(config, 16) == 256
        assert config.pp_size == 1 or config.pp_size <= config.micro_batches(16)
        assert config.pp_size * config.pipeline_chunks <= 32
    values = {
        name: {getattr(config, name) for config in found}
        for name in ("ep_size", "pp_size", "tp_size", "pipeline_schedule", "gradient_checkpointing", "dense_shard")
    }
    assert values == {
        "ep_size": {1, 2, 4, 8},
        "pp_size": {1, 2, 4, 8, 16},
        "tp_size": {1, 2, 4, 8},
        "pipeline_schedule": {None, "1f1b", "interleaved", "zero-bubble"},
        "gradient_checkpointing": {"none", "selective", "full"},
        "dense_shard": {"full", "hybrid"},
    }


def test_what_was_told_is_kept() -> None:
    any_of_one = replace(WHATEVER, micro_batches=(1,), tp_sizes=(1,))
    for told, name in (
        (replace(any_of_one, pp_size=2), "pp_size"),
        (replace(any_of_one, ep_size=4), "ep_size"),
        (replace(any_of_one, dense_shard="hybrid"), "dense_shard"),
        (replace(any_of_one, checkpointing="full"), "gradient_checkpointing"),
        (replace(any_of_one, pp_size=2, schedule="zero-bubble"), "pipeline_schedule"),
        (replace(any_of_one, pp_size=2, chunks=4), "pipeline_chunks"),
        (replace(any_of_one, tp_sizes=(4,)), "tp_size"),
        (replace(any_of_one, micro_batches=(4,)), "per_device_train_batch_size"),
    ):
        values = {getattr(config, name) for config in of(told, 16)}
        assert len(values) == 1, name


def test_tensor_parallelism_is_tried_with_one_sequence() -> None:
    """On a node's ranks, where no size was asked for; where one was, with as many as there are."""
    found = of(replace(WHATEVER, pp_size=1), 16)
    assert {config.per_device_train_batch_size for config in found if config.tp_size > 1} == {1}
    assert {config.tp_size for config in of(replace(WHATEVER, pp_size=1), 16, per_node=4)} == {1, 2, 4}
    assert {config.tp_size for config in of(replace(WHATEVER, micro_batches=(2,)), 16)} == {1}
    asked = of(replace(WHATEVER, tp_sizes=(1, 4)), 16)
    assert {config.per_device_train_batch_size for config in asked if config.tp_size == 4} == set(MICRO_BATCHES)


def test_no_queue_of_weight_gradients_that_are_not_computed() -> None:
    lora = base(adapter="lora")
    facts = mixtral_facts(SAID, lora)
    found = layouts(facts, lora, replace(WHATEVER, pp_size=2), 16, 8)
    assert {config.pipeline_schedule for config in found} == {"1f1b", "interleaved"}


def test_pipelines_have_layers_for_their_stages() -> None:
    """No more than are tried where nobody asked; what was asked for is left to be refused by name."""
    few = SAID | {"num_hidden_layers": 4}
    found = {(config.pp_size, config.pipeline_chunks) for config in of(WHATEVER, 16, said=few)}
    assert found == {(1, 1), (2, 1), (2, 2), (4, 1)}
    assert of(Tried((1,), pp_size=8, chunks=2), 16, said=few)


def test_layouts_whose_steps_are_filled_less_are_left_out() -> None:
    """12 sequences are 2 of 8 ranks' micro-batches of one, of which 4 are empty; with a pipeline of two none is."""
    found = of(Tried(MICRO_BATCHES, pp_size=None, ep_size=1), 8, global_batch_size=12)
    assert {sequences_per_step(config, 8) for config in found} == {12}
    assert 1 not in {config.pp_size for config in found}


def test_chunks_and_kept_products_where_they_apply() -> None:
    """Chunks are as many as a rank's experts at most; kept products and offloaded inputs are of checkpointed layers."""
    given: dict[str, Any] = {"overlap_chunks": 4, "keep_expert_products": 3, "gradient_checkpointing": "selective"}
    for config in of(Tried((1,)), 8, **given):
        assert config.overlap_chunks == {1: 1, 2: 4, 4: 2, 8: 1}[config.ep_size]
        assert config.keep_expert_products == (3 if config.gradient_checkpointing == "selective" else 0)
    for config in of(Tried((1,)), 8, offload_activations=True, gradient_checkpointing="full"):
        assert config.offload_activations == (config.gradient_checkpointing != "none")


QUESTIONS: dict[str, tuple[Tried, int, float, dict[str, Any]]] = {
    "one node": (Tried(MICRO_BATCHES), 8, 200 * 2**30, {}),
    "two nodes": (Tried(MICRO_BATCHES), 16, 79 * 2**30, {}),
    "eight nodes": (Tried(MICRO_BATCHES), 64, 79 * 2**30, {}),
    "pipelines": (Tried((1, 2), pp_size=None, ep_size=8, dense_shard="full"), 32, 79 * 2**30, {}),
    "tensor parallel": (Tried(MICRO_BATCHES, tp_sizes=None), 16, 79 * 2**30, {"max_seq_length": 16384}),
    "all of it": (replace(WHATEVER, micro_batches=(1, 4), chunks=1, checkpointing="full"), 64, 60 * 2**30, {}),
    "adapters": (Tried(MICRO_BATCHES), 4, 79 * 2**30, {"adapter": "lora"}),
    "shared rows": (Tried(MICRO_BATCHES), 32, 79 * 2**30, {"cp_size": 4, "max_seq_length": 65536}),
}


@pytest.mark.parametrize("question", tiered([q for q in QUESTIONS if q != "all of it"], slow=["all of it"]))
def test_the_best_is_found_by_few_dry_runs(question: str) -> None:
    """Nearly as fast as the fastest of all, whose formula the search's estimates do not know."""
    tried, world_size, memory, changes = QUESTIONS[question]
    searched = search(tried, world_size, memory, **changes)
    found, best = searched.run()[0], every_plan(searched)[0]
    assert found.fits == best.fits is True
    assert found.tokens_per_second >= 0.97 * best.tokens_per_second
    run = {json.dumps(vars(one_stage(searched.asked(plan.config)).config), default=str) for plan in searched.plans}
    assert len(run) <= 2 * 3 + (ROUNDS + PIPELINES) * AT_ONCE
    assert len(searched.plans) < len(searched.layouts)
    assert found == best_first(searched.plans)[0]


def test_ranks_of_the_best_pipeline_are_dry_run() -> None:
    """Its memory is that of the rank that holds the most. The time of other pipelines grows as its own does."""
    searched = search(Tried((1,), pp_size=4, ep_size=8, checkpointing="none"), 64)
    best, *others = searched.run()
    assert not best.is_estimate
    assert best.pipeline is not None
    accounts = [searched.forecasts.account(asked) for asked in best.pipeline.rehearsed()]
    assert best.account.memory == max((account.memory for account in accounts), key=lambda memory: memory.peak)
    assert best.account.rank in [asked.rank for asked in best.pipeline.rehearsed()]
    estimated = [other for other in others if other.is_estimate]
    assert estimated
    for plan in (best, *estimated):
        (before,) = forecast(ByFormula(SAID), [searched.asked(replace(plan.config, pipeline_layers=None))])
        assert isinstance(before, Plan)
        update = before.account.time.update
        assert plan.seconds - update == pytest.approx(SLOWER * (before.seconds - update), rel=0.01)
        assert (plan.memory == before.memory) == plan.is_estimate


@pytest.mark.slow
def test_a_pipeline_that_is_slower_than_it_seemed_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of which a rank needs more than there is, or that fails."""
    tried = replace(WHATEVER, tp_sizes=(1,), checkpointing="none", ep_size=8)
    best = search(tried, 64, global_batch_size=512).run()[0]
    assert best.config.pp_size > 1
    for name in ("SLOWER", "FULLER"):
        with monkeypatch.context() as patched:
            patched.setattr(planned, name, 3.0)
            assert search(tried, 64, global_batch_size=512).run()[0].config.pp_size == 1
    fails = ByFormula(SAID, lambda asked: "fails" if asked.config.pp_size > 1 else None)
    assert search(tried, 64, global_batch_size=512, forecasts=fails).run()[0].config.pp_size == 1


def test_where_nothing_fits_the_smallest_is_found() -> None:
    searched = search(Tried(MICRO_BATCHES), 8, 30 * 2**30)
    found, least = searched.run()[0], every_plan(searched)[0]
    assert found.fits == least.fits is False
    assert found.memory.total == pytest.approx(least.memory.total, rel=0.01)


def test_a_search_ends_where_all_were_tried() -> None:
    searched = search(Tried((1,), ep_size=8, checkpointing="none"), 8, 200 * 2**30)
    assert len(searched.layouts) == 1
    assert [plan.config for plan in searched.run()] == list(searched.layouts)


def test_larger_micro_batches_of_what_does_not_fit_are_left_out() -> None:
    searched = search(Tried(MICRO_BATCHES, ep_size=8, checkpointing="none"), 16, 60 * 2**30)
    searched.run()
    sizes = sorted(plan.config.per_device_train_batch_size for plan in searched.plans if not plan.fits)
    first = min(sizes)
    assert not [plan for plan in searched.plans if plan.config.per_device_train_batch_size > first]
    over = next(plan for plan in searched.plans if not plan.fits)
    gone = {each.per_device_train_batch_size for each in searched.layouts if _is_larger(each, over.config)}
    assert gone == {size for size in MICRO_BATCHES if size > over.config.per_device_train_batch_size}


@pytest.mark.slow
def test_one_micro_batch_may_fit_where_two_halves_of_it_are_tight() -> None:
    """It has no gradients yet where it has all activations: by dry runs, which an estimate is to know."""
    config = flags_of(ep_size=2, gradient_checkpointing="none", global_batch_size=8, bf16=True, max_seq_length=512)
    halves, single = (replace(config, per_device_train_batch_size=size) for size in (1, 2))
    forecasts = tiny_forecasts({"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512}, "cuda")
    searched = Search(forecasts, forecasts.facts(config), [halves, single], 4, cluster_of())
    searched._try([halves], [halves, single])
    estimate = Estimate.of(searched, single).memory
    (real,) = forecast(forecasts, [searched.asked(single)])
    assert isinstance(real, Plan)
    slack = real.memory.slack
    assert estimate - slack == pytest.approx(real.memory.total - slack, rel=0.1)


def test_layouts_beside_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that differ in both sizes where they are estimated to be fast enough."""
    searched = search(Tried((1, 2, 4), checkpointing="full", dense_shard="full"), 16)
    searched.plans = [plan for plan in every_plan(searched) if (plan.config.ep_size, plan.tokens) == (4, 2 * 4096)]
    found = {}
    for nearly in (0.0, 100.0):
        monkeypatch.setattr(of_search, "NEARLY", nearly)
        beside = searched._beside_the_best(searched.layouts)
        found[nearly] = {(config.ep_size, config.per_device_train_batch_size) for config in beside}
    assert found[100.0] == {(2, 2), (8, 2), (4, 1), (4, 4)}
    assert found[0.0] - found[100.0] == {(2, 1), (2, 4), (8, 1), (8, 4)}


def test_products_are_kept_in_as_many_layers_as_fit() -> None:
    """Of the best layout, where it recomputes selectively and nobody said in how many."""

    def best(checkpointing: Checkpointing, memory: float, keeps_products: bool = True) -> tuple[Search, Plan]:
        searched = search(Tried((2,), ep_size=8, dense_shard="full", checkpointing=checkpointing), 16, memory)
        searched.keeps_products = keeps_products
        (plan,) = searched.run()
        return searched, plan

    _, plain = best("selective", 2.0**40, keeps_products=False)
    kept, layers = [], int(SAID["num_hidden_layers"])
    for room in (0.0, 2.0**30, 2.0**32, 2.0**40):
        searched, plan = best("selective", plain.memory.total + room)
        kept.append(plan.config.keep_expert_products)
        more = replace(plan.config, keep_expert_products=kept[-1] + 1)
        (fuller,) = forecast(searched.forecasts, [searched.asked(more)])
        assert isinstance(fuller, Plan)
        assert plan.fits
        assert kept[-1] == layers or not fuller.fits
        assert kept[-1] == 0 or plan.tokens_per_second > plain.tokens_per_second
    assert kept == sorted({*kept})
    assert (kept[0], kept[-1]) == (0, layers)
    assert best("full", 2.0**40)[1].config.keep_expert_products == plain.config.keep_expert_products == 0


def refusing(*tp_sizes: int, said: str) -> ByFormula:
    return ByFormula(SAID, lambda asked: said if asked.config.tp_size in tp_sizes else None)


def test_a_tensor_parallel_size_that_is_refused() -> None:
    """What a size does not divide its multiples do not either; the others are planned, whichever was first."""
    of_sizes = Tried((1,), tp_sizes=(1, 2, 4))
    forecasts = refusing(2, 4, said="--tp-size 2 does not divide the heads")
    searched = search(of_sizes, 16, forecasts=forecasts)
    left = list(searched.layouts)
    searched._try([config for config in left if config.tp_size == 2][:1], left)
    assert {config.tp_size for config in left} == {1}
    for said in ("no bf16", "--tp-size 1 is too small"):
        forecasts = refusing(1, said=said)
        searched = search(replace(of_sizes, tp_sizes=(1, 2)), 16, forecasts=forecasts)
        if "--tp-size" in said:
            # whose multiples all sizes are
            with pytest.raises(ExpertMeshError, match=said):
                searched.run()
        else:
            assert {plan.config.tp_size for plan in searched.run()} == {2}
        assert str(searched.refused[1]) == said


def test_what_is_refused_in_every_layout_says_why_once() -> None:
    forecasts = refusing(1, 2, 4, 8, said="no bf16")
    with pytest.raises(ExpertMeshError, match="no bf16"):
        search(replace(WHATEVER, pp_size=1), 16, forecasts=forecasts).run()
    asked = [question.config.tp_size for question in forecasts.questions]
    assert all(asked.count(size) <= 3 for size in (1, 2, 4, 8)), "one of each way to recompute"


def test_one_question_is_asked_once() -> None:
    """Pipelines that differ in schedule or chunks have the same step of all layers."""
    forecasts = ByFormula(SAID)
    pipelines = of(Tried((1,), pp_size=2, ep_size=8, checkpointing="full"), 16)
    assert len(pipelines) > 2
    (asked, *others) = (Asked(config, 16, cluster_of()) for config in pipelines)
    given: list[int] = []

    class Counting(ByFormula):
        def accounts(self, several: Any) -> Any:
            given.append(len(several))
            return super().accounts(several)

    found = forecast(Counting(SAID), [asked, *others])
    assert given == [1]
    assert found == [forecast(forecasts, [each])[0] for each in (asked, *others)]


@pytest.mark.parametrize(
    "tried", [Tried(MICRO_BATCHES), Tried((1, 2, 16), pp_size=4, chunks=2, ep_size=2)], ids=["", "pipelines"]
)
def test_estimates_are_of_the_nearest_that_was_tried(tried: Tried) -> None:
    """Of itself it is nearly exact; and each that is tried makes those like it closer."""
    searched = search(tried, 16, 200 * 2**30)
    plans = every_plan(searched)

    def errors(tried: list[Plan]) -> list[float]:
        searched.plans = tried
        estimates = [Estimate.of(searched, plan.config) for plan in plans]
        return [
            abs(each.speed / plan.tokens_per_second - 1) + abs(each.memory / plan.memory.total - 1)
            for each, plan in zip(estimates, plans, strict=True)
        ]

    assert max(errors(plans)) < 0.01
    few = errors([plan for plan in plans if plan.config.per_device_train_batch_size == 1][:3])
    more = errors([plan for plan in plans if plan.config.per_device_train_batch_size in (1, 16)])
    assert sum(more) < 0.5 * sum(few)


def a_plan(**changes: Any) -> Plan:
    config = base(**{"ep_size": 8, **changes})
    (found,) = forecast(ByFormula(SAID), [Asked(config, 16, cluster_of())])
    assert isinstance(found, Plan)
    return found


def test_a_plans_figures() -> None:
    plan = a_plan()
    assert plan.tokens == 4096
    assert a_plan(cp_size=2).tokens == a_plan(tp_size=2).tokens == 2048
    assert a_plan(task="dpo").tokens == 2 * 4096
    # 256 sequences of 16 ranks
    assert plan.account.forwards == 16
    assert plan.tokens_per_second == pytest.approx(16 * 4096 / plan.seconds)
    assert plan.share_of_peak == pytest.approx(plan.account.needed / plan.seconds / 989e12)
    of_all = plan.inside + plan.between
    assert of_all == pytest.approx(sum(each.total for each in plan.account.sent))
    assert plan.memory.total == pytest.approx(plan.fit.total)
    assert plan.fits == (plan.fit.total <= H100.device.memory)
    stages = a_plan(pp_size=2)
    assert stages.tokens_per_second == pytest.approx(32 * 4096 / stages.seconds / 2)
    assert stages.config.pipeline_layers == stages.account.stages


def test_what_is_in_host_memory_takes_none_of_the_card() -> None:
    here, there = a_plan(), a_plan(offload=True)
    assert here.fit.host == 0
    assert there.fit.host == here.memory.lasting > 0
    assert there.memory.lasting == 0
    assert there.memory.total == pytest.approx(here.memory.total - here.memory.lasting, abs=4096)
    assert there.memory.total == pytest.approx(there.fit.total)


def test_a_plan_as_json() -> None:
    plan = a_plan(pp_size=2, gradient_checkpointing="full")
    told = json.loads(json.dumps(plan.as_json()))
    assert told["memory"].keys() == {field.name for field in fields(Memory)} | {"total"}
    assert told["memory"]["total"] == pytest.approx(
        sum(n for name, n in told["memory"].items() if name != "total"), abs=9
    )
    seconds = {field.name for field in fields(StepTime)}
    assert told["seconds"].keys() == seconds | {"total"}
    assert sum(each["bytes"] for each in told["bytes_a_step"].values()) == pytest.approx(plan.inside + plan.between)
    assert (told["pp"], told["dp"], told["ep"], told["stage_layers"]) == (2, 1, 8, [16, 16])
    assert told["fits"] == plan.fits


def test_the_best_first() -> None:
    plans = [replace(a_plan(ep_size=ep), cluster=cluster_of(memory)) for ep in (2, 4, 8) for memory in (1e12, 1e9)]
    ranked = best_first(plans)
    assert [plan.fits for plan in ranked] == [True] * 3 + [False] * 3
    assert ranked[:3] == sorted(ranked[:3], key=lambda plan: -plan.tokens_per_second)
    assert ranked[3:] == sorted(ranked[3:], key=lambda plan: plan.memory.total)


def test_facts_add_up() -> None:
    facts = mixtral_facts(SAID, base())
    assert facts.dense.stored + facts.experts.stored == pytest.approx(4 * facts.counts.total)
    tied = replace(facts, is_tied=True)
    assert facts.dense == tied.dense + facts.last
    assert Held(1, 2, 3, 4.0).lasting == 8
    assert isinstance(ByFormula(SAID), Forecasts)
