"""Layers for multi-token prediction without ranks: which are found, what a batch tells them, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import expertmesh
from expertmesh.checkpoints.ep_shards.manifest import open_checkpoint
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.hf_model.mtp import find_mtp, mtp_of
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.collectives.context_parallel import CPGroup
from expertmesh.training.config.train_config import parse_config
from expertmesh.training.data.batch import IGNORED, BatchMaker, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.planning.rehearsal.building import ConfigAlone
from tests.checkpoints.commands import run
from tests.mtp import predicting, save

NEEDED = ["--model", "m", "--dataset", "d", "--train-mtp"]
LAYERS = [
    f"model.layers.{n}.{name}"
    for n in range(2)
    for name in ("self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.gate.weight")
]
NUMBERED = [
    *(name.replace("layers.1", "layers.2") for name in LAYERS[3:]),
    *(f"model.layers.2.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens")),
]
APART = [
    *("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"),
    *(name.replace("model.layers.1", "mtp.layers.0") for name in LAYERS[3:]),
]


def test_both_kinds_are_found() -> None:
    numbered, apart = find_mtp(LAYERS + NUMBERED, 2), find_mtp(LAYERS + APART, 2)
    assert (numbered.number, numbered.like, numbered.is_apart) == (2, 1, False)
    assert (apart.number, apart.like, apart.is_apart) == (2, 1, True)
    # experts in one tensor are the same modules
    fused = [name.replace("experts.0.up_proj.weight", "experts.gate_up_proj") for name in APART]
    assert find_mtp(LAYERS + fused, 2) == apart


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "brings no layer for multi-token prediction: it has no tensors of layers beyond the 2 of config.json"),
        (NUMBERED + [name.replace("layers.2", "layers.3") for name in NUMBERED], r"brings 2 layers .* \(2 to 3\)"),
        ([name for name in NUMBERED if "hnorm" not in name and "eh_proj" not in name], "it has no hnorm, eh_proj"),
        ([name for name in APART if "mtp.norm" not in name], "it has no shared_head.norm"),
        ([*NUMBERED, "model.layers.2.self_attn.sinks"], "it differs from all .* in self_attn.sinks"),
        ([*APART, "mtp.fc_embedding.weight"], "it differs from all .* in mtp.fc_embedding"),
        ([*APART, *(name.replace("mtp.layers.0", "mtp.layers.1") for name in APART)], "in mtp.layers"),
    ],
)
def test_others_are_refused_by_name(names: list[str], said: str) -> None:
    with pytest.raises(ExpertMeshError, match=f"--train-mtp: the checkpoint.*{said}"):
        find_mtp(LAYERS + names, 2)


@pytest.mark.parametrize("flags", ["--adapter lora", "--task dpo", "--task kto", "--teacher t", "--compile"])
def test_what_does_not_go_together(flags: str) -> None:
    with_others = f"--train-mtp: does not work with {flags.removesuffix(' t')}"
    said = f"--train-mtp 0.1: {flags} does not read it" if "--task" in flags else with_others
    with pytest.raises(ExpertMeshError, match=said):
        parse_config([*NEEDED, *flags.split()])


@pytest.mark.parametrize(("given", "weight"), [("", 0.1), ("0.3", 0.3), ("true", 0.1), ("false", 0.0)])
def test_the_weight(given: str, weight: float, tmp_path: Path) -> None:
    assert parse_config([*NEEDED, *given.split()]).train_mtp == weight
    if given:
        (tmp_path / "run.yaml").write_text(f"train_mtp: {given}\n")
        assert parse_config([*NEEDED[:-1], "--config", str(tmp_path / "run.yaml")]).train_mtp == weight


def test_a_batch_says_what_follows_within_each_sample() -> None:
    samples = [([5, 6, 7, 8], [False, True, True, True]), ([9, 10], [True, True]), ([11, 12, 13], [True, False, True])]
    row = [Sample(*sample) for sample in samples]
    ahead = collate([row], maker=BatchMaker(12, looks_ahead=True)).ahead
    assert ahead is not None
    assert ahead.tokens_BS.tolist() == [[6, 7, 8, 0, 10, 0, 12, 13, 0, 0, 0, 0]]
    after = [7, 8, IGNORED, IGNORED, IGNORED, IGNORED, 13, *[IGNORED] * 5]
    assert ahead.targets.targets_BS.tolist() == [after]
    assert ahead.targets.index_N.tolist() == [0, 1, 6]
    # a part of each sequence is told of what follows it
    parts = [collate([row], CPGroup(3, index, None), BatchMaker(12, looks_ahead=True)).ahead for index in range(3)]
    assert torch.cat([part.tokens_BS for part in parts if part], dim=1).tolist() == ahead.tokens_BS.tolist()
    assert [part.num_targets for part in parts if part] == [(2, 1, 0)] * 3
    assert collate([row]).ahead is None


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek") / "model"
    save(predicting("deepseek_v3"), path)
    return path


def test_a_repeated_head_that_differs_becomes_the_models_own(deepseek: Path, tmp_path: Path) -> None:
    """It is out of date where a model was trained without its layer."""
    source = open_source(deepseek).training_mtp()
    checkpoint = open_checkpoint(source, source.names)
    copies = {copy.name for copy in checkpoint.tied_copies}
    assert copies == {f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    assert not checkpoint.carried
    shutil.copytree(deepseek, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.shared_head.head.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    engine = expertmesh.load(str(tmp_path / "other"), use_cpu=True, train_mtp=True)
    engine.export(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert torch.equal(exported["model.layers.3.shared_head.head.weight"], tensors["lm_head.weight"])
    original = load_file(deepseek / "model.safetensors")
    assert all(torch.equal(tensor, original[name]) for name, tensor in exported.items())
    torch.distributed.destroy_process_group()


def test_shards_are_refused(deepseek: Path, tmp_path: Path) -> None:
    run("convert", deepseek, tmp_path / "shards", "--ep-size", 2)
    with pytest.raises(ExpertMeshError, match=r"--train-mtp: .* is not in Hugging Face form"):
        open_source(tmp_path / "shards").training_mtp()


def test_a_config_has_one_layer_more(deepseek: Path) -> None:
    source: Any = open_source(deepseek).training_mtp()
    assert source.text_config.num_hidden_layers == 4
    assert json.loads((deepseek / "config.json").read_text())["num_hidden_layers"] == 3


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe"])
def test_a_forecast_has_the_layer_that_a_checkpoint_brings(family: str, tmp_path: Path) -> None:
    """Which it does not read: all tensors of the run's model, by name and shape."""
    save(predicting(family), tmp_path)
    source = open_source(tmp_path).training_mtp()
    forecast = ConfigAlone(replace(source, mtp=None).config, has_mtp=True).build("auto")

    def shapes(model: Any) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    assert shapes(forecast) == shapes(source.build())
    assert mtp_of(forecast) == replace(source.mtp, is_apart=False)  # type: ignore[type-var]
