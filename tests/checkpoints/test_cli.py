"""convert, export, verify, inspect: through the command line, in this process."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.files.checksums import seal
from expertmesh.checkpoints.files.paths import _advise
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.planning.planner.model_config import find_config
from tests.tiny import save_model, save_tokenizer, tiny_mixtral


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_reading_ahead_follows_no_link_out_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "model", tmp_path / "outside.safetensors"
    inside.mkdir()
    outside.write_bytes(b"x" * 300_000)
    (inside / "a.safetensors").write_bytes(b"x" * 300_000)
    (inside / "b.safetensors").symlink_to(outside)
    os.mkfifo(inside / "c.safetensors")
    (inside / "d.safetensors").write_bytes(b"x" * 300_000)
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, length, advice: advised.append(offset))
    _advise(inside, 400_000)
    assert advised == [0, 2**17, 2**18, 0], "all of the first file, and the beginning of the last"


def read(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def shards(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "ep4"
    assert run("convert", tiny_model, out, "--ep-size", 4, "--max-shard-size", "30KB") == 0
    return out


@pytest.mark.sample(7)
@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("original", [True, False], ids=["per-expert", "fused"])
def test_there_and_back_is_bit_exact(
    tmp_path: Path, ep_size: int, dtype: torch.dtype, original: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source, there, back = tmp_path / "source", tmp_path / "there", tmp_path / "back"
    save_model(source, dtype, "50KB", save_original_format=original)
    save_tokenizer(source)
    assert run("convert", source, there, "--ep-size", ep_size) == 0
    assert len(list(there.glob("ep-*.safetensors"))) == ep_size
    assert run("export", there, back, "--max-shard-size", "50KB", "--workers", 3) == 0
    before, after = read(source), read(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) and after[name].dtype == dtype for name, tensor in before.items())
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    for a, b in ((source, there), (there, back), (source, back)):
        assert run("verify", a, b) == 0, capsys.readouterr().out
    # shards of shards, at another ep size
    assert run("convert", there, tmp_path / "other", "--ep-size", 2) == 0
    assert run("verify", tmp_path / "other", source) == 0


def test_each_command_says_what_it_wrote(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = len(read(tiny_model))
    assert run("convert", tiny_model, tmp_path / "shards", "--ep-size", 4) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"wrote EP shards, ep 4: {tmp_path / 'shards'} (" in said
    files = [file for file in (tmp_path / "shards").iterdir() if file.suffix == ".safetensors"]
    assert f" tensors in {len(files)} files, 0.00 GB)" in said
    assert run("export", tmp_path / "shards", tmp_path / "back") == 0
    wrote = f"wrote a Hugging Face directory: {tmp_path / 'back'} ({tensors} tensors in 1 files, 0.00 GB)"
    assert wrote in " ".join(capsys.readouterr().out.split())


def test_layout_of_a_shard(shards: Path, tiny_model: Path) -> None:
    """Experts 2 and 3 lie in the second file, down transposed, concatenated along dim 0."""
    shard = load_file(shards / "ep-00001-of-00004.safetensors")
    hf = read(tiny_model)
    prefix = "model.layers.1.block_sparse_moe.experts"
    for ours, theirs in (("w1", "w1"), ("v1", "w3")):
        expected = torch.cat([hf[f"{prefix}.{n}.{theirs}.weight"] for n in (2, 3)])
        assert torch.equal(shard[f"model.layers.1.mlp.experts.mlp.{ours}.2-3"], expected)
    expected = torch.cat([hf[f"{prefix}.{n}.w2.weight"].t() for n in (2, 3)])
    assert torch.equal(shard["model.layers.1.mlp.experts.mlp.w2.2-3"], expected)
    manifest = json.loads((shards / "manifest.json").read_text())
    (entry,) = [e for e in manifest["tensors"] if e["name"] == "model.layers.1.mlp.experts.mlp.w2.2-3"]
    assert entry["experts"] == [2, 4]
    assert entry["file"] == "ep-00001-of-00004.safetensors"


def test_dtype(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", tiny_model, tmp_path / "bf16", "--ep-size", 2, "--dtype", "bfloat16") == 0
    assert run("export", tmp_path / "bf16", tmp_path / "back") == 0
    assert all(tensor.dtype == torch.bfloat16 for tensor in read(tmp_path / "back").values())
    assert run("verify", tiny_model, tmp_path / "back") == 1
    assert "float32 against bfloat16" in capsys.readouterr().out
    assert run("verify", tiny_model, tmp_path / "back", "--rtol", 0.01) == 0
    assert run("verify", tiny_model, tmp_path / "back", "--rtol", 1e-6) == 1


PREFIX = "model.layers.0.block_sparse_moe.experts"


def _flip_bit(tensors: dict[str, torch.Tensor]) -> list[str]:
    tensors[f"{PREFIX}.3.w2.weight"].view(torch.int32)[5, 7] ^= 1
    return [f"{PREFIX}.3.w2.weight"]


def _swap(a: str, b: str, tensors: dict[str, torch.Tensor]) -> list[str]:
    tensors[a], tensors[b] = tensors[b], tensors[a]
    return [a, b]


def _swap_experts(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [n for w in ("w1", "w2", "w3") for n in _swap(f"{PREFIX}.1.{w}.weight", f"{PREFIX}.6.{w}.weight", tensors)]


def _swap_gate_and_up(tensors: dict[str, torch.Tensor]) -> list[str]:
    return _swap(f"{PREFIX}.2.w1.weight", f"{PREFIX}.2.w3.weight", tensors)


def _remove(tensors: dict[str, torch.Tensor]) -> list[str]:
    del tensors["model.norm.weight"]
    return ["model.norm.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> list[str]:
    tensors["model.surplus.weight"] = torch.zeros(3)
    return ["model.surplus.weight"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [_flip_bit, _swap_experts, _swap_gate_and_up, _remove, _add])
def test_verify_names_what_differs(
    tiny_model: Path, shards: Path, tmp_path: Path, change: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(tiny_model, spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    names = change(tensors)
    save_file(tensors, spoilt / "model.safetensors", metadata={"format": "pt"})
    for other in (tiny_model, shards):
        for pair in ((spoilt, other), (other, spoilt)):
            capsys.readouterr()
            assert run("verify", *pair) == 1
            told = capsys.readouterr().out.splitlines()
            assert len(told) == len(names) + 1, told
            assert all(any(name in line for line in told) for name in names), told


def test_inspect(tiny_model: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the heads alone: form, family, numbers, tensors."""
    assert run("inspect", shards, "--tensors") == 0
    told = capsys.readouterr().out
    assert "EP shards, ep 4" in told
    assert "family      mixtral" in told
    assert "ep-00002-of-00004.safetensors  model.layers.0.mlp.experts.mlp.v1.4-5  [96, 32]  float32" in told
    tensors = read(tiny_model)
    total = sum(tensor.numel() for tensor in tensors.values())
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    numbers = f"elements    {total:,}, of them {experts:,} in tensors of experts"
    assert numbers in told
    assert run("inspect", tiny_model) == 0
    of_source = capsys.readouterr().out
    assert "Hugging Face directory" in of_source
    assert numbers in of_source
    assert f"tensors     {len(tensors)}: {len(tensors)} float32" in of_source
    assert "complete" not in told + of_source, "which is not known without the model"


def test_inspect_with_its_model(
    tiny_model: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", shards, "--check") == 0
    told = capsys.readouterr().out
    assert "experts     8 in each of 2 layers, top-2 routing" in told
    model = tiny_mixtral()
    total = model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert f"parameters  {total:,}, of them {experts:,} in experts" in told
    assert f"active      {total - experts * 6 // 8:,} per token" in told
    assert f"per rank    {total:,} at ep 1, {total // 2:,} at ep 2" in told
    assert "complete    yes" in told
    assert "checksums   match" in told
    assert run("inspect", tiny_model, "--check") == 0
    assert "checksums   none in this form" in capsys.readouterr().out

    shutil.copytree(tiny_model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert run("inspect", tmp_path / "model") == 0, "the headers are sound"
    capsys.readouterr()
    assert run("inspect", tmp_path / "model", "--check") == 1
    told = capsys.readouterr().out
    assert "carried     1 tensors (0.0 MB): model.layers.0.self_attn.rotary_emb (1)" in told
    assert "complete    no:" in told
    assert "  tensor lm_head.weight is missing" in told


def test_inspect_finds_a_damaged_byte(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    file = tmp_path / "shards" / "ep-00001-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run("inspect", tmp_path / "shards") == 0
    assert run("inspect", tmp_path / "shards", "--check") == 2
    assert f"{file}: is damaged" in capsys.readouterr().err
    for command in (("convert", "--ep-size", 2), ("export",)):
        assert run(command[0], tmp_path / "shards", tmp_path / "out", *command[1:]) == 2
        assert f"{file}: is damaged" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_shards_with_rows_twice(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter that another tensor has once more, though all checksums are right."""
    shutil.copytree(shards, tmp_path / "shards")
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    entry = next(e for e in manifest["tensors"] if e["parameter"] == "model.norm.weight")
    file = tmp_path / "shards" / entry["file"]
    tensors = load_file(file)
    tensors["again"] = tensors[entry["name"]] + 1
    save_file(tensors, file)
    content = file.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    del manifest["checksum"]
    manifest["files"][entry["file"]] |= {
        "bytes": len(content),
        "xxh3_128": xxhash.xxh3_128(content).hexdigest(),
        "header_xxh3_128": xxhash.xxh3_128(header).hexdigest(),
    }
    manifest["tensors"].append({**entry, "name": "again"})
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(seal(manifest)))
    for command in (("inspect", tmp_path / "shards", "--check"), ("export", tmp_path / "shards", tmp_path / "back")):
        assert run(*command) == 2
        assert "model.norm.weight has dim-0 index 0 in two tensors" in capsys.readouterr().err


def test_shards_of_another_version(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert manifest["version"] == 4
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps({**manifest, "version": 3}))
    for command in (("inspect", tmp_path / "shards"), ("export", tmp_path / "shards", tmp_path / "back")):
        assert run(*command) == 2
        assert "version 3 is unknown; this version reads 'expertmesh-ep-shards' version 4: convert" in (
            capsys.readouterr().err
        )


def test_an_interrupted_conversion_is_not_whole_and_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import expertmesh.checkpoints.convert as conversion

    written: list[str] = []
    write = conversion._write_file

    def fail_at_third(file: Any, *rest: Any) -> Any:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(file.name)
        return write(file, *rest)

    out = tmp_path / "out"
    command = ("convert", tiny_model, out, "--ep-size", 4, "--workers", 1)
    monkeypatch.setattr(conversion, "_write_file", fail_at_third)
    assert run(*command) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (out / "manifest.json").exists()
    assert run("inspect", out) == 2
    assert run("export", out, tmp_path / "back") == 2

    written.clear()

    def record(file: Any, *rest: Any) -> Any:
        written.append(file.name)
        return write(file, *rest)

    monkeypatch.setattr(conversion, "_write_file", record)
    assert run(*command) == 0
    assert written == [
        "ep-00002-of-00004.safetensors",
        "ep-00003-of-00004.safetensors",
        "dense-00001-of-00001.safetensors",
    ]
    assert run("verify", tiny_model, out) == 0
    assert not list(out.glob("*.done")) + list(out.glob("*.part"))


def test_a_changed_source_is_converted_anew(tiny_model: Path, tmp_path: Path) -> None:
    """What an interrupted conversion had finished is worth nothing once the source is another."""
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source)
    assert run("convert", source, out, "--ep-size", 2) == 0
    (out / "manifest.json").unlink()
    (out / "ep-00000-of-00002.safetensors.done").write_text(json.dumps({"fingerprint": "another", "record": {}}))
    save_model(source, seed=1)
    assert run("convert", source, out, "--ep-size", 2) == 0
    assert run("verify", source, out) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "{model}", "{out}", "--ep-size", "3"], "--ep-size 3 does not divide the 8 experts"),
        (["convert", "/no/such", "{out}", "--ep-size", "2"], "convert /no/such: no such directory"),
        (["convert", "{model}", "{model}", "--ep-size", "2"], "which is to be read"),
        (["export", "{shards}", "{shards}"], "which is to be read"),
        (["convert", "{model}", "{shards}", "--ep-size", "2"], "already exists, and is complete"),
        (["export", "/no/such", "{out}"], "/no/such: no such directory"),
        (["export", "{shards}", "{out}", "--max-shard-size", "x"], "--max-shard-size x"),
        (["export", "{shards}", "{out}", "--workers", "0"], "--workers 0"),
        (["verify", "{model}", "/no/such"], "/no/such: no such directory"),
        (["verify", "{model}", "{model}", "--rtol", "-1"], "--rtol -1.0: must be 0 or more"),
        (["verify", "{model}", "{model}", "--rtol", "nan"], "--rtol nan: must be 0 or more"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_arguments(
    tiny_model: Path, shards: Path, tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"model": tiny_model, "shards": shards, "out": tmp_path / "out"}
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "{run}"], "{run}/config.json: no such file; there is {run}/hf/config.json"),
        (["merge", "{run}/hf", "{run}", "{out}"], "; there is {run}/adapter/adapter_config.json"),
        (["merge", "{run}/adapter", "{run}/adapter", "{out}"], "; {run}/adapter is an adapter; "),
        (["merge", "{run}/hf", "{run}/hf", "{out}"], "; {run}/hf is a model, not an adapter"),
        (["merge", "{run}/hf", "{run}/step-1", "{out}"], "; {run}/step-1 is a training checkpoint; give the adapter"),
        (["merge", "{run}/empty", "{run}/adapter", "{out}"], "{run}/empty/config.json: no such file\n"),
        (["inspect", "{run}/checkpoints"], "/config.json: no such file; there is {run}/checkpoints/step-2\n"),
        (
            ["export", "{run}/checkpoints/notes", "{out}"],
            "notes: is a file; give a training checkpoint beside it, as ",
        ),
        (["inspect", "{run}/hf/config.json"], "{run}/hf/config.json: is a file; give a directory, as {run}/hf\n"),
    ],
)
def test_a_directory_of_another_kind_is_told(
    tiny_model: Path, tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run's output directory, what lies in it; else what the directory is, not only the file that it lacks."""
    places = {"run": tmp_path / "run", "out": tmp_path / "out"}
    shutil.copytree(tiny_model, tmp_path / "run/hf")
    files = ("adapter/adapter_config.json", "step-1/checkpoint.json", "empty/notes.json")
    for file in (*files, "checkpoints/step-2/checkpoint.json", "checkpoints/notes"):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text("{}")
    assert run(*(argument.format(**places) for argument in arguments)) == 2
    assert said.format(**places) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ExpertMeshError, match="step-1 is a training checkpoint; `expertmesh-checkpoints export` makes"):
        open_source(tmp_path / "run/step-1")
    with pytest.raises(ExpertMeshError, match=f"--model {tmp_path}/run: .*; there is {tmp_path}/run/hf/config.json"):
        find_config(str(tmp_path / "run"))


def test_overwrite(tiny_model: Path, tmp_path: Path) -> None:
    assert run("convert", tiny_model, tmp_path / "out", "--ep-size", 8) == 0
    assert run("convert", tiny_model, tmp_path / "out", "--ep-size", 2) == 2
    assert run("convert", tiny_model, tmp_path / "out", "--ep-size", 2, "--overwrite") == 0
    assert len(list((tmp_path / "out").glob("ep-*"))) == 2
