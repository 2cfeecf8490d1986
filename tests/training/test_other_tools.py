"""Flags, keys and values of other tools, and names with typing errors."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.distributed.run import get_args_parser
from transformers.training_args import OptimizerNames

from expertmesh.moe.util.errors import ExpertMeshError, SeveralMistakes
from expertmesh.moe.util.parser import nearest
from expertmesh.train_ep import main as train_ep
from expertmesh.training.config.optimizers import OPTIMIZERS
from expertmesh.training.config.other_tools import WITHOUT_EQUIVALENT
from expertmesh.training.config.train_config import TrainConfig, given_settings, make_config, make_parser, parse_config
from tests.training.migrate_page import TRL

NEEDED = ["--model", "m", "--dataset", "d"]
PARSER = make_parser()
ACTIONS = {action.dest: action for action in PARSER._actions}
SAME, ASKING = PARSER.others.same, PARSER.others.asking
TORCHRUN = {option for action in get_args_parser()._actions for option in action.option_strings}
TABLES = [
    table() if callable(table) else table for kind in TrainConfig.__mro__ for table in [vars(kind).get("OTHERS", {})]
]


def refusal(*flags: str) -> str:
    with pytest.raises(ExpertMeshError) as error:
        parse_config([*NEEDED, *flags])
    return str(error.value)


def followed(answer: str) -> Any:
    """The settings of who gives what the answer to a key says."""
    settings, unknown = make_parser().parse_known_args([*NEEDED, *answer.removeprefix("give ").split()])
    assert not unknown
    return settings


def test_every_row_names_settings_and_flags_that_exist() -> None:
    """And no name of ours is in a table, and no other name in two."""
    for table in TABLES:
        for here, theirs in table.items():
            assert here in ACTIONS or here == "" or here.startswith("--"), here
            if here.startswith("--"):
                followed(here)
            for name, _, value in (word.partition("=") for word in theirs.split()):
                assert value or name not in PARSER.names, name
    in_table = [name for names, *_ in WITHOUT_EQUIVALENT for name in names.split()]
    names = [*SAME, *ASKING.keys() - PARSER.names.keys(), *in_table]
    assert len(names) == len(set(names)) > 200
    assert not {*SAME, *in_table} & PARSER.names.keys()
    assert not ASKING.keys() & SAME.keys(), "write it with the setting's own name"
    for _, advice, _ in WITHOUT_EQUIVALENT:
        for flag in re.findall(r"--[a-z][a-z0-9-]*", advice.replace("`hf download --revision`", "")):
            assert flag in PARSER._option_string_actions or flag in TORCHRUN, advice


def test_no_row_denies_what_a_setting_can_do() -> None:
    """Who gives a setting's own value under another name, and does what is said then, has that value."""
    told = 0
    for name, action in SAME.items():
        for value in map(str, action.choices or ()):
            answer = PARSER.others.answer(name, [value], exactly=True)
            settings = followed(answer or "")
            assert str(getattr(settings, action.dest)) == value, (name, value, answer)
            told += answer != ""
    assert told > 40
    for name, asked in ASKING.items():
        for value, flags in asked:
            if name in ACTIONS and "*" not in value and "?" not in value:
                other = next((other for other, action in SAME.items() if action.dest == name), None)
                expected = f"give {flags}" if flags else ""
                assert other is None or PARSER.others.answer(other, [value], exactly=True) == expected


def test_every_field_of_transformers_and_trl_has_an_answer() -> None:
    """What to do, not a flag that shares letters with it. A release that adds a field fails here until it has one."""
    theirs = {setting.name for kind in (transformers.TrainingArguments, *TRL) for setting in fields(kind)}
    assert len(theirs) > 150
    for name in theirs - PARSER.names.keys():
        assert PARSER.others.answer(name, ["unheard-of"], exactly=True) or name.partition("_")[0] in (
            *("dataloader", "ddp", "hub", "push", "fsdp", "liger", "trackio", "bnb"),
        ), name
        said = refusal(f"--{name}", "unheard-of")
        assert said.startswith(f"unknown flag --{name}: ")
        assert "did you mean" not in said


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("stage: dpo", {"task": "dpo", "preference_loss": "sigmoid"}),
        ("stage: kto", {"task": "kto"}),
        ("rl: dpo", {"task": "dpo"}),
        ("rl: ipo", {"task": "dpo", "preference_loss": "ipo"}),
        ("rl: kto", {"task": "kto"}),
        ("rlhf_type: dpo", {"task": "dpo"}),
        ("rlhf_type: kto", {"task": "kto"}),
        ("rlhf_type: gkd", {"teacher": "DIR"}),
        ("pref_loss: ipo", {"task": "dpo", "preference_loss": "ipo"}),
        ("loss_type: [ipo]", {"task": "dpo", "preference_loss": "ipo"}),
        ("loss_type: [sigmoid]", {"task": "dpo", "preference_loss": "sigmoid"}),
        ("loss_type: kto", {"task": "kto", "preference_loss": "sigmoid"}),
        ("loss_type: apo_zero_unpaired", {"task": "kto", "preference_loss": "apo_zero_unpaired"}),
        ("disable_gradient_checkpointing: false", {"gradient_checkpointing": "full"}),
        ("freeze_vit: false", {"images": True, "train_vision": ["tower"]}),
        ("freeze_aligner: false", {"images": True, "train_vision": ["projector"]}),
        ("freeze_vision_tower: false", {"images": True, "train_vision": ["tower"]}),
        ("freeze_multi_modal_projector: false", {"images": True, "train_vision": ["projector"]}),
        ("finetuning_type: lora", {"adapter": "lora"}),
        ("tuner_type: lora", {"adapter": "lora"}),
        ("target_modules: all-linear", {"lora_targets": ["all-linear"]}),
        ("lora_target: all", {"lora_targets": ["all-linear"]}),
        ("quantization_bit: 4", {"adapter": "lora", "base_dtype": "nf4"}),
        ("load_in_8bit: true", {"adapter": "lora", "base_dtype": "fp8"}),
        ("pure_bf16: true", {"bf16": True, "optim": "adamw_bf16"}),
        ("train_on_inputs: true", {"train_on": "all"}),
        ("mask_history: true", {"train_on": "last"}),
        ("loss_scale: last_round", {"train_on": "last"}),
    ],
)
def test_an_answer_trains_what_was_asked_for(key: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """As a whole configuration, which has checked that its settings go together."""
    file = tmp_path / "theirs.yaml"
    file.write_text(key)
    said = refusal("--config", str(file))
    answer = said.partition(": give ")[2].partition("; ")[0]
    config = parse_config([*NEEDED, *answer.split()])
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        *((name, "--preference-beta") for name in ("beta", "pref_beta", "rl_beta", "dpo_beta")),
        ("pref_ftx", "--preference-sft-weight"),
        ("rpo_alpha", "--preference-sft-weight"),
        ("kto_chosen_weight", "--desirable-weight"),
        ("kto_undesirable_weight", "--undesirable-weight"),
        ("teacher_model_name_or_path", "--teacher"),
        ("gkd_logits_topk", "--teacher-top-k"),
        ("mtp_num_layers", "--train-mtp 0.1"),
    ],
)
def test_keys_of_preferences_distillation_and_mtp(key: str, flag: str) -> None:
    assert refusal(f"--{key}", "0.3") == f"unknown flag --{key}: give {flag}"


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
        (["--load-in-4bit=1"], "unknown flag --load-in-4bit: give --adapter lora --base-dtype nf4"),
        (["--max_length", "2048"], "unknown flag --max_length: give --max-seq-length"),
        (["--lora_target_modules", "q_proj", "v_proj", "--use_peft"], "give --lora-targets; .* --use_peft: give"),
        (["--fsdp_offload_params", "true"], "unknown flag --fsdp_offload_params: .* always shards"),
        (["--save_strategy", "no"], "unknown flag --save_strategy: give --save-steps N: .* or 0 for never$"),
        (["--fp16"], "unknown flag --fp16: float16 is not supported; give --bf16"),
        (["--fp16", "false", "stray"], "unknown flag --fp16"),
        (["--optim", "paged_adamw_8bit"], "invalid choice: 'paged_adamw_8bit' .*; give --optim adamw_torch_8bit"),
        (["--adapter", "qlora"], "invalid choice: 'qlora' .*; give --adapter lora --base-dtype nf4"),
        (["--bf16", "auto"], "--bf16: auto is neither true nor false; give --bf16"),
        (["--save-steps", "0.25"], "--save-steps: invalid int value: '0.25'; give a number of steps, not a fraction"),
        (["--rlhf_type", "grpo"], "unknown flag --rlhf_type: give --task: sft, dpo or kto"),
        (["--num_generations", "8"], "unknown flag --num_generations: there is only --task sft, dpo and kto"),
        (["--pissa_init", "true"], "unknown flag --pissa_init: has no equivalent here; leave it out"),
        (["--dataloader_drop_last", "true"], "unknown flag --dataloader_drop_last: no sequence is dropped"),
        (["--lmbda", "1.0"], "unknown flag --lmbda: the --teacher predicts the data's own tokens"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "stage: sft\ncutoff_len: 512\nlora_rank: 8",
            ["num_train_epochs is left out: LLaMA-Factory has 3 by default; give --num-train-epochs 3",
             "bf16 is left out: LLaMA-Factory has the model's own by default; give --bf16",
             "adapter is left out: LLaMA-Factory has lora by default; give --adapter lora",
             "lora_targets is left out: LLaMA-Factory has all-linear by default; give --lora-targets all-linear",
             "lora_alpha is left out: LLaMA-Factory has 16 by default; give --lora-alpha 16"],
        ),
        ("finetuning_type: full\ncutoff_len: 512\nmax_steps: 10\ntorch_dtype: bfloat16", []),
        (
            "dataset_dir: d\nfinetuning_type: full\nnum_train_epochs: 2\nfp16: false",
            ["max_seq_length is left out: LLaMA-Factory has 2048 by default; give --max-seq-length 2048"],
        ),
        ("cutoff_len: 512\nfinetuning_type: lora\nlora_rank: 16\nlora_target: all\nmax_steps: 10\nbf16: true", []),
        (
            "tuner_type: lora\ntarget_modules: all-linear\nlora_alpha: 16\nlr_scheduler_type: linear\n"
            "weight_decay: 0\nadam_beta2: 0.99\nnum_train_epochs: 1\ngradient_accumulation_steps: 2\n"
            "truncation_strategy: delete\nrouter_aux_loss_coef: 0.1",
            ["per_device_train_batch_size is left out: ms-swift has 1 by default; give --per-device-train-batch-size 1",
             "max_seq_length is left out: ms-swift has the model's own by default; give --max-seq-length",
             "bf16 is left out: ms-swift has the model's own by default; give --bf16",
             "learning_rate is left out: ms-swift has 0.0001 by default; give --learning-rate 0.0001",
             "lora_rank is left out: ms-swift has 8 by default; give --lora-rank 8",
             "lora_dropout is left out: ms-swift has 0.05 by default; give --lora-dropout 0.05"],
        ),
        (
            "tuner_type: full\nlearning_rate: 2e-5\nmax_epochs: 1\nmax_length: 512\nbf16: true\n"
            "per_device_train_batch_size: 2",
            ["lr_scheduler_type is left out: ms-swift has cosine by default; give --lr-scheduler-type cosine",
             "weight_decay is left out: ms-swift has 0.1 by default; give --weight-decay 0.1",
             "adam_beta2 is left out: ms-swift has 0.95 by default; give --adam-beta2 0.95",
             "router_aux_loss_coef is left out: ms-swift has 0.0 by default; give --router-aux-loss-coef 0.0",
             "global_batch_size is left out: ms-swift has 16 by default; give --global-batch-size 16",
             "truncation is left out: ms-swift has drop by default; give --truncation drop"],
        ),
        (
            "base_model: m\nlora_r: 8\nmicro_batch_size: 2\nwarmup_steps: 10",
            ["lr_scheduler_type is left out: axolotl has cosine by default; give --lr-scheduler-type cosine",
             "max_seq_length is left out: axolotl has 512 by default; give --max-seq-length 512",
             "truncation is left out: axolotl has drop by default; give --truncation drop",
             "bf16 is left out: axolotl has true by default; give --bf16 true"],
        ),
        ("max_length: 512\nlora_r: 8\nunheard_of: 1", []),
    ],
)  # fmt: skip
def test_defaults_that_are_others_elsewhere(text: str, said: list[str], tmp_path: Path) -> None:
    """Each by a tool's own keys; where its default is ours, nothing is said."""
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(SeveralMistakes) as error:
        parse_config([*NEEDED, "--config", str(file)])
    assert [each for each in error.value.problems if "left out" in each] == said


@pytest.mark.parametrize("more", ["", "unheard_of: 1\n"])
def test_what_only_a_run_finds_is_told_with_the_rest(more: str, tmp_path: Path) -> None:
    """A template that there is not, and TF32 without a GPU; to a forecast, the machine it is made on is nothing."""
    file = tmp_path / "theirs.yaml"
    file.write_text(f"{more}use_cpu: true\ntf32: true\nchat_template: qwen3\n")
    with pytest.raises(SeveralMistakes) as error:
        parse_config([*NEEDED, "--config", str(file)])
    *_, template, tf32 = error.value.problems
    assert len(error.value.problems) == (3 if more else 2)
    assert "--chat-template qwen3: neither a built-in template" in template
    assert template.endswith("; leave it out: the tokenizer's own is used")
    assert tf32 == "--tf32 needs a GPU; this run is on cpu; leave it out"
    if not more:
        assert given_settings([*NEEDED, "--config", str(file)], beside=["--gpus"]).all["tf32"] is True


def test_a_value_that_asks_for_what_is_done_anyway(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("chat_template: tokenizer_default\nadapter: full\n")
    config = parse_config([*NEEDED, "--config", str(file)])
    assert (config.chat_template, config.adapter) == ("", "none")


def test_all_mistakes_of_a_file_are_told_at_once_each_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("chat_template: qwen3\nmax_length: 512\nep_size: x\nlearning_rate: -1\nepochs: 2\n")
    assert train_ep([*NEEDED, "--config", str(file)]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "train_ep.py: error: 5 mistakes:"
    wanted = ["max_length: give --max-seq-length", "--ep-size", "epochs", "template qwen3: neither a", "-1"]
    assert all(told in line for line, told in zip(lines, wanted, strict=True)), lines


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
    assert "unknown key learning_rte; did you mean learning_rate?; lr_scheduler_type is left out: axolotl" in said
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


@pytest.mark.parametrize("value", ["0", "0.0"])
def test_no_layers_for_drafts_are_no_error(value: str) -> None:
    assert parse_config([*NEEDED, "--mtp_num_layers", value]).train_mtp == 0
