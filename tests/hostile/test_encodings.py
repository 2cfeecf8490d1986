"""Broken and hostile checkpoints in FP8 and MXFP4: codes, scales, the heads that describe them, and the config."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.encoded import save_fp8, save_mxfp4
from tests.families.configs import tiny_model
from tests.hostile.harness import Refused, Watch, fuzz
from tests.hostile.models import loaded
from tests.hostile.mutations import HOSTILE_VALUES, changed_weights, dumped


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp("encoded") / kind for kind in ("fp8", "mxfp4")}
    save_fp8(tiny_model("deepseek_v3", seed=0, num_hidden_layers=2), paths["fp8"])
    gpt_oss = tiny_model("gpt_oss", seed=0, intermediate_size=32, num_hidden_layers=1, layer_types=["full_attention"])
    save_mxfp4(gpt_oss, paths["mxfp4"])
    return paths


def encoded_files(watch: Watch, num_cases: int, kind: str, source: Path) -> None:
    path = watch.directory / "model"
    shutil.copytree(source, path)
    file, config_file = path / "model.safetensors", path / "config.json"
    original, config = file.read_bytes(), json.loads(config_file.read_text())
    tensors, expected = load_file(file), loaded(path)

    def attempt(case: str, content: bytes) -> None:
        file.write_bytes(content)
        found = watch.attempt(f"{kind}: {case}", lambda: loaded(path), str(file), str(path))
        if not isinstance(found, Refused):
            assert found.keys() == expected.keys(), case
            assert all(tensor.isfinite().all() for tensor in found.values()), case

    attempt("as it was", original)
    for name in [name for name in tensors if name.endswith(("_scale_inv", "_scales", "_blocks"))][::5]:
        tensor = tensors[name]
        changed = {
            "missing": {},
            "longer": {name: torch.cat([tensor, tensor[:1]])},
            "empty": {name: tensor[:0]},
            "a scalar": {name: tensor.flatten()[0].clone()},
            "a dim more": {name: tensor[None].clone()},
            "transposed": {name: tensor.transpose(0, 1).contiguous()},
            "booleans": {name: torch.ones(tensor.shape, dtype=torch.bool)},
            "complex": {name: torch.ones(tensor.shape, dtype=torch.complex64)},
            "all ones": {name: torch.full_like(tensor.view(torch.uint8), 255).view(tensor.dtype)},
            "under another name": {f"{name}_": tensor},
        }
        for what, change in changed.items():
            save_file({**{other: tensors[other] for other in tensors if other != name}, **change}, file)
            content = file.read_bytes()
            if what == "transposed" and tensor.shape[0] == tensor.shape[1]:
                continue
            # a scale for the whole matrix, and codes that are all -6
            if (what == "a scalar" and name.endswith("_scale_inv")) or (what == "all ones" and "_blocks" in name):
                attempt(f"{name} {what}", content)
            else:
                watch.refuse(f"{kind}: {name} {what}", lambda: loaded(path), str(file), str(path))
    file.write_bytes(original)
    for value in [*HOSTILE_VALUES, [0, 0], [-8, 8], [8], [8, 8, 8], [2**62, 2**62], [1.5, 8], [True, True]]:
        for setting in ({**config["quantization_config"], "weight_block_size": value}, value):
            config_file.write_bytes(dumped({**config, "quantization_config": setting}))
            found = watch.attempt(f"{kind}: {setting!r:.80}", lambda: loaded(path), str(config_file), str(path))
            if not isinstance(found, Refused):
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), setting
    config_file.write_bytes(dumped(config))

    fuzz(num_cases, changed_weights(original), lambda content: attempt(f"{content!r:.300}", content))


@pytest.mark.release
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_encoded_files(campaign: Callable[..., None], encoded: dict[str, Path], kind: str) -> None:
    campaign(encoded_files, kind, encoded[kind])
