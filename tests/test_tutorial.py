"""The tutorial: its commands for a CPU run as on the page; those for GPUs have flags and recipes that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import practice
from benchmarks.small_models import save_model
from expertmesh.training.config.train_config import TrainConfig, parse_config
from tests.test_configs import RECIPES
from tests.test_readmes import DOCS, ROOT, blocks, commands

PAGE = DOCS / "tutorial.md"
ON_A_CPU = "practice"
"""Is in all commands that need no GPU: the directory of the tiny model."""
SHORT = {"benchmarks.practice": " --records 200"}
"""Flags that a test adds, so that it is short."""


def of_the_page(on_a_cpu: bool) -> list[str]:
    """Its commands, without those that install."""
    ours = [command for command in commands(PAGE) if "python" in command or "torchrun" in command]
    return [command for command in ours if (ON_A_CPU in command) == on_a_cpu]


def config_of(command: str) -> TrainConfig:
    """Of a command that trains."""
    words = shlex.split(command)
    return parse_config(words[words.index("train_ep.py") + 1 :])


@pytest.mark.parametrize("command", [c for c in of_the_page(True) if "train_ep.py" in c and "/config.yaml" not in c])
def test_settings_go_together(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert config_of(command).output_dir


@pytest.mark.parametrize("command", of_the_page(False))
def test_commands_for_gpus(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their flags go together, and their recipe is one of which `test_rehearsed_recipes` makes a dry run."""
    monkeypatch.chdir(ROOT)
    recipes = re.findall(r"configs/(\w+)\.yaml", command)
    assert set(recipes) <= set(RECIPES)
    if "train_ep.py" in command:
        config, recipe = config_of(command), config_of(f"train_ep.py --config configs/{recipes[0]}.yaml --dataset d")
        # no more memory than the recipe, whose forecast fits
        assert config.per_device_train_batch_size <= recipe.per_device_train_batch_size
        assert config.max_seq_length <= recipe.max_seq_length
        for name in ("adapter", "base_dtype", "ep_size", "optim", "gradient_checkpointing"):
            assert getattr(config, name) == getattr(recipe, name)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_a_tiny_model_of_a_family(family: str, tmp_path: Path) -> None:
    """With a tokenizer and chat template, and problems whose answers are right and are not among those held out."""
    train, test = practice.make_records(50, seed=1)
    assert not {record["question"] for record in train} & {record["question"] for record in test}
    for record in (*train, *test):
        steps = re.findall(r"<<(\d+)([+-])(\d+)=(\d+)>>", record["answer"])
        for left, sign, right, result in steps:
            assert int(left) + int(sign + right) == int(result)
        assert record["answer"].endswith(f"#### {steps[-1][-1]}")
    practice.save_tokenizer(tmp_path, (record["question"] for record in train))
    assert save_model(tmp_path, family, 0, practice.SIZES) < 1_000_000
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == family
    tokens: Any = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([{"role": "user", "content": "12"}])
    assert model(torch.tensor([tokens["input_ids"]])).logits.isfinite().all()


@pytest.mark.slow
def test_the_rehearsal(tmp_path: Path) -> None:
    """Everything for a CPU, in the page's order, in a fresh directory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(command: str | list[str]) -> str:
        done = subprocess.run(
            command,
            shell=isinstance(command, str),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    (tmp_path / "train_ep.py").symlink_to(ROOT / "train_ep.py")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    said = ""
    for command in of_the_page(True):
        said += run(command + "".join(more for program, more in SHORT.items() if program in command))
    for code in (code for code in blocks(PAGE, "python") if ON_A_CPU in code):
        said += run([sys.executable, "-c", code])
    assert "exported to practice/full/hf" in said
    assert (tmp_path / "practice/full/report.html").exists()
    assert (tmp_path / "practice/lora/adapter/adapter_model.safetensors").exists()
