"""Short models: what their dry runs tell of all layers, against a dry run of all layers."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from expertmesh.moe.experts.model_layers import decoder_layers
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.planning.imbalance import EVEN, GivenRouting
from expertmesh.training.planning.planner.account import Account
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from expertmesh.training.planning.rehearsal.engine import account_of, rehearsed_facts
from expertmesh.training.planning.rehearsal.layer_kinds import kinds_of_layers
from expertmesh.training.planning.rehearsal.short import Repeats, Short, runs_of
from tests.families.configs import tiny_config
from tests.images import image_config
from tests.tiers import tiered
from tests.tiny import tiny_config as tiny_mixtral
from tests.training.dry_runs import CLUSTER, SETTINGS, flags_of

RUNS: dict[str, tuple[Sequence[Any], list[Repeats]]] = {
    "all alike": ("A" * 32, [Repeats(0, 1, 32)]),
    "dense first": ("DDD" + "A" * 58, [Repeats(0, 1, 3), Repeats(3, 1, 58)]),
    "every second one": ("AB" * 18, [Repeats(0, 2, 18)]),
    "three and one": ("AAAB" * 12, [Repeats(0, 4, 12)]),
    "five and one": ("AAAAAB" * 5, [Repeats(0, 6, 5)]),
    "one before a period": ("D" + "ABB" * 4, [Repeats(0, 1, 1), Repeats(1, 3, 4)]),
    "a period and a rest": ("AAAB" * 3 + "AA", [Repeats(0, 4, 3, 2)]),
    "others at both ends": ("D" + "BBCB" * 6 + "BC", [Repeats(0, 1, 1), Repeats(1, 4, 6, 1), Repeats(26, 1, 1)]),
    "no two alike": ("ABCDE", [Repeats(n, 1, 1) for n in range(5)]),
    "none": ("", []),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_layers(name: str) -> None:
    kinds, runs = RUNS[name]
    assert runs_of(list(kinds)) == runs
    assert runs_of(list(kinds), 7) == [replace(run, start=run.start + 7) for run in runs]


@pytest.mark.parametrize("name", RUNS)
def test_a_short_model_has_the_first_and_the_last_of_each_run(name: str) -> None:
    kinds = RUNS[name][0]
    complete = Short.complete(list(kinds))
    assert complete.layers == list(range(len(kinds)))
    base = complete.shortest
    of_runs = [
        [layer for layer in base.layers if run.start <= layer < run.stop][i] for run in base.runs for i in (0, -1)
    ]
    assert of_runs == [layer for run in base.runs for layer in (run.start, run.stop - 1)]
    # each kind has its layers, and each layer that is left out is in a repeat that one longer model has once more
    assert {kinds[layer] for layer in base.layers} == set(kinds)
    longer = base.longer
    added = sum((len(each.layers) - len(base.layers)) * times for each, times in longer)
    assert len(base.layers) + added == len(kinds)
    for short in (base, *(each for each, _ in longer)):
        told = [kinds[layer] for layer in short.layers]
        assert len(told) == len(short.names)
        for kind, names in zip(told, short.names, strict=True):
            assert {kinds[layer] for layer in names} <= {kind}
    # what base and longer models name is the same: moments are compared by it
    assert all(
        {n for names in each.names for n in names} == {n for names in base.names for n in names} for each, _ in longer
    )


def test_of_a_long_block_the_shortest_model_has_one() -> None:
    """Half of it from either end: each layer has the neighbours that it has in the complete model."""
    base = Short.complete("AAAAAB" * 5).shortest
    assert base.layers == [0, 1, 2, 27, 28, 29]
    assert base.names == [(n,) for n in base.layers]
    ((longer, times),) = base.longer
    assert (longer.layers, times) == ([0, 1, 2, 3, 4, 5, 24, 25, 26, 27, 28, 29], 4)


def test_runs_are_kept_where_models_of_them_would_take_more_layers() -> None:
    """Of three layers of a run of four, for which all others would be run once more."""
    kinds = "A" * 4 + "BC" * 20
    base = Short.complete(kinds).shortest
    assert base.layers == [0, 1, 2, 3, 4, 5, 42, 43]
    assert (len(base.longer), base.run) == (1, 8 + 10)


def test_stages_keep_layers_of_their_own() -> None:
    """Runs end with their stage; of other ranks' stages a repeat is kept, and none added."""
    complete = Short.complete([0] * 12, (7, 5), [1])
    assert complete.runs == (Repeats(0, 1, 7), Repeats(7, 1, 5))
    base = complete.shortest
    assert (base.layers, base.layers_of_stages) == ([0, 7, 8, 11], [1, 3])
    ((longer, times),) = base.longer
    assert (longer.layers, longer.layers_of_stages, times) == ([0, 7, 8, 10, 11], [1, 4], 2)
    assert [each.number for each in (complete, base, longer)] == [5, 3, 4]
    of_all = Short.complete([0] * 80, (50, 30))
    assert (of_all.number, of_all.shortest.layers_of_stages) == (80, [3, 3])


def deep(family: str) -> Any:
    """The tiny config with its layers four times."""
    config = tiny_config(family)
    text = config.get_text_config()
    number = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == number:
            setattr(text, name, type(value)(value) * 4)
    text.num_hidden_layers = number * 4
    return config


def both(
    model_config: Any, world_size: int, rank: int = 0, routing: GivenRouting = EVEN, **flags: Any
) -> tuple[Account, Account]:
    """What short models tell, and all layers."""
    config = flags_of(**flags)
    facts = rehearsed_facts(config, model_config, "cuda")
    asked = Asked(config, world_size, CLUSTER, rank, routing)
    told, run = (account_of(asked, model_config, facts, every_layer) for every_layer in (False, True))
    assert told.run < run.run == run.layers[0]
    return told, run


def check(told: Account, run: Account, at_layers: float = 1e-3) -> None:
    assert told.layers == run.layers
    assert told.stages == run.stages
    assert told.memory.peak == pytest.approx(run.memory.peak, rel=1e-3)
    assert told.memory.when == run.memory.when
    for name in ("parameters", "trained", "state"):
        assert getattr(told.memory, name) == getattr(run.memory, name), name
    assert told.in_host == run.in_host
    assert told.communicators == run.communicators
    assert told.sent == run.sent
    assert told.parts.keys() == run.parts.keys()
    for name, part in told.parts.items():
        for figure in ("flops", "recomputed", "sent"):
            assert getattr(part, figure) == pytest.approx(getattr(run.parts[name], figure), rel=1e-9), (name, figure)
    assert told.needed == pytest.approx(run.needed, rel=1e-9)
    assert (told.host_waits, told.update_operators) == (run.host_waits, run.update_operators)
    at = {(phase, micro, layer): most for phase, micro, layer, most in run.at}
    for *where, most in told.at:
        assert most == pytest.approx(at[tuple(where)], rel=at_layers), where  # type: ignore[index]
    assert [each.phase for each in told.moments] == [each.phase for each in run.moments]


LINES = [name for name, (_, _, flags) in SETTINGS.items() if "pp_size" not in flags]
ENDS = ("1,024 ranks", "shared experts, dense first layers, MLA")
"""Settings in which streams and host are ahead of one another by more layers than short models have."""
QUICK = ("kept casts",)
IRREGULAR = {
    # an attention of another kind from layer to layer, which begins anew with each copy of the tiny model
    "biases, windows, sinks": (
        ("full_attention", "sliding_attention"),
        ("full_attention", "full_attention", *("sliding_attention",) * 2, "full_attention"),
    ),
    "DeltaNet": (("linear_attention", "full_attention"), (*("linear_attention",) * 3, "full_attention")),
}
"""Periods, of two layers and of more."""


def lines() -> list[Any]:
    with_blocks = {name for name in LINES if name not in ("Mamba", "sinks in fp32, divided", *IRREGULAR)}
    marks = [pytest.mark.slow, pytest.mark.sample(3)]
    return [pytest.param(name, marks=[] if name in QUICK else marks) for name in LINES if name in with_blocks]


@pytest.mark.parametrize("name", lines())
def test_figures_of_all_layers_are_told_by_short_models(name: str) -> None:
    family, world_size, flags = SETTINGS[name]
    told, run = both(deep(family), world_size, **flags)
    check(told, run)
    assert told.total.moved == pytest.approx(run.total.moved, rel=1e-9)
    assert told.total.kernels == pytest.approx(run.total.kernels, rel=1e-9)
    total = run.time.total
    assert told.time.total == pytest.approx(total, rel=1e-6)
    for term, seconds in asdict(run.time).items():
        depends_on_ends = name in ENDS and term in ("exposed", "launching", "update")
        assert getattr(told.time, term) == pytest.approx(seconds, abs=(0.03 if depends_on_ends else 1e-6) * total), term


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [{"cp_size": 2}, {"mtp_detach": False, "pp_size": 2, "pipeline_layers": "12,13", "gradient_accumulation_steps": 4}],
    ids=str,
)
def test_figures_of_a_model_that_drafts(flags: dict[str, Any]) -> None:
    """Its layer for multi-token prediction is like no other, and stays."""
    told, run = both(
        *(tiny_config("deepseek_v3", num_hidden_layers=24), 8, 4 if "pp_size" in flags else 0),
        **{"ep_size": 2, "train_mtp": 0.3, **flags},
    )
    assert told.layers[1] == 25
    check(told, run)


SEEING: dict[str, Any] = {"images": True, "adapter": "lora", "base_dtype": "nf4", "max_seq_length": 64}


def test_layers_with_image_features_are_of_a_kind_of_their_own() -> None:
    """DeepStack adds them to the results of the first two layers, of which one is dense."""
    model = build_rehearsed(flags_of(images=True), image_config("qwen3_vl_moe"), "cuda")
    assert kinds_of_layers(model) == [0, 1, 2, 2]


@pytest.mark.slow
def test_figures_of_layers_with_image_features_are_told_by_short_models() -> None:
    told, run = both(
        *(image_config("qwen3_vl_moe", num_hidden_layers=13), 1, 0, GivenRouting(samples=1, image_tokens=6)),
        **SEEING,
        gradient_checkpointing="selective",
    )
    check(told, run)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "period"), [(name, period) for name in IRREGULAR for period in IRREGULAR[name]])
def test_figures_of_a_hybrid_are_told_by_few_periods(name: str, period: Sequence[str]) -> None:
    family, world_size, flags = SETTINGS[name]
    config = tiny_config(family)
    config.layer_types = (list(period) * 8)[: 16 if len(period) == 2 else 22]
    config.num_hidden_layers = len(config.layer_types)
    told, run = both(config, world_size, **flags)
    check(told, run)
    assert told.time.total == pytest.approx(run.time.total, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "stages", "rank"),
    tiered(
        slow=[("1f1b", "5,9", 4), ("zero-bubble", "9,6", 0)],
        release=[("1f1b", "9,6", 0), ("interleaved", "4,12,4,12", 4)],
    ),
)
def test_figures_of_a_stage_are_told_by_short_stages(name: str, stages: str, rank: int) -> None:
    """Other stages, of which a rank holds nothing, are as short as can be."""
    family, world_size, flags = SETTINGS[name]
    number = sum(map(int, stages.split(",")))
    config = tiny_config(family, num_hidden_layers=number)
    told, run = both(config, world_size, rank, **flags, pipeline_layers=stages)
    check(told, run)
    assert told.total.kernels == run.total.kernels
    # each stage counts what all layers routed
    assert told.total.moved == pytest.approx(run.total.moved, rel=1e-3)
    # of a pipeline's time its timetable tells
    assert told.time.total == pytest.approx(run.time.total, rel=5e-3)
    assert told.actions == pytest.approx(run.actions, rel=2e-2)


@pytest.mark.parametrize(
    ("family", "flags"),
    tiered(
        slow=[
            ("deepseek_v3", {"optim": "muon", "reshard_after_forward": False, "router_bias_update_rate": 1e-3}),
            ("qwen3_moe", {"optim": "shampoo", "cp_size": 2, "tp_size": 2, "gradient_checkpointing": "full"}),
        ],
        release=[
            ("mixtral", {"optim": "muon", "gradient_accumulation_steps": 2}),
            ("mixtral", {"optim": "shampoo"}),
        ],
    ),
    ids=str,
)
def test_updates_of_matrices_are_those_of_all_layers(family: str, flags: dict[str, Any]) -> None:
    """A layer more is another matrix in a stack of a size of its own, or of another rank: no straight line."""
    told, run = both(deep(family), 8, ep_size=4, **flags)
    check(told, run, at_layers=1e-9)
    for name, part in told.parts.items():
        assert asdict(part) == pytest.approx(asdict(run.parts[name]), rel=1e-9), name
    assert asdict(told.time) == pytest.approx(asdict(run.time), rel=1e-9)


@pytest.mark.slow
def test_updates_of_many_experts_are_launched_together() -> None:
    """Of 32 experts as of 128, where they fit into one stack."""
    calls = []
    for experts in (32, 128):
        config, model_config = flags_of(ep_size=8, optim="muon"), tiny_config("qwen3_moe", num_experts=experts)
        facts = rehearsed_facts(config, model_config, "cuda")
        calls.append(account_of(Asked(config, 8, CLUSTER), model_config, facts).update_operators)
    assert calls[0] == calls[1] < 1000


@pytest.mark.slow
def test_layers_whose_heads_differ_are_of_two_kinds() -> None:
    """A config with heads that differ by layer refuses to be asked for them without one."""
    model_config = tiny_config("gemma4_text", num_global_key_value_heads=1, attention_k_eq_v=True)
    assert model_config.is_heterogeneous
    facts = rehearsed_facts(flags_of(), model_config, "cuda")
    # in transformers 5.17 both layers with full attention differ
    assert 2 <= len(facts.kinds) <= model_config.num_hidden_layers


@pytest.mark.parametrize(("takers", "kinds"), [(0, [0, 1] * 3), (2, [0, 1, 2, 3, 4, 5])])
def test_layers_that_hand_on_what_none_takes_are_like_others(takers: int, kinds: list[int]) -> None:
    """Gemma 4 says of the last layer of each type that it hands its keys and values on, also where none takes them."""
    types = ["sliding_attention", "full_attention"] * 3
    changes = {"layer_types": types, "per_layer_config": {layer: {"head_dim": 32} for layer in (1, 3, 5)}}
    config = tiny_config("gemma4_text", num_hidden_layers=6, num_kv_shared_layers=takers, **changes)
    assert kinds_of_layers(build_rehearsed(flags_of(), config, "cuda")) == kinds


def test_what_cannot_be_computed_is_refused() -> None:
    """As many elements as `grouped_mm` cannot count."""
    config, model_config = flags_of(max_seq_length=2**26), tiny_mixtral()
    facts = rehearsed_facts(config, model_config, "cuda")
    with pytest.raises(ExpertMeshError, match="2\\^31 elements"):
        account_of(Asked(config, 1, CLUSTER), model_config, facts)


KEPT = [0, 3, 5]


@pytest.mark.parametrize("pp_size", [1, 2])
def test_layers_that_are_kept_are_numbered_anew(pp_size: int) -> None:
    """In what they hold, by which attention finds its cache, and in lists of the config, which stays as it is for who
    gave it; in their names only for a pipeline, whose stages are cut by them."""
    model_config = tiny_config("gpt_oss", num_hidden_layers=6, layer_types=["full_attention", "sliding_attention"] * 3)
    model = build_rehearsed(flags_of(pp_size=pp_size), model_config, "cuda", KEPT)
    layers: Any = decoder_layers(model)
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2]
    assert model.config.num_hidden_layers == 3
    kept_types = [model_config.layer_types[n] for n in KEPT]
    assert model.config.layer_types == kept_types
    assert model_config.num_hidden_layers == len(model_config.layer_types) == 6
    assert [name for name, _ in layers.named_children()] == [str(n) for n in (KEPT if pp_size == 1 else range(3))]


@pytest.mark.parametrize(("pattern", "frozen"), [(r"layers\.3\.", {3}), ("router", set(KEPT))])
def test_patterns_by_a_layers_number_find_what_they_find_in_the_complete_model(pattern: str, frozen: set[int]) -> None:
    model, complete = (
        build_rehearsed(flags_of(freeze=[pattern]), tiny_mixtral(num_hidden_layers=6), "cuda", keep)
        for keep in (KEPT, None)
    )
    untrained = {name for name, p in complete.named_parameters() if not p.requires_grad}
    own = dict(model.named_parameters())
    assert {name for name, p in own.items() if not p.requires_grad} == untrained & own.keys()
    assert {n for n in KEPT if any(f"layers.{n}." in name for name in untrained)} == frozen


@pytest.mark.parametrize(
    "flags", tiered(slow=[{"pp_size": 2, "pipeline_layers": "16,16"}], release=[{}]), ids=["pipeline", "alone"]
)
def test_a_layer_that_is_frozen_by_its_number(flags: dict[str, Any]) -> None:
    """It is of another kind than those beside it, and stays."""
    told, run = both(tiny_mixtral(num_hidden_layers=32), 8, ep_size=2, freeze=[r"layers\.2\."], **flags)
    check(told, run)
