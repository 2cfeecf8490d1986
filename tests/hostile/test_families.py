"""Broken and hostile configs and checkpoints of four families that have what Mixtral has not: shared experts, groups,
correction biases, dense layers, kinds of layers, tensors with biases that are interleaved and transposed."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.configs import tiny_model
from tests.hostile.harness import Refused, Watch
from tests.hostile.models import loaded
from tests.hostile.mutations import HOSTILE_VALUES, dumped
from tests.hostile.test_model_directory import answer

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
EVERY = 20
"""One in so many hostile values is tried for each setting; others for the next."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in paths.items():
        tiny_model(family, seed=0).save_pretrained(path)
    return paths


def made_by_hand(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configs that no model can have: (what is wrong, the config)."""

    def has(*names: str) -> bool:
        return all(name in config for name in names)

    experts = next(name for name in ("num_local_experts", "num_experts", "n_routed_experts") if name in config)
    yield "top-k above the experts", {**config, "num_experts_per_tok": config[experts] + 1}
    yield "no expert a token", {**config, "num_experts_per_tok": 0}
    yield "a negative top-k", {**config, "num_experts_per_tok": -2}
    yield "fewer experts than the checkpoint has", {**config, experts: config[experts] - 2}
    yield "more experts than the checkpoint has", {**config, experts: config[experts] * 2}
    yield "a layer more than the checkpoint has", {**config, "num_hidden_layers": config["num_hidden_layers"] + 1}
    if has("n_group"):
        yield "groups below zero", {**config, "n_group": -1}
        yield "groups that do not divide the experts", {**config, "n_group": 3}
        yield "more groups chosen than there are", {**config, "topk_group": config["n_group"] + 1}
    if has("layer_types"):
        yield "too few kinds of layers", {**config, "layer_types": config["layer_types"][:1]}
        yield "kinds of layers that are none", {**config, "layer_types": ["x"] * config["num_hidden_layers"]}
    if has("first_k_dense_replace"):
        yield "dense where experts are", {**config, "first_k_dense_replace": config["num_hidden_layers"] - 1}
        yield "experts where dense ones are", {**config, "first_k_dense_replace": 0}
        yield "no layer with experts", {**config, "first_k_dense_replace": config["num_hidden_layers"]}
    if has("mlp_only_layers"):
        yield "dense where the index has experts", {**config, "mlp_only_layers": [0, 1]}


def configs_of_families(watch: Watch, num_cases: int, models: dict[str, Path]) -> None:
    for family, original in models.items():
        path = watch.directory / family
        shutil.copytree(original, path)
        file = path / "config.json"
        config = json.loads(file.read_text())

        def call(path: Path = path) -> torch.Tensor:
            return answer(path)

        for what, document in made_by_hand(config):
            file.write_bytes(dumped(document))
            watch.refuse(f"{family}: {what}", call, str(file), str(path))
        for number, key in enumerate(config):
            for value in HOSTILE_VALUES[number % EVERY :: EVERY]:
                file.write_bytes(dumped({**config, key: value}))
                logits = watch.attempt(f"{family}: {key} = {value!r:.60}", call, str(file), str(path), "config.json")
                if not isinstance(logits, Refused):
                    assert logits.isfinite().all(), f"{family}: {key} = {value!r:.60}: logits that are not finite"


def tensors_of_families(watch: Watch, num_cases: int, models: dict[str, Path]) -> None:
    """A tensor that is missing, of another shape or type, or too much: each is named."""
    for family, original in models.items():
        path = watch.directory / family
        shutil.copytree(original, path)
        file = path / "model.safetensors"
        tensors = load_file(file)
        expected = loaded(path)

        def call(path: Path = path) -> Any:
            return loaded(path)

        for name in list(tensors)[:: max(1, len(tensors) // 5)]:
            others = {other: tensor for other, tensor in tensors.items() if other != name}
            changed = {
                "missing": others,
                "longer": {**others, name: torch.cat([tensors[name], tensors[name][:1]])},
                "flat": {**others, name: tensors[name].flatten()[None, None]},
                "complex": {**others, name: tensors[name].to(torch.complex64)},
                "NaN": {**others, name: torch.full_like(tensors[name], torch.nan)},
                "beside another": {**tensors, f"{name}_": tensors[name].clone()},
            }
            for what, content in changed.items():
                save_file(content, file)
                watch.refuse(f"{family}: {name} {what}", call, str(file), str(path))
        save_file(tensors, file)
        assert call().keys() == expected.keys()


@pytest.mark.release
def test_configs_of_families(campaign: Callable[..., None], models: dict[str, Path]) -> None:
    campaign(configs_of_families, models)


@pytest.mark.release
def test_tensors_of_families(campaign: Callable[..., None], models: dict[str, Path]) -> None:
    campaign(tensors_of_families, models)
