"""`verify` on checkpoints of different models: none may be called equal to another, in whichever form and order."""

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.ep_shards.manifest import read_manifest
from expertmesh.checkpoints.files.checksums import file_checksum, seal
from expertmesh.checkpoints.files.file_layout import DiskTensor, Region
from expertmesh.checkpoints.hf.reader import tied_copies_that_differ
from expertmesh.checkpoints.hf.source import Checkpoint, ModelSource, read_header
from expertmesh.checkpoints.verify import _NOT_COMPUTED, _computed
from tests.tiny import save_model, tiny_config, tiny_mixtral

EXPERTS = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
SIZES: dict[str, Any] = dict(num_hidden_layers=2, num_local_experts=4, vocab_size=64)


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One model per expert, with fused experts, and as EP shards."""
    root = tmp_path_factory.mktemp("one")
    save_model(root / "hf", **SIZES)
    save_model(root / "fused", **SIZES, save_original_format=False)
    assert run("convert", root / "hf", root / "shards", "--ep-size", 2) == 0
    return [root / "hf", root / "fused", root / "shards"]


def _edited(
    source: Path, out: Path, change: Callable[[dict[str, Tensor]], None] = lambda _: None, **config: Any
) -> None:
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**said, **config}))


def _fewer_layers(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def _larger_vocabulary(tensors: dict[str, Tensor]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.zeros_like(tensors[name])])


def _fewer_experts(tensors: dict[str, Tensor]) -> None:
    for layer, expert, matrix in product(range(2), (2, 3), ("w1", "w2", "w3")):
        del tensors[EXPERTS.format(layer, expert, matrix)]
    for layer in range(2):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        tensors[name] = tensors[name][:2].contiguous()


def _narrower_experts(tensors: dict[str, Tensor]) -> None:
    for layer, expert in product(range(2), range(4)):
        for matrix, dim in (("w1", 0), ("w2", 1), ("w3", 0)):
            name = EXPERTS.format(layer, expert, matrix)
            tensors[name] = tensors[name].narrow(dim, 0, 32).contiguous()


def _tied(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def _one_value(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERTS.format(1, 3, "w2")][5, 7] += 1e-6


def _nothing(tensors: dict[str, Tensor]) -> None:
    pass


DIFFERENT: dict[str, tuple[Callable[[dict[str, Tensor]], None], dict[str, Any], list[str]]] = {
    "layers": (_fewer_layers, {"num_hidden_layers": 1}, ["num_hidden_layers", "1.input_layernorm.weight: only in"]),
    "vocabulary": (_larger_vocabulary, {"vocab_size": 128}, ["vocab_size", "embed_tokens.weight: shape", "lm_head"]),
    "experts": (_fewer_experts, {"num_local_experts": 2}, ["num_local_experts", "gate.weight: shape", "only in"]),
    "width": (_narrower_experts, {"intermediate_size": 32}, ["intermediate_size", "shape"]),
    "tied": (_tied, {"tie_word_embeddings": True}, ["tie_word_embeddings", "lm_head.weight"]),
    "choices": (_nothing, {"num_experts_per_tok": 1}, ["num_experts_per_tok is"]),
    "positions": (_nothing, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ["rope_theta is"]),
    "one value": (_one_value, {}, ["1 of"]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", list(DIFFERENT))
def test_a_different_model_is_never_equal(
    forms: list[Path], tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, config, named = DIFFERENT[case]
    other = tmp_path / "other"
    _edited(forms[0], other, change, **config)
    assert run("convert", other, tmp_path / "shards", "--ep-size", 2) == 0
    for one, another in ((form, different) for form in forms for different in (other, tmp_path / "shards")):
        for pair in ((one, another), (another, one)):
            capsys.readouterr()
            assert run("verify", *pair) == 1
            told = capsys.readouterr().out
            assert all(part in told for part in named), told
    is_config_alone = change is _nothing
    assert run("verify", forms[0], other, "--ignore-config") == (0 if is_config_alone else 1)
    # a tolerance for values is none for what only one side has
    assert run("verify", forms[0], other, "--rtol", 0.1) == (0 if case == "one value" else 1)


def test_each_tensor_of_one_side_alone_is_named(
    forms: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _edited(forms[0], tmp_path / "other", _fewer_layers, num_hidden_layers=1)
    lost = {name for name in load_file(forms[0] / "model.safetensors") if ".layers.1." in name}
    for pair in ((forms[0], tmp_path / "other"), (tmp_path / "other", forms[0])):
        capsys.readouterr()
        assert run("verify", *pair, "--ignore-config") == 1
        *lines, last = capsys.readouterr().out.splitlines()
        assert {line.partition(":")[0] for line in lines} == lost
        assert all(f"only in {forms[0]}" in line for line in lines)
        assert last == f"{len(lost)} differences in {len(load_file(forms[0] / 'model.safetensors'))} tensors"


def test_a_tied_copy_that_differs_from_its_twin(
    forms: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _edited(forms[0], tmp_path / "copy", tie_word_embeddings=True)
    _edited(forms[0], tmp_path / "tied", _tied, tie_word_embeddings=True)
    assert run("verify", tmp_path / "tied", tmp_path / "copy") == 1
    assert "lm_head.weight: differs from model.embed_tokens.weight, its tied twin" in capsys.readouterr().out
    assert run("inspect", tmp_path / "tied", "--check") == 0
    assert run("inspect", tmp_path / "copy", "--check") == 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in " ".join(capsys.readouterr().out.split())


CONFIGS: list[dict[str, Any]] = [
    *({"num_hidden_layers": number} for number in (1, 3)),
    *({"num_local_experts": number} for number in (2, 8)),
    *({"vocab_size": number} for number in (32, 128)),
    *({"intermediate_size": number} for number in (32, 64)),
    *({"hidden_size": 64}, {"num_key_value_heads": 4}, {"tie_word_embeddings": True}),
]


def test_inspect_of_what_another_config_describes(
    forms: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole in itself, of a model with more or less of something; EP shards too, whose manifest knows the config."""
    for form, change in product((forms[0], forms[2]), CONFIGS):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(form, other)
        file = other / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        if (other / "manifest.json").exists():
            manifest = read_manifest(form)
            del manifest["checksum"]
            manifest["files"]["config.json"].update(bytes=file.stat().st_size, xxh3_128=file_checksum(file))
            (other / "manifest.json").write_text(json.dumps(seal(manifest)))
        assert run("inspect", other, "--check") != 0, (form, change)
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        assert "complete    no" in told.out or "config.json describes" in told.err or "is missing from" in told.err, (
            told
        )


def test_a_tied_copy_of_what_lies_in_several_tensors(tmp_path: Path) -> None:
    whole = torch.arange(5000.0).view(2500, 2)
    upper = DiskTensor("upper", (1100, 2), (Region("e", range(1100)),))
    rest = DiskTensor("lower", (1400, 2), (Region("e", range(1100, 2500)),))
    copy = DiskTensor("copy", (2500, 2), (Region("e", range(2500)),))
    for place, differs in ((None, False), (0, True), (1099, True), (1100, True), (2499, True)):
        repeated = whole.clone()
        if place is not None:
            repeated[place, 1] += 1
        parts = {"upper": whole[:1100].clone(), "lower": whole[1100:].clone(), "copy": repeated}
        save_file(parts, tmp_path / "model.safetensors")
        infos = read_header(tmp_path / "model.safetensors")
        checkpoint = Checkpoint(ModelSource(tmp_path, ""), [upper, rest], [copy], infos, [])
        assert list(tied_copies_that_differ(checkpoint)) == ([(copy, "e")] if differs else [])


def test_an_adapter_is_no_model(forms: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for pair in ((forms[0], tmp_path), (tmp_path, forms[0])):
        assert run("verify", *pair) == 2
        assert f"{tmp_path} is an adapter" in " ".join(capsys.readouterr().err.split())


def test_what_is_not_compared_of_configs_changes_no_logit_and_no_loss() -> None:
    ids = torch.arange(12)[None]
    others: dict[str, Any] = {
        **{name: 7 for name in _NOT_COMPUTED if name.endswith("token_id")},
        **{"initializer_range": 1.0, "use_cache": False, "architectures": ["Other"], "transformers_version": "0"},
        **{"id2label": {0: "a", 1: "b", 2: "c"}, "problem_type": "regression", "output_hidden_states": True},
    }
    assert others.keys() <= _NOT_COMPUTED
    plain, changed = tiny_config(), MixtralConfig(**{**tiny_config().to_dict(), **others})
    assert dict(_computed(plain.to_dict())) == dict(_computed(changed.to_dict()))
    logits, loss = [], []
    for config in (plain, changed):
        model = tiny_mixtral()
        weights = model.state_dict()
        other = type(model)(config)
        other.load_state_dict(weights)
        found = other(input_ids=ids, labels=ids)
        logits.append(found.logits)
        loss.append(found.loss)
    assert torch.equal(*logits)
    assert torch.equal(*loss)
