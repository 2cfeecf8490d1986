"""The exported model in other programs: EP shards and back bit for bit, and the same words in llama.cpp."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.llama_cpp import LlamaCpp, llama_cpp, prompt
from benchmarks.real import ROWS, Batch, loaded, run
from expertmesh.moe.util.errors import ExpertMeshError
from tests.checkpoints.commands import run as run_command
from tests.real.conftest import KEPT

TOKENS = 60


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
