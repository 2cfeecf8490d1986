"""Models that come in FP8 and MXFP4, trained and exported at EP 4, in bfloat16 and as they came."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.files.encodings import encode
from expertmesh.checkpoints.files.tensors import Encoding
from expertmesh.sharding.topology import Topology
from tests.checkpoints.test_servers import check_names, headers
from tests.distributed.pool import RankPool
from tests.distributed.reference import in_full, sharded_model
from tests.distributed.whole_runs import read, run_main, tell
from tests.encoded import BLOCK, save_fp8, save_mxfp4
from tests.families.configs import tiny_model
from tests.parity.case import Case
from tests.parity.compare import with_other_bits
from tests.rounding import assert_near
from tests.tiny import save_tokenizer

SAVE: dict[str, Callable[[Any, Path], None]] = {"deepseek_v3": save_fp8, "gpt_oss": save_mxfp4}
WIDTH: dict[str, dict[str, int]] = {"deepseek_v3": {}, "gpt_oss": {"intermediate_size": 64}}
"""Of experts in MXFP4, a multiple of 32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in SAVE}
    for family, path in paths.items():
        SAVE[family](tiny_model(family, seed=1, **WIDTH[family]), path)
        save_tokenizer(path)
    return paths


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "topology"), [("deepseek_v3", Topology(4, 2)), ("gpt_oss", Topology(4, 4, "hybrid"))]
)
def test_ranks_read_what_transformers_dequantizes(
    ranks: RankPool, models: dict[str, Path], family: str, topology: Topology
) -> None:
    """Each its own rows, from within blocks too, with the bits that one process gives."""
    found = ranks.run(_logits, 4, models[family], topology, family)[0]
    alone = ranks.run(_logits, 1, models[family], Topology(1, 1), family)[0]
    assert found[1].keys() == alone[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in alone[1].items())
    theirs = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.bfloat16).float().eval()
    assert_near(found[0], theirs(TOKENS_BS).logits)


TOKENS_BS = torch.arange(3, 27).view(2, 12)


@torch.no_grad()
def _logits(path: Path, topology: Topology, family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model, _, _ = sharded_model(path, topology, Case([], family=family, changes=WIDTH[family]))
    logits = model.eval()(TOKENS_BS).logits
    return logits, in_full(dict(model.named_parameters()))


def train(ranks: RankPool, world_size: int, model: Path, data: Path, out: Path, *flags: object) -> str:
    """What a run that comes through prints."""
    argv = ["--model", model, "--dataset", data, "--output-dir", out, "--use-cpu", "--max-steps", 2]
    argv += ["--per-device-train-batch-size", 2, "--learning-rate", "1e-3", *flags]
    results = ranks.run(tell, world_size, [*map(str, argv)], join_group=False)
    assert [code for code, *_ in results] == [0] * world_size, results
    return " ".join(results[0][1].split())


@pytest.mark.slow
@pytest.mark.parametrize("family", SAVE)
def test_trained_and_exported(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, family: str
) -> None:
    """The export is bf16, its config no longer says that it is quantized, and in transformers it gives the logits of
    the sharded model that it was written from."""
    train(ranks, 4, models[family], tiny_data, tmp_path, "--save-steps", 2, "--ep-size", 4)
    hf = tmp_path / "hf"
    config = json.loads((hf / "config.json").read_text())
    assert "quantization_config" not in config
    check_names(family, {name: shape for name, (_, shape, _) in headers(hf).items()}, config)
    assert {tensor.dtype for name, tensor in read(hf).items() if "bias" not in name} == {torch.bfloat16}
    resaved = tmp_path / "checkpoints" / "step-00000002" / "model" / "config.json"
    assert "quantization_config" not in json.loads(resaved.read_text())
    sharded, _ = ranks.run(_logits, 4, hf, Topology(4, 4), family)[0]
    exported = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    assert_near(sharded, exported(TOKENS_BS).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), [("deepseek_v3", ["--ep-size", 4]), ("gpt_oss", ["--ep-size", 2, "--pp-size", 2])]
)
def test_exported_as_it_came(
    ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path, family: str, layout: list[object]
) -> None:
    """From a run, and from its checkpoint, the same codes: of what was trained, those of the checkpoint's bf16 export;
    of the last layer, which was frozen, the source's. transformers reads what they stand for."""
    how = ["--save-steps", 2, *layout, "--export-encoding", "source", "--freeze", r"layers\.2\."]
    told = train(ranks, 4, models[family], tiny_data, tmp_path, *how)
    assert "exported with the quantization of " in told
    assert "blocks quantized anew: error at most" in told
    hf, saved = tmp_path / "hf", tmp_path / "checkpoints" / "step-00000002"
    for out, flags in {"again": ["--export-encoding", "source"], "wide": []}.items():
        assert main(["export", str(saved), str(tmp_path / out), *flags]) == 0
    found, again, wide, source = (read(path) for path in (hf, tmp_path / "again", tmp_path / "wide", models[family]))
    assert found.keys() == again.keys() == source.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (source[name].dtype, source[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8)), name
        if ".layers.2." in name:
            assert torch.equal(tensor.view(torch.uint8), source[name].view(torch.uint8)), name
    ours, theirs_own = (json.loads((path / "config.json").read_text()) for path in (hf, models[family]))
    assert ours["quantization_config"] == theirs_own["quantization_config"]
    name = {"deepseek_v3": "model.layers.1.mlp.experts.3.up_proj.weight", "gpt_oss": EXPERTS}[family]
    if family == "deepseek_v3":
        codes, scales = encode(wide[name], Encoding("F8_E4M3", BLOCK, "F32"), None)
        stored = (found[name], found[f"{name}_scale_inv"])
    else:
        codes, scales = encode(wide[name].transpose(1, 2).flatten(0, 1), Encoding("E2M1", (1, 32), "U8"), None)
        codes, stored = codes[:, ::2] | codes[:, 1::2] << 4, (found[f"{name}_blocks"], found[f"{name}_scales"])
    same = torch.from_numpy(codes).flatten() == stored[0].view(torch.uint8).flatten()
    # blocks whose values are still the source's have its codes, which other encoders made
    assert same.float().mean() > 0.5
    assert torch.isin(torch.from_numpy(scales).flatten(), stored[1].contiguous().view(torch.uint8).flatten()).any()
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16).float().eval()
    plain = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32).named_parameters())
    # three and one binary digits of a value behind the first
    most = {"deepseek_v3": 0.04, "gpt_oss": 0.15}[family]
    for name, parameter in theirs.named_parameters():
        assert (parameter - plain[name]).norm() <= most * plain[name].norm(), name
    sharded, _ = ranks.run(_logits, 4, hf, Topology(4, 4), family)[0]
    assert_near(sharded, theirs(TOKENS_BS).logits)


EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.slow
def test_merged_as_it_came(ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path) -> None:
    """LoRA beside a base in FP8: merged, then quantized; what has no adapter is the base's."""
    source = models["deepseek_v3"]
    lora = ["--adapter", "lora", "--lora-targets", "o_proj", "--merge", "--export-encoding", "source"]
    train(ranks, 2, source, tiny_data, tmp_path, "--save-steps", 0, "--learning-rate", "1e-2", "--ep-size", 2, *lora)
    merge = ["merge", str(source), str(tmp_path / "adapter"), str(tmp_path / "again"), "--export-encoding", "source"]
    assert main(merge) == 0
    found, again, base = (read(path) for path in (tmp_path / "hf", tmp_path / "again", source))
    assert found.keys() == again.keys() == base.keys()
    # of codes the scales are named after them
    plain = {name: tuple(tensor.shape) for name, tensor in again.items() if not name.endswith("_scale_inv")}
    check_names("deepseek_v3", plain, json.loads((tmp_path / "again" / "config.json").read_text()))
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8)), name
        assert torch.equal(tensor.view(torch.uint8), base[name].view(torch.uint8)) == ("o_proj" not in name), name


@pytest.mark.slow
def test_beside_mxfp4_as_beside_bf16(ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path) -> None:
    """Every file of a run that keeps experts in MXFP4, and is stopped and resumed, is that of a run in bf16: adapter,
    merged model, and this as it came."""
    lora = ["--adapter", "lora", "--merge", "--export-encoding", "source", "--ep-size", 2, "--bf16", "--save-steps", 1]
    lora += ["--lr-scheduler-type", "constant"]
    for base in ("mxfp4", "bfloat16"):
        out = tmp_path / base
        train(ranks, 2, models["gpt_oss"], tiny_data, out, *lora, "--base-dtype", base, "--max-steps", 1)
        told = train(ranks, 2, models["gpt_oss"], tiny_data, out, *lora, "--base-dtype", base, "--resume", "auto")
        assert "2/2" in told
        assert " 1/2" not in told
    for directory in ("adapter", "hf"):
        found, expected = (read(tmp_path / base / directory) for base in ("mxfp4", "bfloat16"))
        assert with_other_bits(found, expected) == []
    assert any(name.endswith("_blocks") for name in found)
    other = [*lora, "--base-dtype", "bfloat16", "--resume", "auto", "--max-steps", 3]
    argv = [
        "--model",
        models["gpt_oss"],
        "--dataset",
        tiny_data,
        "--output-dir",
        tmp_path / "mxfp4",
        "--use-cpu",
        *other,
    ]
    results = ranks.run(tell, 2, [*map(str, argv)], join_group=False)
    assert "--base-dtype" in results[0][2]


@pytest.mark.slow
def test_refused_before_training(ranks: RankPool, models: dict[str, Path], tiny_data: Path, tmp_path: Path) -> None:
    """An encoding that can be read, and has no published encoder."""
    source = tmp_path / "model"
    shutil.copytree(models["deepseek_v3"], source)
    (file,) = source.glob("*.safetensors")
    tensors, name = load_file(file), "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)
    save_file(tensors, file, {"format": "pt"})
    argv = ["--model", str(source), "--dataset", str(tiny_data), "--output-dir", str(tmp_path / "out"), "--use-cpu"]
    argv += ["--max-steps", "1", "--ep-size", "2", "--export-encoding", "source"]
    results = ranks.run(run_main, 2, argv, join_group=False)
    assert [code for code, _ in results] == [2, 2]
    said = " ".join(results[0][1].split())
    assert f"has {name} as float8_e5m2 with scales per block of 8 x 8, which has no public encoder" in said
    assert not (tmp_path / "out" / "hf").exists()
    assert " 1/1 " not in said
