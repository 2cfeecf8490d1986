"""What is kept or resumed: each key changes with every setting that moves what it is of, and with no other."""

import hashlib
import json
from contextlib import nullcontext
from dataclasses import Field, asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
import yaml

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.config import train_config
from expertmesh.training.config.moves import Moves
from expertmesh.training.config.train_config import TrainConfig, flags_of_config, parse_config, read_by
from expertmesh.training.data import sample_cache
from expertmesh.training.data.labels import LABELLED_ANSWERS
from expertmesh.training.data.pairs import PAIRS
from expertmesh.training.data.record_kinds import CONVERSATIONS, SPLIT_TURNS, RecordKind
from expertmesh.training.data.sample_cache import keys_of
from expertmesh.training.data.samples import Samples, hold_out, numbers_used
from expertmesh.training.data.sequences import Rows
from expertmesh.training.run.finished import Finished, _find, read_finished
from expertmesh.training.run.loop import data_order, order_facts
from expertmesh.training.start.fingerprints import Facts, exports_alike, recorded_config, reference_key, teacher_key
from expertmesh.training.start.inputs import added_tokens, data_options
from expertmesh.training.start.resume import check_data_order, compare_run

SETTINGS = fields(TrainConfig)
# fmt: off
BASES: list[dict[str, Any]] = [
    {}, {"global_batch_size": None}, {"adapter": "lora"}, {"task": "dpo"}, {"task": "kto"}, {"bf16": True},
    {"ep_size": 2}, {"tp_size": 2}, {"pp_size": 2}, {"ep_size": 2, "dispatch": "node"}, {"train_mtp": 0.1},
    {"gradient_checkpointing": "selective"}, {"optim": "shampoo"}, {"teacher": "t"}, {"eval_dataset": ["e"]},
    {"eval_ratio": 0.1, "early_stopping_patience": 1}, {"streaming": True, "max_steps": 5}, {"resume": "auto"},
    {"generate_steps": 1}, {"profile": ["1"]}, {"adapter": "lora", "add_tokens": ["t"]}, {"group_by_length": True},
    {"adapter": "lora", "merge": True}, {"eval_generate": ["q"]}, {"eval_generate": ["q"], "eval_dataset": ["e"]},
    {"add_tokens": ["t"], "eval_ratio": 0.5}, {"dataset": [], "max_steps": 0},
    {"dataset": [], "max_steps": 0, "images": True},
]
# fmt: on
"""Runs in some of which each setting has an effect."""
WITH: dict[str, dict[str, Any]] = {
    "per_device_train_batch_size": {"global_batch_size": None},  # else it makes other micro-batches of the same
    "eval_dataset": {"eval_dataset": ["e"]},  # a run that had none may begin to evaluate
    "seed": {"add_tokens": ["t"], "eval_ratio": 0.5},  # which begin with other rows, and other samples are held out
}
"""Those in which alone a setting moves what it declares."""
VALUES: dict[str, Any] = {
    "rope_scaling": "yarn:2", "prompt_template": "{prompt}", "pipeline_layers": "1,1", "lr_scheduler_type": "cosine",
    "max_shard_size": "1GB", "expert_kernel": "loop", "dispatch": "rank", "profile": ["5"], "profile_ranks": ["1"],
    "allow_changed": ["data"], "debug_ranks": [1], "lr_scheduler_kwargs": "{}", "optim": "muon", "task": "dpo",
    "template_date": "2026-01-02", "base_dtype": "nf4", "train_vision": ["tower"], "eval_score": "calls",
}  # fmt: skip
"""Of settings whose text has a form."""


def values_of(setting: Field[Any], value: Any) -> list[Any]:
    """What the setting may have instead."""
    if setting.name in VALUES:
        return [VALUES[setting.name]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, list):
        return [["another"]]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value + 0.25, value / 2]
    kinds = get_args(setting.type) or (setting.type,)
    choices = [choice for kind in kinds for choice in (get_args(kind) or (kind,)) if choice not in (type(None), value)]
    return [{int: 2, float: 2.0, str: "another"}.get(choice, choice) for choice in choices]


def runs_apart(setting: Field[Any]) -> tuple[TrainConfig, TrainConfig]:
    """Two runs that differ in this setting alone, which has an effect in both."""
    for base in BASES:
        # a global batch that does not follow from the layout
        one = TrainConfig(**{"model": "m", "dataset": ["d"], "global_batch_size": 8, **base})
        if not WITH.get(setting.name, {}).items() <= base.items():
            continue
        for value in values_of(setting, getattr(one, setting.name)):
            try:
                other = replace(one, **{setting.name: value})
            except (ExpertMeshError, TypeError):
                continue
            if all(needs.met(run) for needs in train_config.NEEDS[setting.name] for run in (one, other)):
                return one, other
    raise AssertionError(f"{setting.name}: no value and no run in which it has an effect")


def tokenizer_of(config: TrainConfig) -> Any:
    backend = SimpleNamespace(to_str=lambda: json.dumps([config.tokenizer, added_tokens(config)]))
    none: dict[str, Any] = {"bos_token": None, "eos_token": None, "bos_token_id": None, "eos_token_id": None}
    return SimpleNamespace(
        backend_tokenizer=backend,
        chat_template=config.chat_template,
        added_tokens_decoder={},
        all_special_ids=[],
        **none,
    )


def keys_in(config: TrainConfig) -> tuple[Facts, dict[str, Any]]:
    """(facts of a run where each place has its own content; its keys)."""
    tokenizer = tokenizer_of(config)
    places = ([config.dataset, config.dataset_split], [config.eval_dataset, config.eval_dataset_split])
    options = data_options(config)
    data = [keys_of(json.dumps([place, config.dataset_config]), options, tokenizer)[1] for place in places]
    facts: Facts = {"model": {"files": config.model}, "data": {"tokens": data[0]}}
    facts["data"]["mixed"] = str(numbers_used([9, 9], [1, 2], config.stopping_strategy == "all_exhausted"))
    if config.eval_ratio:
        records = cast(Samples, SimpleNamespace(records=torch.arange(99), select=str))
        facts["data"]["kept"] = cast(str, hold_out(records, config.eval_ratio, config.seed)[0])
    if config.has_evaluation_data:
        facts["evaluation data"] = {"tokens": data[1]}
    if config.teacher:
        facts["teacher"] = {"files": config.teacher}
    if config.init_adapter:
        facts["adapter"] = {"files": config.init_adapter}
    if config.add_tokens or config.resize_vocab:
        facts["tokens"] = {"digest": json.dumps([added_tokens(config), config.resize_vocab, config.tokenizer])}
    rows = cast(Rows, SimpleNamespace(lengths=torch.ones(10, dtype=torch.int64), __len__=lambda: 10))
    order = data_order(config, None, 4)
    keys = {
        "samples": facts["data"] | facts.get("evaluation data", {}),
        "batches": order_facts(config, rows, order),
        "reference": reference_key(config, facts),
        "teacher": teacher_key(config, facts),
    }
    return facts, keys


_COLUMNS = '{"prompt": "", "response": "", "messages": "", "text": "", "system": "", "weight": ""}'
_OPTIONS = (
    '{"max_seq_length": 64, "columns": %s, "prompt_template": "", "train_on": "assistant", "hub_config": null, '
    '"split": null, "num_workers": null, "sample_by": "line", "template_date": "", "truncation": "right", '
    '"pairs": %s, "labelled": %s, "split_turns": %s}'
)


@pytest.mark.parametrize(
    ("kind", "in_rows", "marks"),
    [
        (CONVERSATIONS, "false", ("false", "false", "false")),
        (PAIRS, "true", ("true", "false", "false")),
        (LABELLED_ANSWERS, '"labelled"', ("false", "true", "false")),
        (SPLIT_TURNS, '"split"', ("false", "false", "true")),
    ],
    ids=lambda value: value.name if isinstance(value, RecordKind) else "",
)
def test_what_earlier_releases_have_cached_is_found(kind: RecordKind, in_rows: str, marks: tuple[str, ...]) -> None:
    """The text that their keys are digests of, letter by letter."""
    config = TrainConfig(model="m", dataset=["d"], max_seq_length=64)
    found = keys_of("of the source", replace(data_options(config), kind=kind), tokenizer_of(config))
    rows_key = _sha256(f'[{sample_cache._VERSION}, "of the source", {_COLUMNS}, {in_rows}]')
    versions = ", ".join(f'"{version(name)}"' for name in ("transformers", "jinja2", "tokenizers"))
    of_tokenizer = f"[{json.dumps(tokenizer_of(config).backend_tokenizer.to_str())}, null, null, {versions}]"
    options = _OPTIONS % (_COLUMNS, *marks)
    assert found == (rows_key, _sha256(f'[{sample_cache._VERSION}, "{rows_key}", {options}, {of_tokenizer}, "", []]'))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def moves_key(setting: Field[Any], key: str) -> bool:
    """What the setting declares."""
    moves = train_config.MOVES[setting.name]
    of = {
        "samples": Moves.SAMPLES,
        "batches": Moves.BATCHES,
        "reference": Moves.MODEL | Moves.PRECISION | Moves.SAMPLES,
        "teacher": Moves.TEACHER | Moves.SAMPLES,
    }[key]
    has_it_too = key == "teacher" and Moves.PRECISION in moves and setting.name in read_by("teacher")
    return bool(moves & of) or has_it_too


def resumed(one: TrainConfig, other: TrainConfig) -> str:
    """What becomes of a checkpoint of one run in the other: "", or what is said."""
    (there, there_keys), (here, here_keys) = keys_in(one), keys_in(other)
    told: list[str] = []
    try:
        compare_run(Path("step-2"), there, asdict(one), other, here, told.append)
        check_data_order(there_keys["batches"], here_keys["batches"], other, Path("step-2"))
    except ExpertMeshError as error:
        told.append(str(error))
    return "".join(told)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_moves_what_it_declares(setting: Field[Any], tmp_path: Path) -> None:
    one, other = runs_apart(setting)
    moves = train_config.MOVES[setting.name]
    before, after = keys_in(one)[1], keys_in(other)[1]
    for key, value in before.items():
        assert (value != after[key]) == moves_key(setting, key), key
    assert exports_alike(asdict(one), other, tmp_path) == (Moves.EXPORT not in moves)

    said = resumed(one, other)
    asks = {Moves.MODEL: "model", Moves.SAMPLES: "data", Moves.OBJECTIVE: "objective"}
    asked = [name for moved, name in asks.items() if moved in moves]
    if Moves.STATE in moves or setting.name == "resize_vocab":
        assert "take the same" in said or "; use --" in said
    elif asked:
        assert any(f"resume anyway with --allow-changed {name}" in said for name in asked)
        assert "warning: resuming with a different" in resumed(one, replace(other, allow_changed=[*asks.values()]))
    else:
        assert bool(said) == (Moves.BATCHES in moves)

    # as flags and as a file have it
    content = {name: value for name, value in asdict(other).items() if value is not None}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    words = [] if other.init_adapter else [flags_of_config(other), ["--config", str(tmp_path / "run.yaml")]]
    for spelled in map(parse_config, words):
        assert keys_in(spelled) == keys_in(other)
        assert resumed(spelled, other) == ""


LORA: dict[str, Any] = {"adapter": "lora"}
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LORA | {"lora_targets": ["attention", "experts"]}, LORA | {"lora_targets": ["experts,attention"]}),
    (LORA | {"modules_to_save": ["lm_head", "norms"]}, LORA | {"modules_to_save": ["norms,lm_head"]}),
    (LORA, LORA | {"base_dtype": "float32"}),
    ({"freeze": ["experts", "router"]}, {"freeze": ["router,experts"]}),
    ({"rope_scaling": "linear:2"}, {"rope_scaling": "linear:2.0"}),
    ({"rope_scaling": "linear:2"}, {"rope_scaling": '{"factor": 2, "type": "linear"}'}),
    ({"add_tokens": ["a,b"]}, {"add_tokens": ["a", "b"]}),
    ({"add_tokens": ["a,b"]}, {"add_tokens": ["FILE"]}),
    ({"max_shard_size": "5GB"}, {"max_shard_size": "5000MB"}),
    ({}, {"preference_beta": 0.5, "teacher_weight": 0.5, "lora_rank": 4}),
    ({"learning_rate": 1e-4, "max_steps": 5}, {"learning_rate": 1e-5, "max_steps": 9, "ep_size": 2, "bf16": True}),
]
"""Settings that mean the same, or that a resumed run may have otherwise."""


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=str)
def test_no_key_depends_on_order_or_spelling(one: dict[str, Any], other: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text("a\nb\n")
    place = {"add_tokens": [str(tmp_path / "FILE")]} if other.get("add_tokens") == ["FILE"] else {}
    both = [TrainConfig(model="m", dataset=["d"], global_batch_size=8, **each) for each in (one, other | place)]
    assert resumed(*both) == ""
    if "bf16" not in other:
        assert keys_in(both[0]) == keys_in(both[1])
        assert exports_alike(asdict(both[0]), both[1], tmp_path)


def test_what_differs_is_told_by_name() -> None:
    plain: dict[str, Any] = {"model": "m", "dataset": ["d"]}
    dpo = TrainConfig(**plain, task="dpo")
    other = replace(dpo, preference_loss="ipo", preference_beta=0.5)
    said = "that run had --preference-loss sigmoid, --preference-beta 0.1, this one has --preference-loss ipo"
    assert said in resumed(dpo, other)
    begun, from_another, from_none = (
        TrainConfig(**plain, **LORA, init_adapter=path) for path in ("first", "second", "")
    )
    assert "is of another adapter (it began with first)" in resumed(begun, from_another)
    assert "is of another adapter (it began with first)" in resumed(begun, from_none)
    assert "is of another adapter (it began with none)" in resumed(from_none, begun)
    grown = TrainConfig(**plain, add_tokens=["a,b"])
    earlier: list[str] = []
    (of_tokens, _), saved = keys_in(grown), {"model": {"files": "m"}}
    compare_run(Path("step-2"), saved, asdict(grown), grown, of_tokens, earlier.append)
    assert "an earlier release saved no record of tokens" in earlier[0]
    assert "has other new tokens" in resumed(grown, replace(grown, add_tokens=["b,a"], allow_changed=["model"]))


def test_an_image_processor_is_compared() -> None:
    config = TrainConfig(model="m", dataset=["d"], images=True)
    facts, _ = keys_in(config)
    facts["data"]["images"] = "3: 0123"
    own, other = ({"image processor": {"image_mean:": mean}} for mean in ("[0.5]", "[0.0]"))
    told: list[str] = []
    with pytest.raises(ExpertMeshError, match=r"image processor \(it began with m's\): in that run: image_mean"):
        compare_run(Path("step-2"), facts | own, asdict(config), config, facts | other, told.append)
    compare_run(Path("step-2"), facts | own, asdict(config), config, facts | own, told.append)
    assert told == []
    allowed = replace(config, allow_changed=["data"])
    compare_run(Path("step-2"), facts | own, asdict(config), allowed, facts | other, told.append)
    assert told.pop().startswith("warning: resuming with a different image processor (--allow-changed): in that run:")
    compare_run(Path("step-2"), facts, asdict(config), config, facts | own, told.append)
    assert "an earlier release saved no record of image processor" in told.pop()


def test_an_earlier_release_recorded_one_micro_batch_where_nobody_gave_any(tmp_path: Path) -> None:
    config = TrainConfig(model="m", dataset=["d"], global_batch_size=8)
    assert recorded_config(asdict(config) | {"gradient_accumulation_steps": 1}, tmp_path) == config


def test_an_earlier_releases_choice_of_a_library_is_left_out(tmp_path: Path) -> None:
    """Of a resumed run; in its configuration file it is refused where it asked for what is not done."""
    config = TrainConfig(model="m", dataset=["d"])
    assert recorded_config(asdict(config) | {"cpu_matmul": "onednn"}, tmp_path) == config
    config.save(tmp_path / "config.yaml")
    plain = (tmp_path / "config.yaml").read_text()
    for value in ("auto", "blas", "onednn"):
        (tmp_path / "config.yaml").write_text(f"{plain}cpu_matmul: {value}\n")
        refused = nullcontext() if value != "onednn" else pytest.raises(ExpertMeshError, match="cpu_matmul: a CPU's")
        with refused:
            assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config


def test_a_finished_run_is_that_of_the_same_model_and_objective(tmp_path: Path) -> None:
    """Else the command does not say that nothing is left to do."""
    begun = TrainConfig(model="m", dataset=["d"], task="dpo", **LORA, init_adapter="first", resume="auto")
    facts, keys = keys_in(begun)
    (tmp_path / "adapter").mkdir()
    done = Finished(2, 2, "adapter has the weights", asdict(begun), facts, keys["batches"])

    def found(**changes: Any) -> str | None:
        config = replace(begun, **changes)
        now, keys = keys_in(config)
        return _find(done, config, tmp_path, 2, now, keys["batches"], lambda line: None)

    for alike in ({}, {"learning_rate": 0.5}, {"lora_targets": ["experts,attention"]}, {"eval_steps": 3}):
        assert str(found(**alike)).startswith("already finished at step 2")
    for changes, said in (
        ({"init_adapter": "second"}, "is of another adapter"),
        ({"preference_beta": 0.5}, "--preference-beta 0.1, this one has --preference-beta 0.5"),
        ({"lora_targets": ["experts"]}, "take the same"),
        ({"max_seq_length": 7}, "is of other data"),
        ({"adapter_format": "packed"}, "left no training checkpoint to resume from"),
    ):
        with pytest.raises(ExpertMeshError, match=said):
            found(**changes)


def test_a_damaged_record_of_a_finished_run_is_none(tmp_path: Path) -> None:
    """Whatever is another in it, be it well formed."""
    done = Finished(2, 2, "hf has the weights", asdict(TrainConfig(model="m")), {"model": {"files": "1"}}, {"seed": 0})
    done.write(tmp_path)
    assert read_finished(tmp_path) == done
    file = tmp_path / "finished.json"
    content = file.read_text()
    for there, damaged in (
        ('"step": 2', '"step": 3'),
        ('"files": "1"', '"files": "0"'),
        ("learning_rate", "learning_raTe"),
    ):
        assert there in content
        file.write_text(content.replace(there, damaged))
        assert read_finished(tmp_path) is None
    for other in ("[]", "{}", "", content[:-9]):
        file.write_text(other)
        assert read_finished(tmp_path) is None


def test_what_the_release_before_has_kept_is_still_known() -> None:
    """The keys that it gave: a setting that is added says whether it belongs to them at its default."""
    config = TrainConfig(model="m", dataset=["d"], task="dpo")
    assert reference_key(config, {}) == "9fbd696fd8b82124df608ebbd00194c3161edb0d7de4b35d088b69ee61a2eba6"
    config = TrainConfig(model="m", dataset=["d"], teacher="t")
    assert teacher_key(config, {}) == "e6ede03c208f6dbecd05c2a849f952c0600c68d2cc9a7ae47c897830ebd8aa03"
