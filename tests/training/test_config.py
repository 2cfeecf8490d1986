"""Flags, YAML, and what wins."""

import itertools
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_utils import SchedulerType

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import flag_of
from expertmesh.moe.util.sizes import parse_size
from expertmesh.training.config.flags import LIMITS, group_of, value_type
from expertmesh.training.config.optimizers import OUR_OPTIMIZERS
from expertmesh.training.config.settings import SCHEDULES
from expertmesh.training.config.train_config import (
    NEEDS,
    TrainConfig,
    as_flag,
    flags_of_config,
    make_config,
    parse_config,
)
from expertmesh.training.optim.schedule import scheduler_arguments
from tests.flags import last_of_each

NEEDED = ["--model", "m", "--dataset", "d"]


GROUPS = (
    "Model", "Data", "Preference training", "Distillation", "Parallelism", "Memory", "Precision and kernels",
    "Batch and schedule", "Optimizer", "MoE routing", "Multi-token prediction", "LoRA and freezing", "Evaluation",
    "Checkpoints and export", "Logging and profiling", "Debugging",
)  # fmt: skip


def help_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    return capsys.readouterr().out


def of_yaml(tmp_path: Path, text: str, *flags: str) -> TrainConfig:
    (tmp_path / "run.yaml").write_text(text)
    return parse_config([*NEEDED, "--config", str(tmp_path / "run.yaml"), *flags])


@pytest.mark.parametrize(
    ("text", "flags", "name", "value"),
    [
        ("", ["--packing", "wrapped"], "packing", "wrapped"),
        ("packing: wrapped", [], "packing", "wrapped"),
        ("packing: wrapped", ["--packing"], "packing", True),
        ("packing: true", [], "packing", True),
        # both spellings
        ("", ["--learning-rate", "0.5"], "learning_rate", 0.5),
        ("", ["--learning_rate=0.5"], "learning_rate", 0.5),
        ("", ["--prompt_template={prompt} a_b"], "prompt_template", "{prompt} a_b"),
        ("", ["--prompt-template", "--what_is {prompt}"], "prompt_template", "--what_is {prompt}"),
        # YAML gives defaults, and flags win; it reads 1e-4, without a dot, as text
        ("learning-rate: 1e-4\nep_size: 4", ["--ep-size", "2"], "learning_rate", 1e-4),
        ("learning-rate: 1e-4\nep_size: 4", ["--ep-size", "2"], "ep_size", 2),
        ("export: false", [], "export", False),
        ("report_to: [tensorboard]", [], "report_to", ["tensorboard"]),
        # switches: those that are on by default also with --no-; all take a value
        ("", [], "export", True),
        ("", ["--no-export"], "export", False),
        ("", ["--no_async_save", "--bf16", "F"], "async_save", False),
        ("", ["--no_async_save", "--bf16", "F"], "bf16", False),
        ("", ["--bf16", "Yes"], "bf16", True),
        # what is also a switch
        ("", [], "gradient_checkpointing", "none"),
        ("", ["--gradient-checkpointing", "--bf16"], "gradient_checkpointing", "full"),
        ("", ["--gradient_checkpointing", "true", "--bf16"], "gradient_checkpointing", "full"),
        ("", ["--gradient-checkpointing", "False", "--bf16"], "gradient_checkpointing", "none"),
        ("", ["--gradient-checkpointing", "selective", "--bf16"], "gradient_checkpointing", "selective"),
        ("gradient_checkpointing: true", [], "gradient_checkpointing", "full"),
        ("gradient_checkpointing: true", ["--gradient-checkpointing=false"], "gradient_checkpointing", "none"),
        ("resume_from_checkpoint: false", [], "resume", ""),
        ("resume_from_checkpoint: true", [], "resume", "auto"),
        ("resume_from_checkpoint: auto", [], "resume", "auto"),
        ("resume_from_checkpoint: run/1", [], "resume", "run/1"),
        # lists of parts: with commas, spaces or both; a comma within braces belongs to a regular expression
        *[
            ("", [flag, *given.split()], flag[2:].replace("-", "_"), ["router", "q{1,2}_proj", "norms"])
            for flag in ("--lora-targets", "--freeze")
            for given in ("router q{1,2}_proj norms", "router,q{1,2}_proj,norms", "router, q{1,2}_proj,norms")
        ],
        # steps and ranges in any order; what overlaps or follows on is one stretch
        ("", [], "profiled_steps", []),
        ("", ["--profile", "9,5-7", "6", "8", "20"], "profiled_steps", [range(5, 10), range(20, 21)]),
        ("", ["--profile", "9", "--profile-ranks", "0,3"], "profile_ranks", ["0", "3"]),
        ("profile: 5", [], "profiled_steps", [range(5, 6)]),
        ("profile: 5-6", [], "profiled_steps", [range(5, 7)]),
        ("profile: [5, 9]", [], "profiled_steps", [range(5, 6), range(9, 10)]),
        # interleaved takes two chunks
        ("", ["--pp-size", "2"], "pipeline_chunks", 1),
        ("", ["--pp-size=2", "--pipeline-schedule=interleaved"], "pipeline_chunks", 2),
        ("", ["--pp-size=2", "--pipeline-schedule=interleaved", "--pipeline-chunks=3"], "pipeline_chunks", 3),
    ],
)  # fmt: skip
def test_values(tmp_path: Path, text: str, flags: list[str], name: str, value: object) -> None:
    config = of_yaml(tmp_path, text, *flags) if text else parse_config([*NEEDED, *flags])
    assert getattr(config, name) == value


def test_help_has_every_flag_once_in_its_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: dict[str, list[str]] = {}
    title = ""
    for line in help_text(monkeypatch, capsys).splitlines():
        if re.fullmatch(r"\w.*:", line):
            title = line[:-1]
        elif flag := re.match(r"  (?:-h, )?(--[a-z0-9-]+)", line):
            printed.setdefault(title, []).append(flag[1])
    groups: dict[str, list[str]] = {}
    for setting in fields(TrainConfig):
        groups.setdefault(group_of(TrainConfig, setting.name), []).append("--" + setting.name.replace("_", "-"))
    assert tuple(groups) == GROUPS
    assert list(printed.items()) == [("options", ["--help", "--config"]), *groups.items()]


def test_help_is_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Help has 80 columns, one spelling, one line of usage, and no default that says nothing."""
    text = help_text(monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[1] == ""
    assert not re.search(r"--\w+_", text)
    assert not re.search(r"default:\s*(None|False|True|\[\]|\))", text)
    assert "--export, --no-export  " in text
    assert "  --packing [wrapped]  " in text
    assert "--model mistralai/" in text


def test_saved_config_reads_back(tmp_path: Path) -> None:
    config = parse_config([*NEEDED, "--prompt-template", "Q: {prompt}\\nA:", "--bf16", "--no-export"])
    config.save(tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--config /no/such.yaml", "--config /no/such.yaml: no such file"),
        ("--learning-rat 1", "unknown flag --learning-rat; did you mean --learning-rate?"),
        ("--ep 2", "unknown flag --ep"),
        ("--ep-size 2 stray", "unknown flag stray"),
        ("--seed 1 --seed 2", "--seed is given twice; give it once"),
        ("--report-to a --report_to=b", "--report-to is given twice; give it once, with all its values"),
        ("--export --no-export", "--export and --no-export are one setting; give one of them"),
        ("--learning-rate nan", "--learning-rate nan: must be 0 or more"),
        ("--learning-rate -1e-4", "--learning-rate -0.0001: must be 0 or more"),
        ("--adam-beta2 1", "--adam-beta2 1.0: must be 0 or more, and less than 1"),
        ("--max-shard-size big", "--max-shard-size big: write it like 5GB"),
        ("--prompt-template x", "--prompt-template 'x' must contain {prompt}"),
        ("--bf16 maybe", "bf16"),
        ("--lr-scheduler-type cosin", "--lr-scheduler-type: unknown schedule cosin; did you mean cosine?"),
        ("--warmup-ratio 0.1 --warmup-steps 5", "--warmup-ratio 0.1 and --warmup-steps 5 are both given"),
        ("--warmup-ratio 5", "--warmup-ratio 5.0: must be 0 or more, and at most 1"),
        ("--optim adam", "invalid choice: 'adam'"),
        ("--gradient-checkpointing some", "invalid choice: 'some'.*selective"),
        ("--expert-precision fp16", "invalid choice: 'fp16'.*fp8"),
        ("--expert-precision fp8", "--expert-precision fp8 needs bf16 for everything else; add --bf16"),
        ("--expert-precision fp8 --bf16 --expert-kernel loop", "fp8 brings .* leave out --expert-kernel loop"),
        (
            "--expert-precision fp8 --bf16 --adapter lora --base-dtype nf4",
            "round weights twice, after --base-dtype nf4",
        ),
        (
            "--expert-precision fp8 --bf16 --adapter lora --base-dtype mxfp4",
            "round weights twice, after --base-dtype mxfp4",
        ),
        ("--dense-precision fp8 --bf16 --adapter lora --base-dtype fp8", "round weights twice, after --base-dtype fp8"),
        ("--dense-precision fp8 --bf16 --tp-size 2 --async-tp", "fp8: does not work with --async-tp"),
        ("--offload-experts", "--offload-experts: keeps frozen experts .* give --adapter lora or --freeze experts"),
        ("--offload-experts --adapter lora --offload", "--offload-experts: --offload keeps all .*; leave out one"),
        ("--offload-experts --adapter lora --no-reshard-after-forward", "--no-reshard-after-forward would keep all"),
        ("--offload-activations", "--offload-activations: .*; add --gradient-checkpointing full or selective"),
        ("--freeze ,", "--freeze has no names"),
        ("--no-export true", "--no-export: takes no value"),
        ("--lora-targets ''", "--lora-targets has no names"),
        ("--rope-scaling yarn", "--rope-scaling yarn: the factor must be a number of at least 1, as in yarn:4"),
        ("--profile 5-", "--profile 5-: give steps counted from 1, as in 5, 5-7 or 5,9"),
        ("--profile 0", "--profile 0: give steps counted from 1"),
        ("--profile 3 9-5", "--profile 3,9-5: 9-5 ends before it begins"),
        ("--profile 1-1000", "--profile 1-1000: names 1,000 steps; give at most 32"),
        (f"--profile 1-{'9' * 18}", "steps; give at most 32"),
        ("--profile 5 --compile", "--profile cannot look inside layers that --compile compiles"),
        ("--pipeline-layers 2,2", "--pipeline-layers 2,2: --pp-size 1 has no pipeline"),
        ("--pp-size 2 --pipeline-schedule interleaved --pipeline-chunks 1", "--pipeline-chunks 2"),
        ("--init-adapter d", "--init-adapter needs --adapter lora"),
        ("--base-dtype nf4", "--base-dtype nf4: needs frozen weights; give --adapter lora"),
        *[
            (f"--text-column text --{beside}-column x", "--text-column: leave out prompt, response and system columns")
            for beside in ("prompt", "response", "system")
        ],
        ("--load-best-model-at-end", "--load-best-model-at-end: needs evaluation data"),
        ("--gradient-checkpointing --keep-expert-products 2", "--gradient-checkpointing full stores no outputs"),
        ("--profile 5 --profile-ranks -1", "--profile-ranks -1: give numbers of ranks, or all"),
        ("--streaming", "--streaming: the number of steps of an epoch is not known; give --max-steps"),
        ("--streaming --num-train-epochs 2", "--streaming: the number of steps of an epoch is not known"),
        ("--streaming --max-steps 5 --task dpo", "--streaming: --task dpo needs a fixed set of data; leave it out"),
        ("--streaming --max-steps 5 --eval-ratio 0.1 --eval-steps 2", "--eval-ratio: does not work with --streaming"),
        ("--streaming --max-steps 5 --group-by-length", "--group-by-length: does not work with --streaming"),
        ("--streaming --max-steps 5 --prepare-only", "--prepare-only: does not work with --streaming"),
        ("--streaming --max-steps 5 --dataset-num-proc 2", "--dataset-num-proc: does not work with --streaming"),
        ("--streaming --max-steps 5 --eval-dataset e", "--streaming: evaluations follow no epochs; give --eval-steps"),
        ("--preview --prepare-only", "--preview and --prepare-only: give one of them"),
        ("--task dpo --weight-column w", "--weight-column w: --task dpo does not read it; leave it out"),
        (
            "--adapter lora --merge --merge-dtype float32 --export-encoding source",
            "--merge-dtype: --export-encoding source quantizes as --model is quantized; leave out one of the two",
        ),
        ("--profile 5 --profile-ranks all 1", "--profile-ranks all 1: give numbers"),
    ],
)
def test_bad_flags(flags: str, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        parse_config([*NEEDED, *shlex.split(flags)])


OF_ALL_OPTIMIZERS = set.intersection(*(set(entry.heeds) for entry in OUR_OPTIMIZERS))
"""Without effect with a user's own alone."""
ONLY_WITH = [
    setting.name
    for setting in fields(TrainConfig)
    if any(needs.what for needs in NEEDS[setting.name]) and setting.name not in OF_ALL_OPTIMIZERS
]
VALUES = {
    "pipeline_schedule": "zero-bubble", "dispatch": "node", "dispatch_sums": "float32", "adapter_format": "packed",
    "base_dtype": "float32", "on_save_error": "continue", "allow_changed": "data", "max_shard_size": "1GB",
    "export_encoding": "source", "lora_dropout": "0.5", "preference_loss": "ipo",
    "teacher_weight": "0.5", "merge_dtype": "float32", "eval_score": "calls",
}  # fmt: skip
"""Of those that do not take 2."""
WITHOUT = {
    "merge": [], "export_encoding": ["--no-export"], "max_shard_size": ["--no-export"],
    "drop_untrained": ["--no-export"], "num_train_epochs": ["--max-steps=3"],
    "router_warn_load": ["--router-warn-steps=0"], "train_new_tokens": ["--resize-vocab"],
    "router_aux_loss_per_layer": ["--router-aux-loss-coef=0"],
    "load_best_model_at_end": ["--no-export", "--eval-ratio=0.1"],
}  # fmt: skip
WITH = [
    "--ep-size=4", "--tp-size=2", "--pp-size=2", "--dispatch=node", "--adapter=lora", "--merge", "--eval-dataset=e",
    "--early-stopping-patience=1", "--generate-steps=1", "--resume=auto", "--profile=1",
    "--gradient-checkpointing=selective", "--dense-shard=hybrid", "--resize-vocab", "--eval-generate=q", "--task=dpo",
]  # fmt: skip


@pytest.mark.parametrize("name", ONLY_WITH)
def test_flags_without_effect_are_no_error(name: str) -> None:
    """They are told, unless what they need is there."""
    (setting,) = (setting for setting in fields(TrainConfig) if setting.name == name)
    switch = {True: "false", False: "true"}.get(setting.default, "2") if isinstance(setting.default, bool) else "2"
    given = f"--{name}={VALUES.get(name, switch)}"
    without = WITHOUT.get(name, ["--save-steps=0"])
    config = parse_config([*NEEDED, given, *without])
    (told,) = config.without_effect
    assert told.startswith(f"--{'no-' * (setting.default is True)}{name.replace('_', '-')} ")
    needs = next(needs for needs in NEEDS[name] if not needs.met(config))
    assert told.endswith(f" has no effect {needs.because or f'without {needs.in_words}'}")
    assert config.settled() == (parse_config([*NEEDED, *without]) if needs.resets else config)
    needed = ["--optim=shampoo"] if name.startswith("shampoo") else WITH
    needed = [*needed, "--task=kto"] if "desirable" in name else needed
    if name.startswith("teacher"):
        needed = [*WITH[:-1], "--teacher=d"]
    needed = ["--train-mtp"] if name == "mtp_detach" else needed
    needed = ["--streaming", "--max-steps=3"] if name == "shuffle_buffer" else needed
    config = parse_config(last_of_each([*NEEDED, *needed, given]))
    assert config.without_effect == []
    assert config.settled() is config


def test_flags_for_another_one_have_no_effect_without_it() -> None:
    """Their help begins with the other flag. (Two are refused: who gives them relies on them.)"""
    for setting in fields(TrainConfig):
        help = setting.metadata["help"]
        if (help() if callable(help) else help).startswith("With --"):
            assert setting.metadata["needs"] or setting.name in ("offload_activations", "elastic"), setting.name


@pytest.mark.parametrize(
    ("text", "flags", "name", "value", "other"),
    [
        ("eval_ratio: 0.1", ["--eval-dataset", "e"], "eval_dataset", ["e"], "eval_ratio"),
        ("eval_dataset: e", ["--eval-ratio", "0.1"], "eval_ratio", 0.1, "eval_dataset"),
        ("gradient_accumulation_steps: 4", ["--global-batch-size", "8"], "global_batch_size", 8,
         "gradient_accumulation_steps"),
        ("global_batch_size: 8", ["--gradient-accumulation-steps", "4"], "gradient_accumulation_steps", 4,
         "global_batch_size"),
    ],
)  # fmt: skip
def test_a_flag_wins_over_the_files_other_way(
    tmp_path: Path, text: str, flags: list[str], name: str, value: object, other: str
) -> None:
    """To say the same: a recipe's `eval_ratio` is no obstacle to a data set of the user's."""
    config = of_yaml(tmp_path, text, *flags)
    assert getattr(config, name) == value
    assert getattr(config, other) == getattr(parse_config(NEEDED), other)
    (told,) = config.without_effect
    assert told.startswith(f"{as_flag(name, value)} overrides {other}: ")
    assert told.endswith(f" of {tmp_path / 'run.yaml'}")
    with pytest.raises(ExpertMeshError, match="give one of them"):
        of_yaml(tmp_path, f"{text}\n{name}: {value}")


def test_schedule_arguments_from_yaml(tmp_path: Path) -> None:
    """As a table or as JSON; YAML reads 1e-6, without a dot, as text."""
    for text in ("{min_lr: 1e-6, num_cycles: 0.5}", """'{"min_lr": 1e-6, "num_cycles": 0.5}'"""):
        config = of_yaml(tmp_path, f"lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {text}\n")
        assert scheduler_arguments(config) == {"min_lr": 1e-6, "num_cycles": 0.5}


def test_missing_flags() -> None:
    with pytest.raises(ExpertMeshError, match="--model is missing"):
        parse_config([])
    with pytest.raises(ExpertMeshError, match="--dataset is missing"):
        parse_config(["--model", "m"])
    assert parse_config(["--model", "m", "--max-steps", "0"]).max_steps == 0


def test_sizes() -> None:
    assert [parse_size("--x", text) for text in ("5GB", "500 mb", "3K", "7")] == [5 * 10**9, 500 * 10**6, 3000, 7]


def test_schedules_are_those_of_transformers() -> None:
    assert [name.value for name in SchedulerType] == list(SCHEDULES)


ALIASES = {alias: setting.name for setting in fields(TrainConfig) for alias in setting.metadata.get("aliases", [])}


@pytest.mark.parametrize("alias", ALIASES)
def test_other_names(alias: str, tmp_path: Path) -> None:
    """With dashes or underscores, as flags and in YAML; what is given under two names is refused."""
    name, value = ALIASES[alias], "true" if ALIASES[alias] == "compile" else "7"
    needed = [f"--{key}={key}" for key in ("model", "dataset") if key != name]
    dashes, file = "--" + alias.replace("_", "-"), tmp_path / "run.yaml"
    expected = parse_config([*needed, f"--{name}", value])
    assert str(getattr(expected, name)).lower() == value
    for flag in (dashes, f"--{alias}"):
        assert parse_config([*needed, flag, value]) == expected
        assert parse_config([*needed, f"{flag}={value}"]) == expected
        file.write_text(f"{flag[2:]}: {value}\n")
        assert parse_config([*needed, "--config", str(file)]) == expected
        said = f"{flag} is another name of --{name}; give one of them"
        with pytest.raises(ExpertMeshError, match=said):
            parse_config([*needed, flag, value, f"--{name}", value])
        file.write_text(f"{name}: {value}\n{flag[2:]}: {value}\n")
        with pytest.raises(ExpertMeshError, match=f"{name} and {flag[2:]} are one setting; give one of them"):
            parse_config([*needed, "--config", str(file)])
        # a flag wins over the file under any name
        file.write_text(f"{name}: {'false' if value == 'true' else 5}\n")
        assert parse_config([*needed, "--config", str(file), flag, value]) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: [1, 2]\n", "learning_rate is a list; give one value"),
        ("learning_rate: 1\nmodel: m\nlearning_rate: 2\n", "cannot be read: learning_rate is given twice"),
        ("lr_scheduler_kwargs: {a: 1, a: 2}\n", "cannot be read: a is given twice"),
        ("ep-size: 2\nep_size: 4\n", "ep-size and ep_size are one setting; give one of them"),
    ],
)
def test_bad_yaml(text: str, said: str, tmp_path: Path) -> None:
    """What YAML itself, or the last of several flags, would let pass."""
    with pytest.raises(ExpertMeshError, match=f"--config {tmp_path / 'run.yaml'}: {said}"):
        of_yaml(tmp_path, text)


def test_all_that_is_wrong_in_a_file_is_told_at_once(tmp_path: Path) -> None:
    """Keys, values, and what does not go together, once each."""
    text = "lerning_rate: 1\nseed: 1.5\nbf16: maybe\nep_size: 0\npacking: true\ngroup_by_length: true\n"
    with pytest.raises(ExpertMeshError) as refused:
        of_yaml(tmp_path, text)
    said = str(refused.value)
    assert said.startswith(f"--config {tmp_path / 'run.yaml'}: unknown key lerning_rate; did you mean learning_rate?")
    for problem in (
        "--seed: invalid int",
        "--bf16: maybe is",
        "--ep-size 0: must be",
        "--packing and --group-by-length",
    ):
        assert said.count(problem) == 1


NUMBERS = [field for field in fields(TrainConfig) if value_type(field) in (int, float)]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_numbers_that_make_no_sense_are_refused_by_name(setting: Any) -> None:
    """Also of a setting that is added, which must say what it takes; written with a space or an equals sign."""
    flag, kind = flag_of(setting.name), value_type(setting)
    limits = {limit: bound for limit, bound in setting.metadata.items() if limit in LIMITS}
    assert {"least", "above"} & limits.keys(), "it takes what is below any bound"
    low: Any = limits.get("least", limits.get("above"))
    high = limits.get("most", limits.get("below"))
    bad = ["nan", "inf", "-inf", "-Infinity", "-1e-4", str(low - 1), str(2**63) if kind is int else "1e400"]
    bad += [str(low)] * ("above" in limits) + ["0"] * (low > 0) + ["0.5"] * (kind is int)
    bad += [] if high is None else [str(high + 1), "1e12"] + [str(high)] * ("below" in limits)
    for value in bad:
        for words in ([flag, value], [f"{flag}={value}"]):
            with pytest.raises(ExpertMeshError, match=f"{re.escape(flag)}[ /:].*") as refused:
                parse_config([*NEEDED, *words])
            assert "expected" not in str(refused.value), "that the value was taken for a flag"
    good = [kind(low)] * ("least" in limits) + [high] * ("most" in limits)
    good += [kind(10**12)] if high is None else [kind(high / 2)]
    beside = [] if setting.name == "eval_ratio" else ["--eval-ratio", "0.5"]  # which patience needs
    for number in good:
        assert getattr(parse_config([*NEEDED, *beside, flag, str(number)]), setting.name) == number


@pytest.mark.parametrize(
    ("text", "flags", "line"),
    [
        ("global_batch_size: 64", ["--gradient-accumulation-steps", "1"], "global_batch_size: 64"),
        ("warmup_ratio: 0.03", ["--warmup-steps", "0"], "warmup_ratio: 0.03"),
        ("warmup_steps: 0.05", ["--warmup-ratio", "0"], "warmup_steps: 0.05"),
        ("bf16: true\nexpert_precision: fp8", ["--bf16", "false"], 'expert_precision: "fp8"'),
    ],
)
def test_a_flag_at_its_default_overrides_a_file(tmp_path: Path, text: str, flags: list[str], line: str) -> None:
    """What a file says in its place does not stay, and the note names the flag as it can be given."""
    config = of_yaml(tmp_path, text, *flags)
    assert config.overridden == [f"{' '.join(flags)} overrides {line} of {tmp_path / 'run.yaml'}"]
    name = line.partition(":")[0]
    assert getattr(config, name) == getattr(TrainConfig("m"), name)


def test_what_was_not_given_overrides_nothing(tmp_path: Path) -> None:
    for text in ("global_batch_size: 64\ngradient_accumulation_steps: null", "warmup_ratio: 0.03\nwarmup_steps: 0"):
        assert of_yaml(tmp_path, text).overridden == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--global-batch-size 64 --gradient-accumulation-steps 1", "give one of them"),
        ("--warmup-ratio 0.1 --warmup-steps 0", "--warmup-ratio 0.1 and --warmup-steps 0 are both given"),
        ("--warmup-ratio 0 --warmup-steps 5", "--warmup-ratio 0.0 and --warmup-steps 5 are both given"),
        ("--max-steps 5 --num-train-epochs 1", "--num-train-epochs 1 has no effect because --max-steps sets"),
        ("--lora-rank 16", "--lora-rank 16 has no effect without --adapter lora"),
        ("--warmup-ratio 0 --warmup-steps 0 --merge false --packing --group-by-length false", ""),
    ],
)
def test_a_flag_at_its_default_is_given(words: str, said: str) -> None:
    """It is refused, or told, beside what takes its place, unless it only says that something is off."""
    given = shlex.split(words)
    named: dict[str, Any] = {}
    for word, value in itertools.pairwise([*given, "--"]):
        if word.startswith("--"):
            named[word[2:].replace("-", "_")] = True if value.startswith("--") else value
    told = ""
    for make in (lambda: parse_config([*NEEDED, *given]), lambda: make_config({"model": "m", "dataset": "d", **named})):
        try:
            told = "; ".join(make().without_effect)
        except ExpertMeshError as error:
            told = str(error)
        assert said in told if said else not told


@pytest.mark.parametrize(
    ("key", "value", "flags"),
    [
        ("stage", "sft", "--task dpo"),
        ("finetuning_type", "full", "--adapter lora"),
        ("use_peft", "false", "--adapter lora"),
        ("load_in_4bit", "false", "--adapter lora --base-dtype nf4"),
        ("train_on_inputs", "false", "--train-on all"),
        ("completion_only_loss", "true", "--train-on all"),
        ("optimizer", "adamw_torch", "--optim muon"),
        ("val_set_size", "0", "--eval-ratio 0.1"),
        ("rpo_alpha", "0.0", "--preference-sft-weight 0.1 --task dpo"),
        ("mixed_precision", "no", "--bf16"),
        ("bfloat16", "false", "--bf16"),
    ],
)
def test_what_another_tool_calls_a_default_beside_another_value(
    tmp_path: Path, key: str, value: str, flags: str
) -> None:
    """A flag wins over a file, which is told; two flags, or two keys, are refused. Alone it is passed over."""
    assert of_yaml(tmp_path, f"{key}: {value}") == parse_config(NEEDED)
    config = of_yaml(tmp_path, f"{key}: {value}", *flags.split())
    assert config == parse_config([*NEEDED, *flags.split()])
    assert config.overridden
    for line in config.overridden:
        assert f" overrides {key}: " in line
    ours = "\n".join(
        f"{pair.replace(' ', ': ', 1) if ' ' in pair else pair + ': true'}" for pair in flags[2:].split(" --")
    )
    for text, more in (
        (f"{key}: {value}\n{ours.replace('-', '_')}", []),
        (ours.replace("-", "_"), [f"--{key}", value]),
    ):
        with pytest.raises(ExpertMeshError, match=f"{key}.* is not what --.* says; leave one of them out"):
            of_yaml(tmp_path, text, *more)
    with pytest.raises(ExpertMeshError, match=f"--{key} {value} is not what --.* says; leave one of them out"):
        parse_config([*NEEDED, *flags.split(), f"--{key}", value])


def test_what_another_tool_calls_a_default_contradicts_no_other(tmp_path: Path) -> None:
    assert of_yaml(tmp_path, "load_in_4bit: false\nadapter: lora\nload_in_8bit: false").overridden == []


def test_a_size_of_a_step_is_given_once_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(ExpertMeshError, match="--global-batch-size and --gradient-accumulation-steps: give one of"):
        of_yaml(tmp_path, "global_batch_size: 64\ngradient_accumulation_steps: 1")


@pytest.mark.parametrize("name", ["max_seq_length", "learning_rate", "optim", "run_name", "dataset", "bf16"])
def test_dashes_are_no_value_of_a_flag(name: str) -> None:
    with pytest.raises(ExpertMeshError, match=f"argument {flag_of(name)}: -- is no value"):
        parse_config([f"{flag_of(name)}=--"])


@pytest.mark.parametrize("values", [["-x"], ["--model"], ["-"], ["-1", "-2.5"], ["-5 + 3 is?", "b"], ["a b", "c"]])
def test_lists_with_dashes_are_read_back(tmp_path: Path, values: list[str]) -> None:
    """From config.yaml, and from the command line that is made of settings."""
    config = TrainConfig("m", dataset=["d"], generate_steps=1, generate_prompts=values)
    config.save(tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config
    assert parse_config(flags_of_config(config)) == config


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("run_name: no", "run_name", "no"),
        ("run_name: TRUE", "run_name", "TRUE"),
        ("run_name: 012", "run_name", "012"),
        ("run_name: 1:30", "run_name", "1:30"),
        ("run_name: 2026-13-01", "run_name", "2026-13-01"),
        ("run_name: 2026-01-02 00:00:00", "run_name", "2026-01-02 00:00:00"),
        ("add_tokens: [yes, no, on, off, true, 0x10, 1_000, 1.50]", "add_tokens",
         ["yes", "no", "on", "off", "true", "0x10", "1_000", "1.50"]),
        ("template_date: 2026-01-02", "template_date", "2026-01-02"),
        ("lr_scheduler_kwargs: {smooth: no, num_cycles: 2}", "lr_scheduler_kwargs",
         '{"smooth": false, "num_cycles": 2}'),
        ("lr_scheduler_kwargs: {day: 2026-01-02}", "lr_scheduler_kwargs", '{"day": "2026-01-02"}'),
        ("bf16: on", "bf16", True),
        ("export: off", "export", False),
        ("gradient_checkpointing: yes", "gradient_checkpointing", "full"),
        ("gradient_checkpointing: off", "gradient_checkpointing", "none"),
        ("resume: on", "resume", "auto"),
        ("train_mtp: yes", "train_mtp", 0.1),
        ("train_mtp: 1", "train_mtp", 1.0),
        ("learning_rate: 1e-4", "learning_rate", 1e-4),
        ("debug_ranks: [0, 2]", "debug_ranks", [0, 2]),
    ],
)  # fmt: skip
def test_a_value_of_a_file_is_what_is_written(tmp_path: Path, text: str, name: str, value: object) -> None:
    """Not what YAML makes of it, where that is something else."""
    config = of_yaml(tmp_path, text)
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)
    config.save(tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config


def test_a_switch_is_no_text() -> None:
    for settings in ({"run_name": False}, {"add_tokens": ["a", True]}, {"seed": True}):
        (name,) = settings
        with pytest.raises(ExpertMeshError, match=f"^{name} is .*, as a switch is; give text or a number$"):
            make_config({"model": "m", **settings})
    assert make_config({"model": "m", "resume": True}).resume == "auto"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("add_tokens: [a, null]", "add_tokens has an empty entry (null)"),
        ("generate_prompts: [~]", "generate_prompts has an empty entry (null)"),
        ("run_name: {a: 1}", "run_name is a table; give one value"),
        ("generate_prompts: {a: b}", "generate_prompts is a table; give one value"),
        ("generate_prompts: [a, --model]", "generate_prompts has an entry that begins with a dash, as flags do"),
    ],
)
def test_values_of_a_file_that_would_be_misread(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=re.escape(said)):
        of_yaml(tmp_path, text)
