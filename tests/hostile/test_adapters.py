"""Broken and hostile adapters: their config, and the heads and content of their tensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertmesh.checkpoints.adapters.adapter_files import CONFIG, WEIGHTS, Adapter
from expertmesh.checkpoints.adapters.peft_format import adapter_config, lora_names
from expertmesh.checkpoints.hf.names import Names
from expertmesh.checkpoints.opening import open_readable
from expertmesh.moe.experts.model_layers import moe_layers
from tests.hostile.harness import Refused, Watch, fuzz
from tests.hostile.models import SMALL
from tests.hostile.mutations import BROKEN_TEXTS, HOSTILE_VALUES, changed_document, changed_weights, dumped
from tests.tiny import save_model

RANK = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_model(path, **SMALL)
    return path


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of a projection and of every expert, one tensor each."""
    path, tensors = tmp_path_factory.mktemp("adapter"), {}
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if "q_proj" in name or ".experts." in name:
            a, b = lora_names(name.removesuffix(".weight"))
            tensors[a], tensors[b] = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
    save_file(tensors, path / WEIGHTS)
    layout = moe_layers(open_readable(base).names.model)[0].mlp.layout
    modules, experts = ["model.layers.0.self_attn.q_proj"], {"model.layers.0.mlp.experts": layout}
    config = adapter_config(base_model="m", rank=RANK, alpha=4.0, modules=modules, experts=experts)
    (path / CONFIG).write_text(json.dumps(config))
    return path


def read_pairs(path: Path, names: Names) -> dict[str, Any]:
    """Every pair, and what its product is multiplied by."""
    found = Adapter(path, names)
    return {name: (found.pair(name), found.scale(name)) for name in sorted(found.parameters)}


def adapter_files(watch: Watch, num_cases: int, source: Path, base: Path) -> None:
    path = watch.directory / "adapter"
    shutil.copytree(source, path)
    config_file, weights_file = path / CONFIG, path / WEIGHTS
    config, original = json.loads(config_file.read_text()), weights_file.read_bytes()
    names = open_readable(base).names
    expected = read_pairs(path, names)

    def attempt(case: str, file: Path, content: bytes) -> None:
        before = file.read_bytes()
        file.write_bytes(content)
        found = watch.attempt(case, lambda: read_pairs(path, names), str(config_file), str(weights_file), str(path))
        if not isinstance(found, Refused):
            assert found.keys() <= expected.keys(), case
            assert all(0 < scale < 1e9 and pair.a.isfinite().all() for pair, scale in found.values()), case
        file.write_bytes(before)

    attempt("as it was", config_file, dumped(config))
    for name, text in BROKEN_TEXTS.items():
        attempt(f"config: {name}", config_file, text)
        attempt(f"weights: {name}", weights_file, text)
    for key in ("peft_type", "peft_version", "r", "lora_alpha", "use_rslora", "target_parameters", "rank_pattern"):
        for value in HOSTILE_VALUES:
            attempt(f"{key} = {value!r:.60}", config_file, dumped({**config, key: value}))
    for pattern in ("", "(", ".*", "[", "x" * 1000):
        for value in (0, -1, 2**70, "x", None, float("nan"), 3):
            for key in ("rank_pattern", "alpha_pattern"):
                attempt(f"{key} {pattern!r:.20} {value!r}", config_file, dumped({**config, key: {pattern: value}}))

    fuzz(num_cases // 2, changed_weights(original), lambda content: attempt(f"{content!r:.300}", weights_file, content))
    configs = changed_document(config).map(dumped)
    fuzz(num_cases // 2, configs, lambda content: attempt(f"{content!r:.2000}", config_file, content))


@pytest.mark.release
def test_adapter_files(campaign: Callable[..., None], adapter: Path, base: Path) -> None:
    campaign(adapter_files, adapter, base)
