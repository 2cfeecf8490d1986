"""--export-encoding source: FP8 and MXFP4 as published encoders make them, and bit for bit what was not trained."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from expertmesh.checkpoints.convert import HowToWrite, write_hf
from expertmesh.checkpoints.files.encodings import encode, scale_values
from expertmesh.checkpoints.files.tensors import Encoding
from expertmesh.checkpoints.opening import open_any
from tests.checkpoints.commands import change_tensors, read, run
from tests.checkpoints.test_encodings import SOURCES, sources
from tests.encoded import BLOCK, E2M1, change_config, from_fp8, save_fp8
from tests.families.configs import tiny_model

__all__ = ["sources"]

MXFP4 = Encoding("E2M1", (1, 32), "U8")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(a: Path, b: Path) -> None:
    """The same tensors, bit for bit, and the same config."""
    ours, theirs = read(a), read(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert torch.equal(bits(tensor), bits(theirs[name])), name
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())


# ---- the encoders ----


@pytest.mark.parametrize("scales", ["float", "ue8m0"])
def test_fp8_is_transformers(scales: str) -> None:
    """Codes and scales of its own encoder, bit for bit; a block of zeros, and very small and large ones, among them."""
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:8, :8], weight[8:16], weight[16:24] = 0, weight[8:16] * 1e-20, weight[16:24] * 1e20
    config: Any = SimpleNamespace(weight_block_size=BLOCK, scale_fmt=scales)
    encoder: Any = Fp8Quantize(SimpleNamespace(quantization_config=config))
    theirs = encoder.convert({"x.weight": weight})
    codes, stored = encode(weight, Encoding("F8_E4M3", BLOCK, "F8_E8M0" if scales == "ue8m0" else "F32"), None)
    assert torch.equal(torch.from_numpy(codes), theirs["x.weight"].view(torch.uint8))
    assert torch.equal(torch.from_numpy(stored).flatten(), bits(theirs["x.weight_scale_inv"]))
    # as DeepSeek-V3.1 has it: powers of two, in fp32
    if scales == "ue8m0":
        codes_too, wide = encode(weight, Encoding("F8_E4M3", BLOCK, "F32"), {"scale_fmt": "ue8m0"})
        assert (codes_too == codes).all()
        assert torch.equal(scale_values(wide, "F32"), scale_values(stored, "F8_E8M0"))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_codes_belong_to_the_scale_that_is_stored(dtype: str) -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    codes, stored = encode(weight, Encoding("F8_E4M3", BLOCK, dtype), None)
    scale = scale_values(stored, dtype)
    nearest = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert (torch.from_numpy(codes).view(torch.float8_e4m3fn).float() - nearest).abs().max() <= 32  # a tie, by rounding
    assert scale.item() == pytest.approx(float(weight.abs().max()) / 448, rel=2**-8)


def test_blocks_that_are_not_full() -> None:
    """As those of a larger matrix of which the rest is zeros."""
    weight = torch.randn(13, 19, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(16, 24)
    wide[:13, :19] = weight
    encoding = Encoding("F8_E4M3", BLOCK, "F32")
    (codes, scales), (wide_codes, wide_scales) = encode(weight, encoding, None), encode(wide, encoding, None)
    assert (codes == wide_codes[:13, :19]).all()
    assert (scales == wide_scales).all()


def test_mxfp4_by_hand() -> None:
    """The least power of two that keeps all values within 6; to the nearest value, of two equally near the larger:
    what triton_kernels does (`numerics_details/mxfp.py`, `downcast_to_mxfp_torch`), here by looking for it."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(400, 32, generator=generator) * torch.randn(400, 1, generator=generator).mul(8).exp2()
    groups = groups.bfloat16().double()
    groups[0] = 0
    groups[1] = torch.arange(32).double() / 4 - 4  # all ties, on both sides of 0
    codes, stored = encode(groups.float(), MXFP4, None)
    assert (stored[0] == 0).all()
    exponents = torch.from_numpy(stored).double() - 127
    for group, exponent, code in zip(groups[1:], exponents[1:], torch.from_numpy(codes)[1:], strict=True):
        assert group.abs().max() <= 6 * 2**exponent
        assert group.abs().max() > 6 * 2 ** (exponent - 1)
        scaled = group.abs() / 2**exponent
        distance = (scaled.unsqueeze(1) - E2M1.double()).abs()
        nearest = 7 - distance.flip(1).argmin(dim=1)  # the last of the least ones
        assert torch.equal(code.long() & 7, nearest)
        assert torch.equal(code.long() >> 3, torch.signbit(group).long())


@pytest.mark.parametrize(
    ("encoding", "there"),
    [
        (Encoding("F8_E4M3", (128, 128), "F32"), True),
        (Encoding("E2M1", (1, 32), "F8_E8M0"), True),
        (Encoding("F8_E5M2", (128, 128), "F32"), False),
        (Encoding("E2M1", (1, 16), "F8_E8M0"), False),
        (Encoding("E2M1", (1, 32), "F32"), False),
    ],
)
def test_which_are_published(encoding: Encoding, there: bool) -> None:
    assert encoding.has_encoder == there


# ---- what was not trained ----


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", SOURCES)
def test_untouched_comes_back(sources: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Bit for bit, from the model itself, in other files, and from EP shards."""
    source = sources[name]
    how = ("--export-encoding", "source")
    told = run("export", source, tmp_path / "again", "--max-shard-size", "20KB", *how)
    assert_same(source, tmp_path / "again")
    assert "as in the source, bit for bit" in told
    assert "anew" not in told
    for ep_size in (1, 4):
        shards = tmp_path / f"shards-{ep_size}"
        run("convert", source, shards, "--ep-size", ep_size)
        run("export", shards, tmp_path / f"from-{ep_size}", *how)
        assert_same(source, tmp_path / f"from-{ep_size}")
    run("verify", source, tmp_path / "again")


def test_carried_and_activation_scales_come_back(tmp_path: Path) -> None:
    """Layers for multi-token prediction in FP8, and scales of activations."""
    source = tmp_path / "model"
    save_fp8(tiny_model("deepseek_v3", seed=1), source)

    def add(tensors: dict[str, Tensor]) -> None:
        beyond = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.self_attn.")}
        tensors |= {name.replace("layers.2", "layers.3"): tensor.clone() for name, tensor in beyond.items()}
        tensors["model.layers.0.self_attn.o_proj.input_scale"] = torch.tensor(0.5)

    change_tensors(source / "model.safetensors", add)
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "static"}
    change_config(source, num_nextn_predict_layers=1, quantization_config=quantization)
    run("export", source, tmp_path / "out", "--export-encoding", "source")
    assert_same(source, tmp_path / "out")
    run("convert", source, tmp_path / "shards", "--ep-size", 2)
    run("export", tmp_path / "shards", tmp_path / "other", "--export-encoding", "source", code=2)


# ---- what was ----


def changed_blocks(before: Tensor, after: Tensor) -> Tensor:
    rows, columns = (-(-size // part) for size, part in zip(before.shape, BLOCK, strict=True))
    changed = torch.zeros(rows, columns, dtype=torch.bool)
    for row, column in torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).tolist():
        place = tuple(slice(i * size, (i + 1) * size) for i, size in zip((row, column), BLOCK, strict=True))
        changed[row, column] = not torch.equal(before[place], after[place])
    return changed


@pytest.mark.slow
def test_merged_is_quantized_again(sources: dict[str, Path], tmp_path: Path) -> None:
    """An adapter beside two matrices of a base in FP8: what it changes is the encoding of what `merge` writes without
    the flag, all else is the base's; from EP shards, too. The error is stated."""
    pytest.importorskip("peft")
    from tests.checkpoints.test_merge import adapter_of

    source = sources["fp8"]
    run("export", source, tmp_path / "plain")
    adapter = adapter_of(tmp_path / "plain", tmp_path / "adapter", target_modules=["o_proj"])
    run("merge", source, adapter, tmp_path / "wide")
    told = run("merge", source, adapter, tmp_path / "merged", "--export-encoding", "source")
    assert "self_attn.o_proj.weight: all blocks quantized anew: error at most " in told
    run("convert", source, tmp_path / "shards", "--ep-size", 2)
    run("merge", tmp_path / "shards", adapter, tmp_path / "too", "--export-encoding", "source")
    assert_same(tmp_path / "merged", tmp_path / "too")
    found, base, wide = (read(path) for path in (tmp_path / "merged", source, tmp_path / "wide"))
    assert found.keys() == base.keys()
    for name in found:
        codes_name = name.removesuffix("_scale_inv")
        if not codes_name.endswith("self_attn.o_proj.weight"):
            assert torch.equal(bits(found[name]), bits(base[name])), name
        elif name == codes_name:
            scales = found[f"{name}_scale_inv"]
            assert changed_blocks(from_fp8(base[name], base[f"{name}_scale_inv"]), wide[name]).all()
            expected = encode(wide[name], Encoding("F8_E4M3", BLOCK, "F32"), None)
            assert torch.equal(found[name].view(torch.uint8), torch.from_numpy(expected[0]))
            assert torch.equal(bits(scales), torch.from_numpy(expected[1]).flatten())
            # half of the distance between codes, relative to the block's largest
            off = (from_fp8(found[name], scales).float() - wide[name].float()).abs()
            assert off.max() <= wide[name].float().abs().max() / 28 + 1e-6


def test_only_blocks_that_changed_are_quantized(tmp_path: Path) -> None:
    """One value of one expert, through a training checkpoint's or any other's bf16: here in a Hugging Face directory
    whose origin is quantized otherwise than ours would be."""
    source = tmp_path / "model"
    SOURCES["mxfp4"](source)
    run("export", source, tmp_path / "plain")
    name = "model.layers.1.mlp.experts.gate_up_proj"  # [expert, input, output]
    change_tensors(tmp_path / "plain" / "model.safetensors", lambda t: t[name][3, 7, 5].add_(1))
    told: list[str] = []
    origin = open_any(source)
    how = HowToWrite(10**9, 1, as_source=True, tell_errors=told.append)
    write_hf(open_any(tmp_path / "plain"), tmp_path / "out", how, origin)
    base, found = read(source), read(tmp_path / "out")
    differing = {key: (found[key] != base[key]).nonzero() for key in base if not torch.equal(found[key], base[key])}
    assert differing.keys() <= {f"{name}_{part}" for part in ("blocks", "scales")}
    for places in differing.values():
        assert (places[:, :3] == torch.tensor([3, 5, 0])).all()  # expert, output, group of inputs
    (line,) = (line for line in told if "gate_up_proj" in line)
    assert " 1 of " in line


# ---- refusals ----


def test_not_quantized(tmp_path: Path) -> None:
    """Says so, and exports as without the flag."""
    tiny_model("mixtral", seed=1).save_pretrained(tmp_path / "model")
    told = run("export", tmp_path / "model", tmp_path / "out", "--export-encoding", "source")
    assert "is not quantized, so the export is not either" in told
    assert_same(tmp_path / "model", tmp_path / "out")


def test_no_published_encoder(tmp_path: Path) -> None:
    source = tmp_path / "model"
    save_fp8(tiny_model("deepseek_v3", seed=1), source)
    name = "model.layers.0.self_attn.o_proj.weight"
    change_tensors(source / "model.safetensors", lambda t: t.update({name: t[name].float().to(torch.float8_e5m2)}))
    said = run("export", source, tmp_path / "out", "--export-encoding", "source", code=2)
    assert f"{name} as float8_e5m2 with scales per block of 8 x 8, which has no public encoder" in said
    assert not (tmp_path / "out").exists()
