"""Another tool's file of settings, written as one of ours: nothing of it is lost, and what is written is taken."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertmesh.train_ep import main as train_ep
from expertmesh.training.config.migrate import migrate
from expertmesh.training.config.train_config import given_settings, parse_config
from tests.training.migrate_page import keys

LLAMA_FACTORY = """
model_name_or_path: org/moe
trust_remote_code: true
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: a.jsonl
cutoff_len: 4096
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
plot_loss: true
flash_attn: fa2
torch_dtype: bfloat16
wibble: "3\\nmodel: other"
"""
AXOLOTL = """
base_model: org/moe
load_in_4bit: true
adapter: qlora
datasets:
  - {path: org/data, type: alpaca}
  - {path: more.jsonl, type: {field_instruction: ask}}
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
optimizer: adamw_bnb_8bit
lora_r: 32
lora_alpha: 16
lora_target_linear: true
warmup_steps: 10
deepspeed: ds.json
"""


def migrated(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The settings that are written, and the comments below them."""
    (theirs := tmp_path / "theirs.yaml").write_text(text, encoding="utf-8")
    assert train_ep(["migrate", str(theirs)]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(printed, encoding="utf-8")
    return yaml.safe_load(printed) or {}, printed[printed.find("\n#") :]


def test_of_llama_factory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, comments = migrated(LLAMA_FACTORY, tmp_path, capsys)
    config = parse_config(["--config", str(tmp_path / "ours.yaml")])
    assert (config.model, config.dataset, config.adapter, config.lora_rank) == ("org/moe", ["a.jsonl"], "lora", 8)
    assert (config.max_seq_length, config.gradient_accumulation_steps, config.learning_rate) == (4096, 8, 1e-4)
    # 16 there by default, which is twice the rank; 32 here
    assert (config.lora_alpha, config.lora_targets) == (16, ["all-linear"])
    assert (config.attn_implementation, config.bf16) == ("flash_attention_2", True)
    left_out, to_do = comments.split("# Open:")
    assert "plot_loss: true" in left_out
    assert "stage: sft" in left_out
    assert "trust_remote_code: true: expertmesh never runs a checkpoint's code" in to_do
    assert "wibble: 3 model: other: unknown key wibble" in to_do


def test_of_axolotl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, comments = migrated(AXOLOTL, tmp_path, capsys)
    config = parse_config(["--config", str(tmp_path / "ours.yaml")])
    assert (config.adapter, config.base_dtype, config.optim) == ("lora", "nf4", "adamw_torch_8bit")
    assert config.dataset == ["org/data", "more.jsonl"]
    assert (config.max_seq_length, config.packing, config.per_device_train_batch_size) == (4096, True, 2)
    assert (config.lora_rank, config.lora_alpha, config.warmup_steps) == (32, 16, 10)
    # what axolotl has by default
    assert (config.lr_scheduler_type, config.truncation) == ("cosine", "drop")
    assert "datasets: {path: org/data, type: alpaca}: its path alone is taken; see --preview" in comments
    assert "type: {field_instruction: ask}}" in comments
    assert "deepspeed: ds.json: FSDP2 always shards" in comments


@pytest.mark.parametrize("tool", keys())
def test_every_key_is_somewhere(tool: str, tmp_path: Path) -> None:
    """The commonest keys of a tool, with each value asked about: all are named, and what is written is taken."""
    file = tmp_path / "theirs.yaml"
    asked = [(name, values or ["7"]) for name, values in keys()[tool]]
    for number in range(max(len(values) for _, values in asked)):
        theirs = {name: values[min(number, len(values) - 1)] for name, values in asked}
        file.write_text(yaml.safe_dump(theirs), encoding="utf-8")
        written = migrate(file)
        text = written.text()
        for name, value in theirs.items():
            assert name in written.settings or re.search(rf"[#;] +{name}: {value}\b", text), (name, value, text)
        file.write_text(text, encoding="utf-8")
        taken = given_settings(["--config", str(file)]).file
        assert {key: taken[key] for key in written.settings} == written.settings, text


@pytest.mark.parametrize(
    ("text", "settings", "comment"),
    [
        ("unfrozen_parameters: [lm_head]", {}, "#   unfrozen_parameters: lm_head: give --freeze with the parameters"),
        ("debug: underflow_overflow", {}, "#   debug: underflow_overflow: give --detect-anomaly or --debug-ranks"),
        ("output_router_logits: true", {}, "#   output_router_logits: true: give --router-aux-loss-coef"),
        ("mtp_num_layers: 2", {"train_mtp": 0.1}, ""),
        ("mtp_num_layers: 1\nmtp_loss_scaling_factor: 0.3", {"train_mtp": 0.1}, "train_mtp is 0.1 already"),
        ("pretraining_dataset: org/text", {}, "#   pretraining_dataset: org/text: give --dataset, --text-column"),
        (
            "completion_only_loss: true\nassistant_only_loss: false",
            {"train_on": "all"},
            "is not what --train-on all says",
        ),
        ("train_on_eos: all", {}, "#   train_on_eos: all: what ends an answer is trained with it"),
        ("train_on_eos: turn", {}, "# Left out, as it is done anyway:"),
        ("max_length:\nlr: 0.001", {"learning_rate": 0.001}, "# Left out, as it is empty:\n#   max_length:\n"),
        ("datasets: [{data_files: b}]\nlr: 0.001", {"learning_rate": 0.001}, "#   datasets: {data_files: b}: "),
        ("datasets: []\nlr: 0.001", {"learning_rate": 0.001}, "# Left out, as it is empty:\n#   datasets:\n"),
        ("optim: adamw_torch_4bit", {"optim": "adamw_torch_8bit"}, "# optim: adamw_torch_4bit"),
        ("micro-batch-size: 3\ntrain-iters: 7", {"per_device_train_batch_size": 3, "max_steps": 7}, ""),
        ("torch_dtype: bfloat16", {"bf16": True}, ""),
        ("dataset_text_field: TEXT", {"text_column": "TEXT"}, ""),
        ("model_name_or_path: QWEN\ntask: gkd", {"model": "QWEN"}, "#   task: gkd: "),
        ("bf16: auto", {"bf16": True}, ""),
        ("adapter: qlora", {"adapter": "lora", "base_dtype": "nf4"}, ""),
        ("eval_ratio: 500", {}, "#   eval_ratio: 500: --eval-ratio 500.0: must be"),
        ("lr_scheduler: rex", {}, "#   lr_scheduler: rex: --lr-scheduler-type: unknown schedule rex"),
        ("chat_template: llama3", {}, "#   chat_template: llama3: --chat-template llama3: "),
        ("datasets: [{path: a}, {data_files: b}]", {"dataset": ["a"]}, "#   datasets: {data_files: b}: "),
        ('wibble: "a\\x1b[0mb"', {}, "#   wibble: a [0mb: unknown key wibble"),
        ("packing: true\npadding_free: true", {"packing": True}, "# packing: true; padding_free: true"),
        (
            "packing: true\npacking_strategy: wrapped\npadding_free: false",
            {"packing": "wrapped"},
            "packing: wrapped  # packing: true; packing_strategy: wrapped",
        ),
    ],
)
def test_in_its_meaning_or_open(
    text: str, settings: dict[str, Any], comment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was once written wrongly, or lost."""
    found, _ = migrated(text, tmp_path, capsys)
    assert found == settings
    assert comment in (tmp_path / "ours.yaml").read_text(encoding="utf-8")


def test_two_keys_of_one_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, comments = migrated("cutoff_len: 4096\nsequence_len: 2048\n", tmp_path, capsys)
    assert settings["max_seq_length"] == 4096
    assert "sequence_len: 2048: max_seq_length is 4096 already, by cutoff_len: 4096" in comments


@pytest.mark.parametrize("text", ["{prompt}\nAnswer: ", "no", "010", "a # b", "- c", "'d'", "\u00e9\t\\n"])
def test_a_text_is_what_it_was(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    migrated(yaml.safe_dump({"model": "m", "system_column": text}), tmp_path, capsys)
    assert given_settings(["--config", str(tmp_path / "ours.yaml")]).file["system_column"] == text


def test_what_does_not_go_together_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, comments = migrated("model: m\nwarmup_steps: 3\nwarmup_ratio: 0.5\n", tmp_path, capsys)
    assert "--warmup-ratio 0.5 and --warmup-steps 3 are both given" in comments


@pytest.mark.parametrize("content", [None, "- a\n", "a: [\n"])
def test_no_such_file(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert train_ep(["migrate", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"migrate: error: {file}: ")
