"""What is not trained comes out of training as it went in: by the export, and from training checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from expertmesh.checkpoints.__main__ import main
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.untrained import PREDICTOR, SIDE_FILES, assert_same_bits, read, save_deepseek, save_multimodal


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def flags(model: Path, data: Path, out: Path, steps: int, *more: str) -> list[str]:
    return [
        "--model", str(model), "--dataset", str(data), "--output-dir", str(out), "--use-cpu", "--ep-size", "2",
        "--max-steps", str(steps), "--save-steps", "1", "--learning-rate", "1e-3", "--max-shard-size", "100KB", *more,
    ]  # fmt: skip


def train(ranks: RankPool, argv: list[str], code: int = 0) -> str:
    """What rank 0 wrote to standard error."""
    results = ranks.run(run_main, 2, argv, join_group=False)
    assert [found for found, _ in results] == [code, code], results
    return results[0][1]


def assert_loads(kind: Any, path: Path) -> Any:
    model, told = kind.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"]
    return model


def lines_about(names: Any, told: str) -> list[str]:
    return [line for line in told.splitlines() if any(line.startswith(f"{name}:") for name in names)]


@pytest.mark.slow
def test_a_multimodal_model(
    ranks: RankPool,
    tiny_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    untrained = save_multimodal(model)
    train(ranks, flags(model, tiny_data, out, 2))
    exported, before = read(out / "hf"), read(model)
    assert exported.keys() == before.keys()
    assert_same_bits(exported, untrained)
    assert any(not torch.equal(exported[name], before[name]) for name in before.keys() - untrained.keys())
    assert json.loads((out / "hf" / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    as_they_were = SIDE_FILES.keys() - {"generation_config.json"}
    assert {name: (out / "hf" / name).read_text() for name in as_they_were} == {n: SIDE_FILES[n] for n in as_they_were}
    # what answers to the data end with ends generation, too
    ends = [2, AutoTokenizer.from_pretrained(model).eos_token_id]
    assert json.loads((out / "hf" / "generation_config.json").read_text()) == {"eos_token_id": ends}
    assert_loads(AutoModelForImageTextToText, out / "hf")
    assert run("inspect", out / "hf", "--check") == 0, capsys.readouterr().out
    capsys.readouterr()
    assert run("verify", model, out / "hf") == 1, "the rest was trained"
    assert not lines_about(untrained, capsys.readouterr().out)

    # from a training checkpoint, which does not hold them
    saved = out / "checkpoints" / "step-00000002"
    assert run("export", saved, tmp_path / "from-checkpoint") == 0
    assert_same_bits(read(tmp_path / "from-checkpoint"), exported)
    assert run("verify", saved, out / "hf") == 0, capsys.readouterr().out
    assert not [warning for warning in recwarn if "torch.distributed is disabled" in str(warning.message)]
    assert run("inspect", saved, "--check") == 0, capsys.readouterr().out
    assert run("export", saved, model, "--overwrite") == 2, "it holds what is to be read"
    assert read(model).keys() == before.keys()

    # where the model has moved
    moved = model.rename(tmp_path / "moved")
    capsys.readouterr()
    assert run("export", saved, tmp_path / "lacking") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{len(untrained)} tensors that are not trained" in told
    assert f"is no longer in {model}" in told
    assert "--base" in told
    assert not (tmp_path / "lacking").exists()
    assert run("verify", saved, out / "hf") == 1
    assert run("export", saved, tmp_path / "with-base", "--base", moved) == 0
    assert_same_bits(read(tmp_path / "with-base"), exported)
    assert run("export", saved, tmp_path / "dropped", "--drop-untrained") == 0
    assert read(tmp_path / "dropped").keys() == before.keys() - untrained.keys()
    assert_loads(AutoModelForCausalLM, tmp_path / "dropped")
    assert run("convert", saved, tmp_path / "shards", "--ep-size", 2, "--drop-untrained") == 0
    assert run("verify", tmp_path / "shards", tmp_path / "dropped") == 0, capsys.readouterr().out

    # going on beside a model whose untrained part has changed
    name = f"{PREDICTOR}fc.weight"
    tensors = load_file(moved / "extra.safetensors")
    tensors[name] += 1
    save_file(tensors, moved / "extra.safetensors", metadata={"format": "pt"})
    assert run("export", saved, tmp_path / "changed", "--base", moved) == 2
    assert "extra.safetensors" in train(ranks, flags(moved, tiny_data, out, 3, "--resume", "auto"), code=2)
    resumed = flags(moved, tiny_data, out, 3, "--resume", "auto", "--allow-changed", "model")
    told = train(ranks, resumed, code=2)
    assert name in told
    assert "--drop-untrained" in told
    train(ranks, [*resumed, "--drop-untrained"])
    assert read(out / "hf").keys() == before.keys() - untrained.keys()
    assert_loads(AutoModelForCausalLM, out / "hf")
    assert run("export", out / "checkpoints" / "step-00000003", tmp_path / "as-trained") == 0
    assert_same_bits(read(tmp_path / "as-trained"), read(out / "hf"))
    assert (tmp_path / "as-trained" / "config.json").read_text() == (out / "hf" / "config.json").read_text()


@pytest.mark.release
def test_layers_beyond_the_last_from_shards(
    ranks: RankPool, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, shards, out = tmp_path / "model", tmp_path / "shards", tmp_path / "out"
    beyond = save_deepseek(model)
    assert run("convert", model, shards, "--ep-size", 4) == 0
    train(ranks, flags(shards, tiny_data, out, 1))
    assert read(out / "hf").keys() == read(model).keys()
    assert_same_bits(read(out / "hf"), beyond)
    assert_loads(AutoModelForCausalLM, out / "hf")
    capsys.readouterr()
    assert run("verify", model, out / "hf") == 1
    assert not lines_about(beyond, capsys.readouterr().out)
    # resumed from the form that the shards were made of: it is the same, in other files
    shutil.rmtree(shards)
    train(ranks, flags(model, tiny_data, out, 2, "--resume", "auto", "--allow-changed", "model"))
    assert_same_bits(read(out / "hf"), beyond)


@pytest.mark.slow
def test_an_adapter_merged(ranks: RankPool, tiny_data: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    untrained = save_multimodal(model)
    train(ranks, flags(model, tiny_data, out, 1, "--adapter", "lora", "--merge"))
    assert read(out / "hf").keys() == read(model).keys()
    assert_same_bits(read(out / "hf"), untrained)
    assert run("merge", model, out / "adapter", tmp_path / "merged") == 0
    assert_same_bits(read(tmp_path / "merged"), read(out / "hf"))
    assert_loads(AutoModelForImageTextToText, tmp_path / "merged")
    assert run("merge", model, out / "adapter", tmp_path / "dropped", "--drop-untrained") == 0
    assert read(tmp_path / "dropped").keys() == read(model).keys() - untrained.keys()
    assert_loads(AutoModelForCausalLM, tmp_path / "dropped")
