"""Exported directories have the names, shapes, files and config that vLLM and llama.cpp look for (see `servers.py`)."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.checkpoints.commands import run
from tests.checkpoints.servers import FAMILIES, MXFP4, shape_of, sizes_of
from tests.encoded import BLOCK, save_fp8, save_mxfp4
from tests.families.configs import tiny_model
from tests.tiny import save_tokenizer

MATRICES = r"\.(self_attn|mlp|block_sparse_moe)\..*(proj[a-z_]*|w[123])\.weight$"
Header = dict[str, tuple[str, tuple[int, ...], str]]
"""(dtype, shape, file) by name."""


def headers(path: Path) -> Header:
    found: Header = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.offset_keys():
                part = handle.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()), file.name)
    return found


def pattern_of(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def check_files(out: Path, family: str, found: Header) -> dict[str, object]:
    """config.json names the class, the index all tensors, and the tokenizer is there; gives the config."""
    config: dict[str, object] = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[family][0]]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for name, (_, _, file) in found.items()}
    assert (out / "tokenizer.json").exists()
    assert (out / "tokenizer_config.json").exists()
    return config


def check_names(family: str, found: dict[str, tuple[int, ...]], config: dict[str, object]) -> None:
    """Each tensor is one that is looked for, of the right shape; none is missing, no expert either."""
    wanted, sizes = FAMILIES[family][1], sizes_of(config)
    assert {pattern_of(name) for name in found} == wanted.keys()
    for name, shape in found.items():
        assert shape == shape_of(wanted[pattern_of(name)], sizes), name
    experts: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in found:
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts[match[1], match[3]].add(int(match[2]))
    assert all(numbers == set(range(sizes["E"])) for numbers in experts.values())
    layers = {int(name.split(".")[2]) for name in found if name.startswith("model.layers.")}
    assert layers == set(range(int(str(config["num_hidden_layers"]))))


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain(family: str, tmp_path: Path) -> None:
    """What `export` makes of EP shards; training's export has the same table of names."""
    tiny_model(family, seed=1).bfloat16().save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    run("convert", tmp_path / "model", tmp_path / "shards", "--ep-size", 2)
    run("export", tmp_path / "shards", tmp_path / "out", "--max-shard-size", "30KB")
    found = headers(tmp_path / "out")
    config = check_files(tmp_path / "out", family, found)
    assert "quantization_config" not in config
    check_names(family, {name: shape for name, (_, shape, _) in found.items()}, config)
    assert {dtype for name, (dtype, _, _) in found.items() if "e_score" not in name} == {"BF16"}


@pytest.mark.sample(14)
@pytest.mark.parametrize("family", FAMILIES)
def test_encoded(family: str, tmp_path: Path) -> None:
    """The same of quantized ones, in FP8 or, of GPT-OSS, MXFP4, exported as they came."""
    source, out = tmp_path / "model", tmp_path / "out"
    if family == "gpt_oss":
        save_mxfp4(tiny_model(family, seed=1, intermediate_size=64), source)
    else:
        save_fp8(tiny_model(family, seed=1), source, MATRICES)
    save_tokenizer(source)
    run("convert", source, tmp_path / "shards", "--ep-size", 2)
    run("export", tmp_path / "shards", out, "--export-encoding", "source", "--max-shard-size", "30KB")
    found = headers(out)
    config = check_files(out, family, found)
    assert config["quantization_config"] == json.loads((source / "config.json").read_text())["quantization_config"]
    order = list(found)
    plain = {name: shape for name, (_, shape, _) in found.items()}
    sizes = sizes_of(config)
    if family == "gpt_oss":
        for name in [name for name in found if name.endswith("_blocks")]:
            tensor = name.removesuffix("_blocks")
            for part, shape in MXFP4[pattern_of(tensor)].items():
                dtype, there, file = found[tensor + part]
                assert (dtype, file) == ("U8", found[name][2])
                assert there == tuple(size if isinstance(size, int) else sizes[size] for size in shape)
                del plain[tensor + part]
            assert order.index(tensor + "_scales") == order.index(name) + 1
            plain[tensor] = shape_of(FAMILIES[family][1][pattern_of(tensor)], sizes)
    else:
        encoded = [name for name in found if re.search(MATRICES, name)]
        assert encoded
        for name in encoded:
            dtype, (rows, columns), _ = found[name]
            assert dtype == "F8_E4M3", name
            assert found[f"{name}_scale_inv"][:2] == ("F32", (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))), name
            del plain[f"{name}_scale_inv"]
    check_names(family, plain, config)
