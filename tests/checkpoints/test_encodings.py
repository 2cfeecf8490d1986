"""Checkpoints in FP8 and MXFP4: against transformers' own dequantization, and through all forms; damaged ones are in
`hostile/test_inputs.py`."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from expertmesh.checkpoints.files.dtypes import as_tensor
from expertmesh.checkpoints.files.encodings import dequantize_array, pack_codes, scale_values, unpack
from expertmesh.checkpoints.files.tensors import Encoding
from expertmesh.checkpoints.opening import open_any
from tests.checkpoints.commands import Tensors, run
from tests.encoded import BLOCK, change_config, from_fp8, save_fp8, save_mxfp4, to_fp8
from tests.families.configs import tiny_model

FP8 = Encoding("F8_E4M3", BLOCK, "F32")
MXFP4 = Encoding("E2M1", (1, 32), "U8")


def deepseek(path: Path) -> None:
    save_fp8(tiny_model("deepseek_v3", seed=1), path)


def gpt_oss(path: Path) -> None:
    save_mxfp4(tiny_model("gpt_oss", seed=1, intermediate_size=64), path)


def partly_fused(path: Path) -> None:
    """The experts of one layer in FP8, a tensor an expert; those of the others fused, in bf16."""
    model = tiny_model("qwen3_5_moe_text", seed=1)
    save_fp8(model, path, pattern=r"layers\.1\.mlp\.experts\..*proj")
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for name in [
        name for name in tensors if re.search(r"layers\.1\.mlp\.experts\.", name) and tensors[name].dim() == 3
    ]:
        fused = tensors.pop(name)
        own = name.rpartition(".")[0]
        parts = {"gate_proj": fused.chunk(2, dim=1)[0], "up_proj": fused.chunk(2, dim=1)[1]}
        for part, stack in (parts if "gate_up" in name else {"down_proj": fused}).items():
            for number, matrix in enumerate(stack):
                codes, scales = to_fp8(matrix)
                tensors[f"{own}.{number}.{part}.weight"] = codes
                tensors[f"{own}.{number}.{part}.weight_scale_inv"] = scales
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


SOURCES: dict[str, Callable[[Path], None]] = {"fp8": deepseek, "mxfp4": gpt_oss, "partly fused": partly_fused}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("source") / "model" for name in SOURCES}
    for name, save in SOURCES.items():
        save(paths[name])
    return paths


def content(path: Path) -> Tensors:
    """Every parameter and buffer of a checkpoint of any form, whole."""
    checkpoint = open_any(path)
    reader = checkpoint.reader()
    found = {}
    for name, shape in checkpoint.names.parameters.items():
        rows = reader.rows(name, range(shape[0] if shape else 1))
        assert rows is not None
        found[name] = as_tensor(np.ascontiguousarray(rows[0]), rows[1]).clone()
    reader.close()
    return found


def assert_same(found: Tensors, want: Tensors) -> None:
    assert found.keys() == want.keys()
    different = [name for name, tensor in want.items() if not torch.equal(found[name], tensor)]
    assert not different


@pytest.mark.parametrize("name", SOURCES)
def test_export_is_what_transformers_dequantizes(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Every bit, in bf16, and a config that no longer says that anything is quantized."""
    run("export", sources[name], tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config
    want = AutoModelForCausalLM.from_pretrained(sources[name], dtype=torch.bfloat16).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).state_dict()
    assert_same(found, want)


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "U8", "F8_E8M0"])
@pytest.mark.parametrize("codes", ["F8_E4M3", "F8_E5M2"])
def test_any_code_times_any_scale(codes: Any, scale_dtype: str) -> None:
    """As transformers multiplies them, in fp32, and rounds once."""
    dtype = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[codes]
    stored = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    generator = torch.Generator().manual_seed(0)
    if scale_dtype in ("U8", "F8_E8M0"):
        scales = torch.randint(60, 190, (4, 32), generator=generator, dtype=torch.uint8)
        values = (scales.float() - 127).exp2()
        assert scale_dtype == "U8" or torch.equal(scales.view(torch.float8_e8m0fnu).float(), values)
    else:
        scales = torch.rand(4, 32, generator=generator).to(torch.float32 if scale_dtype == "F32" else torch.bfloat16)
        values = scales.float()
    raw = scales.view(torch.uint8).reshape(4, -1).numpy()
    encoding = Encoding(codes, BLOCK, scale_dtype)
    found = as_tensor(dequantize_array(stored.numpy(), scale_values(raw, scale_dtype), encoding, (0, 0)), "BF16")
    want = from_fp8(stored.view(dtype), values)
    assert torch.equal(found.view(torch.int16), want.view(torch.int16)), "NaNs too"


def test_every_byte_and_exponent_of_mxfp4() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    want = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)[0]
    codes = unpack(blocks.view(255, 256).numpy(), MXFP4)
    found = as_tensor(dequantize_array(codes, scale_values(scales[0].numpy(), "U8"), MXFP4, (0, 0)), "BF16")
    assert torch.equal(found.view(torch.int16), want.contiguous().view(torch.int16))
    assert (pack_codes(codes, MXFP4) == blocks.view(255, 256).numpy()).all()


def test_any_rectangle() -> None:
    """Blocks that are not full, and rectangles that begin and end within blocks."""
    weight = torch.randn(21, 29, generator=torch.Generator().manual_seed(0))
    codes, scales = to_fp8(weight)
    want = from_fp8(codes, scales)
    for rows in (range(21), range(3, 5), range(7, 17), range(20, 21)):
        for columns in (range(29), range(1, 3), range(7, 25), range(28, 29)):
            down, across = (slice(run.start // 8, (run.stop - 1) // 8 + 1) for run in (rows, columns))
            box = codes.view(torch.uint8)[rows.start : rows.stop, columns.start : columns.stop].numpy()
            wide = dequantize_array(box, scales[down, across], FP8, (rows.start, columns.start))
            assert torch.equal(as_tensor(wide, "BF16"), want[rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SOURCES)
def test_shards_keep_the_encoding(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    """At one ep size and from there at another; and all come out with the bits of the source."""
    want = content(sources[name])
    for command in (
        (sources[name], tmp_path / "ep2", "--ep-size", 2),
        (tmp_path / "ep2", tmp_path / "ep4", "--ep-size", 4),
        (sources[name], tmp_path / "wide", "--ep-size", 2, "--dtype", "bfloat16"),
    ):
        assert "dequantized" not in run("convert", *command)
    stored = {path: sum(file.stat().st_size for file in (tmp_path / path).glob("ep-*")) for path in ("ep2", "wide")}
    assert stored["ep2"] < {"fp8": 0.7, "mxfp4": 0.5, "partly fused": 0.9}[name] * stored["wide"]
    for path in ("ep2", "ep4", "wide"):
        assert_same(content(tmp_path / path), want)
        assert (" quantized " in run("inspect", tmp_path / path, "--check")) == (path != "wide")
        assert ("quantization_config" in (tmp_path / path / "config.json").read_text()) == (path != "wide")
    run("export", tmp_path / "ep4", tmp_path / "hf")
    assert "quantization_config" not in (tmp_path / "hf" / "config.json").read_text()
    assert "bitwise equal" in run("verify", sources[name], tmp_path / "hf")


def test_blocks_of_two_experts_are_dequantized(tmp_path: Path) -> None:
    """12 rows an expert, a scale for 8: row by row they cannot stay as they are."""
    save_fp8(tiny_model("deepseek_v3", seed=1, moe_intermediate_size=12), tmp_path / "model")
    said = run("convert", tmp_path / "model", tmp_path / "ep2", "--ep-size", 2)
    assert "dequantized to bfloat16" in said
    assert "mlp.w1" in said
    assert "self_attn" not in said
    assert_same(content(tmp_path / "ep2"), content(tmp_path / "model"))


def test_a_scale_for_a_whole_matrix(tmp_path: Path) -> None:
    deepseek(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    want = content(tmp_path)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        rows, columns = tensors[weight].shape
        codes, scales = to_fp8(from_fp8(tensors[weight], tensors[name]), (rows, columns))
        tensors[weight], tensors[name] = codes, scales.reshape(())
    save_file(tensors, tmp_path / "model.safetensors")
    found = content(tmp_path)
    errors = [(found[name] - tensor).abs().max() / tensor.abs().max() for name, tensor in want.items()]
    assert 0 < max(errors) < 0.1
    run("convert", tmp_path, tmp_path / "ep2", "--ep-size", 2)
    assert_same(content(tmp_path / "ep2"), found)


def test_two_floats_of_four_bits_a_byte(tmp_path: Path) -> None:
    """As DeepSeek-V4 has its experts: E2M1 in I8, with an exponent for 32 values under the name `scale`."""
    model = tiny_model("deepseek_v3", seed=1, moe_intermediate_size=32)
    save_fp8(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    want: Tensors = {}
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        generator = torch.Generator().manual_seed(len(want))
        rows, columns = tensors[name].shape
        blocks = torch.randint(0, 256, (1, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 130, (1, rows, columns // 32), generator=generator, dtype=torch.uint8)
        want[name] = convert_moe_packed_tensors(blocks, scales)[0].t()
        tensors[name] = blocks.view(rows, columns // 2).view(torch.int8)
        del tensors[f"{name}_scale_inv"]
        tensors[name.removesuffix("weight") + "scale"] = scales[0].view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors")
    run("export", tmp_path, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_verify_across_encodings(tmp_path: Path) -> None:
    """A model and what FP8 makes of it: the same to a sixteenth of a row's largest value, and not to less."""
    model: Any = tiny_model("deepseek_v3", seed=1, num_nextn_predict_layers=0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    deepseek(tmp_path / "fp8")
    run("verify", tmp_path / "plain", tmp_path / "fp8", "--rtol", 0.0667)
    run("verify", tmp_path / "plain", tmp_path / "fp8", "--rtol", 0.01, code=1)
    assert "self_attn" in run("verify", tmp_path / "plain", tmp_path / "fp8", code=1)


def test_inspect_says_how_it_is_stored(sources: dict[str, Path]) -> None:
    model = tiny_model("gpt_oss", seed=1, intermediate_size=64)
    elements = sum(parameter.numel() for parameter in model.parameters())
    for name, *parts in (
        ("fp8", "float8_e4m3 with scales per block of 8 x 8"),
        ("mxfp4", "float4_e2m1 with exponents per block of 1 x 32", f"elements {elements:,}"),
    ):
        said = run("inspect", sources[name], "--check")
        assert all(part in said for part in ("complete yes", *parts)), said


@pytest.mark.parametrize("said", [{}, None])
def test_an_empty_table_says_nothing(tiny_model: Path, tmp_path: Path, said: Any) -> None:
    """And is not exported, as transformers refuses to load beside one."""
    shutil.copytree(tiny_model, tmp_path / "model")
    change_config(tmp_path / "model", quantization_config=said)
    run("export", tmp_path / "model", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
