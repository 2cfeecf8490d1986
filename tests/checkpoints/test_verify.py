"""`verify` on checkpoints of different models: none may be called equal to another, in whichever form and order."""

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from expertmesh.checkpoints.files.checksums import file_checksum
from expertmesh.checkpoints.files.tensors import DiskTensor, Region
from expertmesh.checkpoints.hf.checkpoint import Checkpoint
from expertmesh.checkpoints.hf.headers import read_header
from expertmesh.checkpoints.hf.reader import tied_copies_that_differ
from expertmesh.checkpoints.hf.source import ModelSource
from expertmesh.checkpoints.verify import _NOT_COMPUTED, _computed, _difference
from tests.checkpoints.commands import Tensors, change_manifest, change_tensors, lines, run
from tests.tiny import save_model, tiny_config, tiny_mixtral

EXPERTS = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
SIZES: dict[str, Any] = dict(num_hidden_layers=2, num_local_experts=4, vocab_size=64)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One model per expert, with fused experts, and as EP shards."""
    root = tmp_path_factory.mktemp("one")
    save_model(root / "hf", **SIZES)
    save_model(root / "fused", **SIZES, save_original_format=False)
    run("convert", root / "hf", root / "shards", "--ep-size", 2)
    return [root / "hf", root / "fused", root / "shards"]


def _edited(source: Path, out: Path, change: Callable[[Tensors], Any] = lambda _: None, **config: Any) -> None:
    shutil.copytree(source, out)
    change_tensors(out / "model.safetensors", change)
    said = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**said, **config}))


def _fewer_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def _larger_vocabulary(tensors: Tensors) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.zeros_like(tensors[name])])


def _fewer_experts(tensors: Tensors) -> None:
    for layer, expert, matrix in product(range(2), (2, 3), ("w1", "w2", "w3")):
        del tensors[EXPERTS.format(layer, expert, matrix)]
    for layer in range(2):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        tensors[name] = tensors[name][:2].contiguous()


def _narrower_experts(tensors: Tensors) -> None:
    for layer, expert in product(range(2), range(4)):
        for matrix, dim in (("w1", 0), ("w2", 1), ("w3", 0)):
            name = EXPERTS.format(layer, expert, matrix)
            tensors[name] = tensors[name].narrow(dim, 0, 32).contiguous()


def _swap(a: str, b: str, tensors: Tensors) -> None:
    tensors[a], tensors[b] = tensors[b], tensors[a]


def _swap_experts(tensors: Tensors) -> None:
    for matrix in ("w1", "w2", "w3"):
        _swap(EXPERTS.format(0, 1, matrix), EXPERTS.format(0, 3, matrix), tensors)


def _tied(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def _nothing(tensors: Tensors) -> None:
    pass


def _matrix(layer: int, expert: int, theirs: str) -> str:
    """A pattern of an expert's matrix: by its name, or of a fused tensor."""
    ours = {"w3": "v1"}.get(theirs, theirs)
    return rf"layers\.{layer}\.\S*experts(\.{expert}\.{theirs}\.weight|\.\S+ \(expert {expert}, {ours}\)): "


VALUE, SURPLUS = EXPERTS.format(1, 3, "w2"), "model.surplus.weight"
GATE, UP = (EXPERTS.format(0, 2, matrix) for matrix in ("w1", "w3"))
DIFFERENT: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], list[str]]] = {
    # what becomes of tensors and config, and patterns of what is named
    "layers": (_fewer_layers, {"num_hidden_layers": 1}, ["num_hidden_layers", "1.input_layernorm.weight: only in"]),
    "vocabulary": (_larger_vocabulary, {"vocab_size": 128}, ["vocab_size", "embed_tokens.weight: shape", "lm_head"]),
    "experts": (_fewer_experts, {"num_local_experts": 2}, ["num_local_experts", "gate.weight: shape", "only in"]),
    "width": (_narrower_experts, {"intermediate_size": 32}, ["intermediate_size", "shape"]),
    "tied": (_tied, {"tie_word_embeddings": True}, ["tie_word_embeddings", "lm_head.weight"]),
    "choices": (_nothing, {"num_experts_per_tok": 1}, ["num_experts_per_tok is"]),
    "positions": (_nothing, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ["rope_theta is"]),
    "one value": (lambda t: t[VALUE][5, 7].add_(1e-6), {}, [_matrix(1, 3, "w2") + "1 of"]),
    "one bit": (lambda t: t[VALUE].view(torch.int32)[5, 7].bitwise_xor_(1), {}, [_matrix(1, 3, "w2") + "1 of"]),
    "experts swapped": (_swap_experts, {}, [_matrix(0, n, w) for n in (1, 3) for w in ("w1", "w2", "w3")]),
    "gate and up swapped": (lambda t: _swap(GATE, UP, t), {}, [_matrix(0, 2, "w1"), _matrix(0, 2, "w3")]),
    "one tensor less": (lambda t: t.pop("model.norm.weight"), {}, ["model.norm.weight is missing"]),
    "one tensor more": (lambda t: t.update({SURPLUS: torch.zeros(3)}), {}, [f"{SURPLUS} has no place"]),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", list(DIFFERENT))
def test_a_different_model_is_never_equal(forms: list[Path], tmp_path: Path, case: str) -> None:
    change, config, named = DIFFERENT[case]
    other = tmp_path / "other"
    _edited(forms[0], other, change, **config)
    others = [other]
    if not case.startswith("one tensor"):  # of which no shards can be made
        run("convert", other, tmp_path / "shards", "--ep-size", 2)
        others.append(tmp_path / "shards")
    # each form first and second, and before each of the others or behind it
    for (number, one), (column, another) in product(enumerate(forms), enumerate(others)):
        pair = (one, another) if (number + column) % 2 else (another, one)
        told = lines("verify", *pair, code=1)
        assert all(any(re.search(part, line) for line in told) for part in named), told
        assert config or len(told) == len(named) + 1, told
    is_config_alone = change is _nothing
    run("verify", forms[0], other, "--ignore-config", code=0 if is_config_alone else 1)
    # a tolerance for values is none for what only one side has
    run("verify", forms[0], other, "--rtol", 0.1, code=0 if case in ("one value", "one bit") else 1)


@pytest.mark.parametrize("rtol", [0.08, 0.095, 0.105])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_tolerance_is_the_same_both_ways_round(rtol: float, by_row: bool) -> None:
    """Relative to the larger of two values, as in math.isclose: numpy's and torch's allclose take the second."""
    a, b = (np.array([[first, 0.5], [-3.0, 2.0]], np.float32) for first in (1.0, 1.1))
    found = {_difference(one, "F32", other, "F32", rtol, by_row) for one, other in ((a, b), (b, a))}
    assert len(found) == 1
    if not by_row:
        close = [math.isclose(one, other, rel_tol=rtol) for one, other in zip(a.flat, b.flat, strict=True)]
        assert (found == {None}) == all(close)
    assert (found == {None}) == (rtol > 0.1 / 1.1)


def test_each_tensor_of_one_side_alone_is_named(forms: list[Path], tmp_path: Path) -> None:
    _edited(forms[0], tmp_path / "other", _fewer_layers, num_hidden_layers=1)
    names = load_file(forms[0] / "model.safetensors").keys()
    lost = {name for name in names if ".layers.1." in name}
    for pair in ((forms[0], tmp_path / "other"), (tmp_path / "other", forms[0])):
        *told, last = lines("verify", *pair, "--ignore-config", code=1)
        assert {line.partition(":")[0] for line in told} == lost
        assert all(f"only in {forms[0]}" in line for line in told)
        assert last == f"{len(lost)} differences in {len(names)} tensors"


def test_a_tied_copy_that_differs_from_its_twin(forms: list[Path], tmp_path: Path) -> None:
    _edited(forms[0], tmp_path / "copy", tie_word_embeddings=True)
    _edited(forms[0], tmp_path / "tied", _tied, tie_word_embeddings=True)
    told = run("verify", tmp_path / "tied", tmp_path / "copy", code=1)
    assert "lm_head.weight: differs from model.embed_tokens.weight, which config.json ties to it" in told
    run("inspect", tmp_path / "tied", "--check")
    assert "lm_head.weight differs from model.embed_tokens.weight" in run(
        "inspect", tmp_path / "copy", "--check", code=1
    )


def test_a_config_that_says_otherwise_of_the_head_than_the_files(forms: list[Path], tmp_path: Path) -> None:
    """Nothing is written of either, but the remedy said; with that, transformers loads the same weights."""
    _edited(forms[0], both := tmp_path / "both", tie_word_embeddings=True)
    _edited(forms[0], one := tmp_path / "one", _tied, tie_word_embeddings=False)
    for model, said, tied in (
        (both, "set tie_word_embeddings to false", False),
        (one, "set tie_word_embeddings to true", True),
    ):
        for command in (("export", model, tmp_path / "out"), ("convert", model, tmp_path / "out", "--ep-size", 2)):
            told = run(*command, code=2)
            assert "lm_head.weight" in told
            assert said in told
        assert not (tmp_path / "out").exists()
        _edited(model, mended := tmp_path / f"{model.name} mended", tie_word_embeddings=tied)
        run("export", mended, out := tmp_path / f"{model.name} exported")
        exported, expected = (AutoModelForCausalLM.from_pretrained(path) for path in (out, mended))
        assert (exported.lm_head.weight is exported.model.embed_tokens.weight) is tied
        assert all(torch.equal(x, exported.state_dict()[name]) for name, x in expected.state_dict().items())


CONFIGS: list[dict[str, Any]] = [
    *({"num_hidden_layers": number} for number in (1, 3)),
    *({"num_local_experts": number} for number in (2, 8)),
    *({"vocab_size": number} for number in (32, 128)),
    *({"intermediate_size": number} for number in (32, 64)),
    *({"hidden_size": 64}, {"num_key_value_heads": 4}, {"tie_word_embeddings": True}),
]


def _described_by(form: Path, other: Path, change: dict[str, Any]) -> None:
    """A copy whose config.json says something else; EP shards too, whose manifest knows the file."""
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(form, other)
    file = other / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    entry = {"bytes": file.stat().st_size, "xxh3_128": file_checksum(file)}
    if (other / "manifest.json").exists():
        change_manifest(other, lambda manifest: manifest["files"]["config.json"].update(entry))


def test_inspect_of_what_another_config_describes(forms: list[Path], tmp_path: Path) -> None:
    """Whole in itself, of a model with more or less of something."""
    for form, change in product((forms[0], forms[2]), CONFIGS):
        _described_by(form, tmp_path / "other", change)
        told = run("inspect", tmp_path / "other", "--check", code={1, 2})
        assert any(part in told for part in ("complete no", "config.json describes", "lacks the dim-0 slices from")), (
            told
        )


def test_a_tied_copy_of_what_lies_in_several_tensors(tmp_path: Path) -> None:
    whole = torch.arange(5000.0).view(2500, 2)
    no_names: Any = None
    rows = {"upper": range(1100), "lower": range(1100, 2500), "copy": range(2500)}
    for place, differs in ((None, False), (0, True), (1099, True), (1100, True), (2499, True)):
        repeated = whole.clone()
        if place is not None:
            repeated[place, 1] += 1
        parts = {"upper": whole[:1100].clone(), "lower": whole[1100:].clone(), "copy": repeated}
        save_file(parts, tmp_path / "model.safetensors")
        stored = read_header(tmp_path / "model.safetensors")
        upper, lower, copy = (
            DiskTensor(name, (len(run), 2), "F32", (Region("e", run),), (stored[name],)) for name, run in rows.items()
        )
        checkpoint = Checkpoint(tmp_path, ModelSource(tmp_path, ""), no_names, [upper, lower], [], [copy])
        assert list(tied_copies_that_differ(checkpoint)) == ([(copy, "e")] if differs else [])


def test_an_adapter_is_no_model(forms: list[Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for pair in ((forms[0], tmp_path), (tmp_path, forms[0])):
        assert f"{tmp_path} is an adapter" in run("verify", *pair, code=2)


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
