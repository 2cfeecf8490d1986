"""The exported model in other programs: EP shards and back bit for bit, the same words in llama.cpp, the same scores in
lm-eval."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.llama_cpp import LlamaCpp, llama_cpp, prompt
from benchmarks.real import ROWS, Batch, Trained, loaded, run
from expertmesh.moe.util.errors import ExpertMeshError
from tests.checkpoints.commands import run as run_command
from tests.real.conftest import KEPT, kept_packages
from tests.rounding import OTHER_ORDER
from tests.test_readmes import DOCS, blocks, commands

TOKENS = 60
LM_EVAL = "lm-eval==0.4.13"
PAGE = DOCS / "how-to" / "serve-evaluate-publish.md"
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Madrid", "seven"], "answer": 0},
    {"question": "The opposite of hot is", "choices": ["table", "cold", "green"], "answer": 1},
]


@pytest.fixture(scope="module")
def program() -> LlamaCpp:
    try:
        return llama_cpp(KEPT)
    except ExpertMeshError as error:
        pytest.skip(f"no llama.cpp: {error}")


@pytest.mark.slow
def test_to_shards_and_back(real_model: Path, tmp_path: Path) -> None:
    run_command("convert", real_model, tmp_path / "shards", "--ep-size", 2)
    run_command("export", tmp_path / "shards", tmp_path / "hf")
    assert run_command("verify", real_model, tmp_path / "hf").endswith("tensors, bitwise equal")


@pytest.mark.release
def test_the_same_words_in_llama_cpp(program: LlamaCpp, real_model: Path, batch: Batch, tmp_path: Path) -> None:
    """Of what was trained here, exported, and converted by its own script."""
    exported = run(ROWS["ep 2"], real_model, batch, tmp_path / "run", "--export").out / "hf"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = prompt(tokenizer, batch.records[0]["question"])
    ids_1S = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    made_1S = loaded(exported).generate(ids_1S, do_sample=False, max_new_tokens=TOKENS)
    words = program.answer(program.converted(exported, tmp_path / "model.gguf"), text, TOKENS)
    assert len(words) > 10
    assert words == made_1S[0, ids_1S.shape[1] :].tolist()
    assert torch.equal(made_1S[:, : ids_1S.shape[1]], ids_1S)


@pytest.fixture(scope="module")
def lm_eval() -> Path:
    """The packages of lm-eval, in the user's cache."""
    return kept_packages("lm-eval", LM_EVAL)


@pytest.mark.release
def test_scores_in_lm_eval(lm_eval: Path, real_model: Path, batch: Batch, tmp_path: Path) -> None:
    """By the page's commands and its task: an adapter beside its base scores as the merged model does, and both as
    transformers' own log-probabilities say."""
    Trained.by(real_model, batch, row := ROWS["LoRA, ep 2"], tmp_path)
    run(row, real_model, batch, tmp_path / "run", "--export", "--merge")
    merged, adapter = tmp_path / "run" / "hf", tmp_path / "run" / "adapter"
    (tasks := tmp_path / "tasks").mkdir()
    (task,) = blocks(PAGE, "yaml")
    (tasks / "mine.yaml").write_text(task, encoding="utf-8")
    (tasks / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS), encoding="utf-8")
    of_adapter, of_model = [line for line in commands(PAGE) if "lm_eval run" in line][1:]
    scores = {}
    for name, line in (("merged", of_model), ("peft", of_adapter.replace("gsm8k", "mine --include_path tasks"))):
        line = line.replace("=BASE", f"={real_model}").replace("=ADAPTER", f"={adapter}").replace("=HF", f"={merged}")
        words = [sys.executable, "-m", *line.split(), "--log_samples", "--output_path", name]
        environment = {**os.environ, "PYTHONPATH": str(lm_eval), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        (file,) = (tmp_path / name).rglob("samples_mine_*.jsonl")
        samples = sorted(
            map(json.loads, file.read_text(encoding="utf-8").splitlines()), key=lambda each: each["doc_id"]
        )
        scores[name] = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model, base = loaded(merged), loaded(real_model)
    pairs = [(each["question"], f" {choice}") for each in QUESTIONS for choice in each["choices"]]
    expected = [_log_likelihood(model, tokenizer, *pair) for pair in pairs]
    assert expected != pytest.approx([_log_likelihood(base, tokenizer, *pair) for pair in pairs], rel=100 * OTHER_ORDER)
    assert scores["merged"] == pytest.approx(expected, rel=OTHER_ORDER)
    assert scores["peft"] == pytest.approx(expected, rel=10 * OTHER_ORDER)


@torch.no_grad()
def _log_likelihood(model: Any, tokenizer: Any, text: str, continuation: str) -> float:
    """Of the continuation's tokens, added up."""
    given, whole = (len(tokenizer(text).input_ids), tokenizer(text + continuation, return_tensors="pt").input_ids)
    logprobs_SV = model(whole).logits[0, :-1].log_softmax(-1)
    return float(logprobs_SV.gather(-1, whole[0, 1:, None])[given - 1 :].sum())
