"""What is not trained comes out of training as it went in: by the export, and from training checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from expertmesh.checkpoints.__main__ import main
from tests.distributed.whole_runs import Runs
from tests.untrained import PREDICTOR, SIDE_FILES, assert_same_bits, read, save_multimodal


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


FLAGS = "--ep-size 2 --save-steps 1 --learning-rate 1e-3 --max-shard-size 100KB --max-steps"


def assert_loads(kind: Any, path: Path) -> None:
    _, told = kind.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"]


@pytest.mark.slow
def test_a_multimodal_model(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    model = tmp_path / "model"
    untrained = save_multimodal(model)
    ended = runs(2, f"--model {model} {FLAGS} 2")
    out = ended.out
    exported, before = read(out / "hf"), read(model)
    assert exported.keys() == before.keys()
    assert_same_bits(exported, untrained)
    assert any(not torch.equal(exported[name], before[name]) for name in before.keys() - untrained.keys())
    as_they_were = SIDE_FILES.keys() - {"generation_config.json"}
    assert {name: (out / "hf" / name).read_text() for name in as_they_were} == {n: SIDE_FILES[n] for n in as_they_were}
    # what answers to the data end with ends generation, too
    ends = [2, AutoTokenizer.from_pretrained(model).eos_token_id]
    assert json.loads((out / "hf" / "generation_config.json").read_text()) == {"eos_token_id": ends}
    config = json.loads((model / "config.json").read_text())
    end = {"eos_token_id": ends[1]}
    said = {**config, **end, "text_config": {**config["text_config"], **end}}
    assert json.loads((out / "hf" / "config.json").read_text()) == said
    assert_loads(AutoModelForImageTextToText, out / "hf")
    assert run("inspect", out / "hf", "--check") == 0, capsys.readouterr().out
    capsys.readouterr()
    assert run("verify", model, out / "hf") == 1, "the rest was trained"
    told = capsys.readouterr().out
    assert not [line for line in told.splitlines() if any(line.startswith(f"{name}:") for name in untrained)]

    # from a training checkpoint, which does not hold them
    saved = ended.checkpoint(2)
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
    resumed = f"--model {moved} {FLAGS} 3 --resume auto"
    runs.refuses(2, resumed, "extra.safetensors")
    resumed += " --allow-changed model"
    runs.refuses(2, resumed, name, "--drop-untrained")
    runs(2, f"{resumed} --drop-untrained")
    assert read(out / "hf").keys() == before.keys() - untrained.keys()
    assert_loads(AutoModelForCausalLM, out / "hf")
    assert run("export", out / "checkpoints" / "step-00000003", tmp_path / "as-trained") == 0
    assert_same_bits(read(tmp_path / "as-trained"), read(out / "hf"))
    assert (tmp_path / "as-trained" / "config.json").read_text() == (out / "hf" / "config.json").read_text()


@pytest.mark.slow
def test_an_adapter_merged(runs: Runs, tmp_path: Path) -> None:
    model = tmp_path / "model"
    untrained = save_multimodal(model)
    out = runs(2, f"--model {model} {FLAGS} 1 --adapter lora --merge").out
    assert read(out / "hf").keys() == read(model).keys()
    assert_same_bits(read(out / "hf"), untrained)
    assert run("merge", model, out / "adapter", tmp_path / "merged") == 0
    assert_same_bits(read(tmp_path / "merged"), read(out / "hf"))
    assert_loads(AutoModelForImageTextToText, tmp_path / "merged")
    assert run("merge", model, out / "adapter", tmp_path / "dropped", "--drop-untrained") == 0
    assert read(tmp_path / "dropped").keys() == read(model).keys() - untrained.keys()
    assert_loads(AutoModelForCausalLM, tmp_path / "dropped")
