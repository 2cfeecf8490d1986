"""Flags, keys and values of other tools, and names with typing errors."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl
from torch.distributed.run import get_args_parser
from transformers.training_args import OptimizerNames

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import nearest
from expertmesh.training.config.optimizers import OPTIMIZERS
from expertmesh.training.config.other_tools import _VALUES, rows
from expertmesh.training.config.train_config import TrainConfig, make_config, make_parser, parse_config

NEEDED = ["--model", "m", "--dataset", "d"]
OURS = {name for setting in fields(TrainConfig) for name in (setting.name, *setting.metadata.get("aliases", []))}
TORCHRUN = {option for action in get_args_parser()._actions for option in action.option_strings}
NAMES = [name for names, *_ in rows() for name in names.split()]
OF_OPTIMIZERS = [other.flags for entry in OPTIMIZERS.entries() for other in entry.other_tools]
CONFIGS: list[Any] = [transformers.TrainingArguments, trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments]
THEIRS = {setting.name for config in CONFIGS for setting in fields(config)}


def refusal(*flags: str) -> str:
    with pytest.raises(ExpertMeshError) as error:
        parse_config([*NEEDED, *flags])
    return str(error.value)


def test_every_flag_that_is_advised_exists() -> None:
    """And the table has each name once, and none of ours."""
    assert len(NAMES) == len(set(NAMES)) > 60
    assert not set(NAMES) & OURS
    advice = [*(advice for _, advice, _ in rows()), *_VALUES.values(), *OF_OPTIMIZERS]
    for text in advice:
        for flag in re.findall(r"--[a-z][a-z0-9-]*", text.replace("`hf download --revision`", "")):
            assert flag[2:].replace("-", "_") in OURS | {"config"} or flag in TORCHRUN, text
    for text in [*_VALUES.values(), *OF_OPTIMIZERS]:
        flags = re.sub(r"^give |,? \(.*|, .*", "", text) if text.startswith(("give", "--")) else ""
        assert not make_parser().parse_known_args([*NEEDED, *flags.split()])[1]


def test_every_flag_of_transformers_and_trl_has_an_answer() -> None:
    """What to do, not a flag that shares letters with it."""
    for name in THEIRS - OURS:
        said = refusal(f"--{name}", "unheard-of")
        assert said.startswith(f"unknown flag --{name}: ")
        assert "did you mean" not in said


def test_optimizers_of_transformers() -> None:
    """The same AdamW under another name is taken; others are refused with all that there is, and what is near."""
    for name in [name.value for name in OptimizerNames]:
        if name in ("adamw_torch", *OPTIMIZERS.names()):
            assert parse_config([*NEEDED, "--optim", name]).optim in (name, "adamw_torch_fused")
            continue
        said = refusal("--optim", name)
        assert f"invalid choice: '{name}'" in said
        assert all(ours in said for ours in OPTIMIZERS.names())
        if "adamw" in name and name.startswith(("adamw", "paged")):
            assert "; give --optim adamw_" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fsdp", "full_shard auto_wrap"], "unknown flag --fsdp: .* always shards"),
        (["--deepspeed=zero3.json"], "unknown flag --deepspeed: .* always shards"),
        (["--load_in_4bit"], "unknown flag --load_in_4bit: give --adapter lora --base-dtype nf4"),
        (["--load-in-4bit", "true"], "unknown flag --load-in-4bit: give --adapter lora --base-dtype nf4"),
        (["--max_length", "2048"], "unknown flag --max_length: give --max-seq-length"),
        (["--lora_target_modules", "q_proj", "v_proj", "--use_peft"], "targets: .*; unknown flag --use_peft: give"),
        (["--fsdp_offload_params", "true"], "unknown flag --fsdp_offload_params: .* always shards"),
        (["--fp16"], "unknown flag --fp16: float16 is not supported; give --bf16"),
        (["--fp16", "false", "stray"], "unknown flag --fp16"),
        (["--optim", "paged_adamw_8bit"], "invalid choice: 'paged_adamw_8bit' .*; give --optim adamw_torch_8bit"),
        (["--adapter", "qlora"], "invalid choice: 'qlora' .*; give --adapter lora --base-dtype nf4"),
        (["--bf16", "auto"], "--bf16: auto is neither true nor false; give --bf16 true"),
        (["--save-steps", "0.25"], "--save-steps: invalid int value: '0.25'; give a number of steps, not a fraction"),
        (["--stage", "dpo"], "unknown flag --stage: runs here are supervised fine-tuning"),
        (["--reshard_after_foward"], "unknown flag --reshard-after-foward; did you mean --reshard-after-forward"),
    ],
)  # fmt: skip
def test_answers(flags: list[str], said: str) -> None:
    assert re.search(said, refusal(*flags))


HARMLESS = [
    "--fp16 false", "--fsdp=", "--do_train", "--logging_strategy steps", "--save-strategy=steps", "--stage sft",
    "--ddp_find_unused_parameters False", "--trust_remote_code no", "--push_to_hub f --fp16=F",
    "--label_smoothing_factor 0.0", "--task_type CAUSAL_LM", "--optim adamw_torch",
]  # fmt: skip


def test_what_asks_for_what_is_done_anyway_is_no_error() -> None:
    for flags in HARMLESS:
        assert parse_config([*NEEDED, *flags.split(), "--bf16"]) == parse_config([*NEEDED, "--bf16"])
        assert parse_config([*NEEDED, "--bf16", *flags.split()]) == parse_config([*NEEDED, "--bf16"])


def test_keys_and_keyword_arguments_answer_likewise(tmp_path: Path) -> None:
    """All of them in one error, as it takes to rewrite another tool's file."""
    file = tmp_path / "axolotl.yaml"
    file.write_text(
        "base_model: m\ndatasets:\n  - path: d\n    type: chat_template\nload_in_8bit: false\nload_in_4bit: true\n"
        "sequence_len: 4096\nspecial_tokens: {}\nwandb_project:\nlearning_rte: 1\nbf16: true\n"
        "gradient_checkpointing_kwargs:\n  use_reentrant: false\n"
    )
    said = refusal("--config", str(file))
    assert said.startswith(
        f"--config {file}: unknown key base_model: give --model; unknown key datasets: give --dataset"
    )
    assert "unknown key load_in_4bit: give --adapter lora --base-dtype nf4" in said
    assert "unknown key sequence_len: give --max-seq-length" in said
    assert said.endswith("unknown key learning_rte; did you mean learning_rate?")
    for name in ("load_in_8bit", "special_tokens", "wandb_project", "use_reentrant", "bf16"):
        assert name not in said
    with pytest.raises(ExpertMeshError, match=r"^unknown key load_in_4bit: give --adapter lora --base-dtype nf4"):
        make_config({"model": "m", "load_in_4bit": True})
    harmless = {"load_in_4bit": False, "fsdp": None, "deepspeed": ""}
    assert make_config({"model": "m", **harmless}) == make_config({"model": "m"})


def test_what_is_near() -> None:
    """Any one typing error in a flag is understood; what merely shares letters is not."""
    flags = [option for option in make_parser()._option_string_actions if option.startswith("--")]
    for number, flag in enumerate(flag for flag in flags if len(flag) > 10):
        at = 3 + number % 5
        exchanged = flag[: at - 1] + flag[at] + flag[at - 1] + flag[at + 1 :]
        assert nearest(exchanged, flags) == flag
        assert nearest(flag[:at] + flag[at + 1 :], flags) == flag
    for name in ("fsdp", "deepspeed", "load_in_4bit", "fp16", "adafactor", "zzz", "x", ""):
        assert nearest(f"--{name}", flags) is None, name
    assert nearest("ep", ["ep_size", "cp_size"]) == "ep_size"
    assert nearest("lora", ["lora_rank", "lora_alpha"]) is None
    assert nearest("cosin", ["cosine", "linear"]) == "cosine"
