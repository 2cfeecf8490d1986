"""Files beside a model's weights: which go along, and what config.json says in a copy."""

import json
import os
from pathlib import Path

import pytest
import transformers

from expertmesh.checkpoints.hf.side_files import plan_beside_adapter, plan_side_files, side_files
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.hf_model.family_exceptions import LLAMA_CPP_NORMALISES
from expertmesh.moe.util.errors import ExpertMeshError
from tests.checkpoints.commands import run
from tests.families.configs import tiny_config, tiny_model

ALONG = {
    "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "modeling_own.py", "LICENSE.txt",
    "additional_chat_templates/rag.jinja", "preprocessor_config.json",
}  # fmt: skip
NOT_ALONG = {
    "model.safetensors.index.json", "manifest.json", "checkpoint.json", "adapter_config.json", "quantize_config.json",
    "README.md", "model.safetensors", "original/params.json",
}  # fmt: skip
OF_TOKENIZER = {"tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    for name in ALONG | NOT_ALONG:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f'{{"is": "{name}"}}')
    tiny_config("mixtral").save_pretrained(path)
    return path


def files_of(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def test_which_go_along(model: Path) -> None:
    assert set(side_files(model)) == ALONG
    assert set(side_files(model, quantized=True)) == ALONG | {"quantize_config.json"}


def test_a_copy_has_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """And says what transformers reads of the source: not that its tensors are quantized, if they no longer are."""
    config = json.loads((model / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (model / "config.json").write_text(json.dumps(quantized))
    out = tmp_path / "out"
    out.mkdir()
    plan_side_files(open_source(model)).write(out)
    assert files_of(out) == ALONG
    assert all((out / name).read_bytes() == (model / name).read_bytes() for name in ALONG - {"config.json"})
    assert json.loads((out / "config.json").read_text()) == config
    assert transformers.AutoConfig.from_pretrained(out).to_diff_dict() == tiny_config("mixtral").to_diff_dict()


def test_beside_an_adapter(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    plan_beside_adapter(open_source(model), None).write(out)
    assert files_of(out) == OF_TOKENIZER | {"LICENSE.txt"}


def test_what_is_not_copied_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    (model / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ExpertMeshError, match=r"notes\.txt"):
        side_files(model)
    (model / "notes.txt").unlink()
    # links of a cache, as the Hugging Face hub's, are those of config and tokenizer
    (model / "tokenizer.json").rename(tmp_path / "blob")
    (model / "tokenizer.json").symlink_to(tmp_path / "blob")
    assert "tokenizer.json" in side_files(model)
    with (model / "large.txt").open("wb") as file:
        os.truncate(file.fileno(), 2**30 + 1)
    with pytest.raises(ExpertMeshError, match=r"large\.txt: has 1,073,741,825 bytes"):
        side_files(model)


@pytest.mark.parametrize("family", LLAMA_CPP_NORMALISES)
def test_what_llama_cpp_takes_otherwise_is_told(tmp_path: Path, family: str) -> None:
    for is_normalised in (False, True):
        model, made = tmp_path / f"{is_normalised}", tmp_path / f"made {is_normalised}"
        tiny_model(family, 0, norm_topk_prob=is_normalised).save_pretrained(model)
        told = run("export", model, made)
        is_told = f"norm_topk_prob is {json.dumps(is_normalised)}, which llama.cpp takes for" in told
        assert is_told is (LLAMA_CPP_NORMALISES[family] is not is_normalised), told
