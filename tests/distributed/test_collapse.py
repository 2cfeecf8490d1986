"""Router collapse in whole runs: a healthy random model of a family warns of none, a collapsed one within ten steps.

Overload is told at the end of a run that is shorter than a window."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import practice
from tests.distributed.whole_runs import Runs
from tests.families.configs import tiny_config

pytestmark = pytest.mark.slow
BALANCED_BY = {"deepseek_v3": "--router-bias-update-rate 0.001"}
"""By family; else by the loss."""
SCORES = ("gate.weight", "router.weight", "router.layer.weight")
BIASES = ("e_score_correction_bias", "router.bias")


@pytest.fixture(scope="module")
def practice_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("practice")
    records, _ = practice.make_records(600, seed=0)
    (directory / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    practice.save_tokenizer(directory, (f"{record['question']}\n{record['answer']}" for record in records))
    return directory


def save_model(path: Path, family: str, tokenizer: Any, is_collapsed: bool) -> None:
    """A random one; collapsed, its routers choose experts 0 and 1 for all tokens: by a bias, or by what is the same in
    all tokens."""
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    torch.manual_seed(0)
    config = tiny_config(family, vocab_size=len(tokenizer), max_position_embeddings=1024, **special)
    model = AutoModelForCausalLM.from_config(config)
    if is_collapsed:
        with torch.no_grad():
            model.get_input_embeddings().weight[:, 0] = 1.0
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith(SCORES):
                    tensor[:, 0] = torch.tensor([4.0] * 2 + [-4.0] * (len(tensor) - 2))
                elif name.endswith(BIASES):
                    tensor[:] = torch.tensor([10.0] * 2 + [-10.0] * (len(tensor) - 2))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_collapsed", [False, True], ids=["healthy", "collapsed"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_who_is_warned_of_a_collapse(runs: Runs, practice_files: Path, family: str, is_collapsed: bool) -> None:
    path = runs.directory / family
    save_model(path, family, AutoTokenizer.from_pretrained(practice_files), is_collapsed)
    balanced = BALANCED_BY.get(family, "--router-aux-loss-coef 0.02")
    flags = f"--per-device-train-batch-size 8 --max-seq-length 256 --learning-rate 3e-3 --warmup-ratio 0.05 {balanced}"
    data = practice_files / "data.jsonl"
    ended = replace(runs, model=path, data=data)(1, f"{flags} --max-steps {10 if is_collapsed else 60} --no-export")
    assert ended.values("loss")[-1] < ended.values("loss")[0]
    found = [(line["step"], line["warning"]) for line in ended.lines("warning") if "router" in line["warning"]]
    assert [step for step, _ in found] == [10] * is_collapsed
    assert all("router collapse: in 10 steps, 6 of the 8 experts of layer 0 got no token" in text for _, text in found)


def test_overload_is_told_at_the_end_of_a_short_run(runs: Runs, practice_files: Path) -> None:
    """A router that nothing keeps balanced: four experts' worth of tokens go to one, and none is without a token."""
    path = runs.directory / "unbalanced"
    save_model(path, "qwen3_moe", AutoTokenizer.from_pretrained(practice_files), is_collapsed=False)
    flags = "--per-device-train-batch-size 8 --max-seq-length 256 --learning-rate 3e-3 --warmup-ratio 0.05"
    unbalanced = replace(runs, model=path, data=practice_files / "data.jsonl")
    ended = unbalanced(1, f"{flags} --max-steps 50 --no-export")
    (warning,) = (line for line in ended.lines("warning") if "router" in line["warning"])
    assert warning["step"] == 50
    assert re.match(r"uneven router: expert \d of layer \d got 3\.\d\d times the mean in 50 steps", warning["warning"])
