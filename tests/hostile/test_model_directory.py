"""Broken and hostile Hugging Face directories: safetensors files, the index, config.json."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from expertmesh.moe.hf_model.tensor_plan import regions_of
from tests.hostile.harness import Refused, Watch, fuzz
from tests.hostile.models import SMALL, Tensors, loaded, loaded_model, same_bits
from tests.hostile.mutations import BROKEN_TEXTS, HOSTILE_VALUES, changed_bytes, changed_document, dumped
from tests.tiny import save_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in one file, of a few kilobytes."""
    path = tmp_path_factory.mktemp("small")
    save_model(path, **SMALL)
    return path


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in several files and an index."""
    path = tmp_path_factory.mktemp("in-parts")
    save_model(path, max_shard_size="1KB", **SMALL)
    return path


def in_file(path: Path) -> Tensors:
    """What safetensors itself finds in the one file, under the names of our parameters."""
    tensors = load_file(path / "model.safetensors")
    prefix = "model.layers.0.block_sparse_moe"
    found = {name: tensor for name, tensor in tensors.items() if prefix not in name}
    experts = range(SMALL["num_local_experts"])
    for ours, theirs in (("w1", "w1"), ("v1", "w3")):
        found[f"model.layers.0.mlp.experts.mlp.{ours}"] = torch.cat(
            [tensors[f"{prefix}.experts.{n}.{theirs}.weight"] for n in experts]
        )
    down = [tensors[f"{prefix}.experts.{n}.w2.weight"].t() for n in experts]
    found["model.layers.0.mlp.experts.mlp.w2"] = torch.cat(down)
    found["model.layers.0.mlp.gate.weight"] = tensors[f"{prefix}.gate.weight"]
    rowwise = "model.layers.0.self_attn.o_proj.weight"
    found[rowwise] = tensors[rowwise].t()
    return {name: tensor.float() for name, tensor in found.items()}


def answer(path: Path) -> torch.Tensor:
    """Logits of a few tokens."""
    return _answer_of(loaded_model(path))


def _answer_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(7)[None] % model.config.vocab_size).logits
    return logits


def safetensors_files(watch: Watch, num_cases: int, small: Path) -> None:
    """Mutations of the header as JSON, of the header as bytes, and of the whole file."""
    path = watch.directory / "model"
    shutil.copytree(small, path)
    file = path / "model.safetensors"
    original = file.read_bytes()
    length = int.from_bytes(original[:8], "little")
    header, data = json.loads(original[8 : 8 + length]), original[8 + length :]

    def attempt(case: str, content: bytes) -> None:
        file.write_bytes(content)
        found = watch.attempt(case, lambda: loaded(path), str(file), str(path))
        if not isinstance(found, Refused):
            assert same_bits(found, in_file(path)), f"{case}: other content than safetensors reads"

    def with_header(document: Any) -> bytes:
        text = document if isinstance(document, bytes) else dumped(document)
        return struct.pack("<Q", len(text)) + text + data

    attempt("as it was", original)
    for name, text in BROKEN_TEXTS.items():
        attempt(f"header: {name}", with_header(text))
        attempt(f"file: {name}", text)
    for number in (0, 1, 7, length - 1, length + 1, len(original), 2**31, 2**32, 2**60, 2**63, 2**64 - 1):
        attempt(f"header length {number}", struct.pack("<Q", number) + original[8:])
    for entry in ({"dtype": "F8_E4M3"}, {"dtype": "I64"}, {"dtype": "f32"}, {"shape": [2**40, 2**40]}, {"shape": [-1]}):
        attempt(f"entry {entry}", with_header({**header, "lm_head.weight": {**header["lm_head.weight"], **entry}}))
    doubled = dumped(header)[:-1] + b', "lm_head.weight": ' + dumped(header["model.norm.weight"]) + b"}"
    attempt("a key twice", with_header(doubled))
    swapped = {**header, "model.norm.weight": header["model.layers.0.input_layernorm.weight"]}
    attempt("two tensors at one place", with_header(swapped))

    documents = changed_document(header).map(with_header)
    bytes_of_header = changed_bytes(original[8 : 8 + length]).map(with_header)
    fuzz(
        num_cases,
        st.one_of(documents, documents, bytes_of_header, changed_bytes(original)),
        lambda content: attempt(f"{content!r:.300}", content),
    )


def index_files(watch: Watch, num_cases: int, in_parts: Path) -> None:
    path = watch.directory / "model"
    shutil.copytree(in_parts, path)
    expected = loaded(path)
    file = path / INDEX
    original = json.loads(file.read_text())

    def attempt(case: str, content: bytes) -> None:
        file.write_bytes(content)
        found = watch.attempt(case, lambda: loaded(path), str(file), str(path))
        if not isinstance(found, Refused):
            assert same_bits(found, expected), f"{case}: another model"

    for name, text in BROKEN_TEXTS.items():
        attempt(name, text)
    fuzz(num_cases, changed_document(original), lambda document: attempt(f"{document!r:.2000}", dumped(document)))


def config_files(watch: Watch, num_cases: int, small: Path) -> None:
    path = watch.directory / "model"
    shutil.copytree(small, path)
    file = path / "config.json"
    original = json.loads(file.read_text())

    def attempt(case: str, content: bytes) -> None:
        file.write_bytes(content)
        logits = watch.attempt(case, lambda: answer(path), str(file), str(path), "config.json")
        if not isinstance(logits, Refused):
            assert logits.isfinite().all(), f"{case}: logits that are not finite"

    for name, text in BROKEN_TEXTS.items():
        attempt(name, text)
    for number, key in enumerate(original):
        for value in HOSTILE_VALUES[number % 3 :: 3]:
            attempt(f"{key} = {value!r:.60}", dumped({**original, key: value}))
    fuzz(num_cases, changed_document(original), lambda document: attempt(f"{document!r:.2000}", dumped(document)))


def distribution_plans(watch: Watch, num_cases: int, small: Path) -> None:
    """Plans of how to distribute a model in config.json: none changes what is computed, or what can be divided."""
    path = watch.directory / "model"
    shutil.copytree(small, path)
    file = path / "config.json"
    original = json.loads(file.read_text())
    expected, regions = answer(path), regions_of(loaded_model(path))
    own: Any = CONFIG_MAPPING["mixtral"].base_model_tp_plan

    def attempt(case: str, plans: dict[str, Any]) -> None:
        file.write_bytes(dumped({**original, **plans}))
        model = watch.attempt(case, lambda: loaded_model(path), str(file))
        if isinstance(model, Refused):  # for a number that no setting may have
            return
        assert regions_of(model) == regions, case
        assert torch.equal(_answer_of(model), expected), case

    for name in ("tp", "pp", "ep", "fsdp"):
        for number, value in enumerate(HOSTILE_VALUES):
            if name == "tp" or number % 4 == 0:
                attempt(f"{name} plan {value!r:.60}", {f"base_model_{name}_plan": value})
    attention = "layers.*.self_attn"
    for rules in (
        {f"{attention}.q_proj": "rowwise", f"{attention}.o_proj": "colwise"},
        {**own, "layers.*.input_layernorm": "rowwise", attention: "colwise", "layers.*.mlp.gate": "rowwise"},
        {**own, f"{attention}.o_proj": "packed_rowwise", f"{attention}.q_proj": ["colwise"]},
        {f"layers.{number}.x": "rowwise" for number in range(200_000)},
    ):
        attempt(f"rules {rules!r:.200}", {"base_model_tp_plan": rules})
    changed = changed_document({"base_model_tp_plan": own})
    fuzz(num_cases, changed, lambda plans: attempt(f"{plans!r:.2000}", plans))


@pytest.mark.slow
def test_safetensors_files(campaign: Callable[..., None], small: Path) -> None:
    campaign(safetensors_files, small)


@pytest.mark.release
def test_index_files(campaign: Callable[..., None], in_parts: Path) -> None:
    campaign(index_files, in_parts)


@pytest.mark.release
def test_config_files(campaign: Callable[..., None], small: Path) -> None:
    campaign(config_files, small)


@pytest.mark.release
def test_distribution_plans(campaign: Callable[..., None], small: Path) -> None:
    campaign(distribution_plans, small)
