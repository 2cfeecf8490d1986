"""convert, export, verify, inspect: through the command line, in this process."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

import expertmesh.checkpoints.convert as conversion
from expertmesh.checkpoints.files.paths import _advise
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.planning.planner.model_config import find_config
from tests.checkpoints.commands import change_manifest, change_tensors, read, run
from tests.tiny import save_model, save_tokenizer, tiny_mixtral


def test_reading_ahead_follows_no_link_out_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "model", tmp_path / "outside.safetensors"
    inside.mkdir()
    for file in (outside, inside / "a.safetensors", inside / "d.safetensors"):
        file.write_bytes(b"x" * 300_000)
    (inside / "b.safetensors").symlink_to(outside)
    os.mkfifo(inside / "c.safetensors")
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, length, advice: advised.append(offset))
    _advise(inside, 400_000)
    assert advised == [0, 2**17, 2**18, 0], "all of the first file, and the beginning of the last"


@pytest.fixture(scope="module")
def shards(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "ep4"
    run("convert", tiny_model, out, "--ep-size", 4, "--max-shard-size", "30KB")
    return out


@pytest.mark.parametrize(
    ("ep_size", "dtype", "original"),
    [
        (4, torch.bfloat16, True),
        (2, torch.float32, False),
        pytest.param(1, torch.float32, True, marks=pytest.mark.slow),
        pytest.param(8, torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_there_and_back_is_bit_exact(tmp_path: Path, ep_size: int, dtype: torch.dtype, original: bool) -> None:
    """Of files with a tensor an expert, or fused ones."""
    source, there, back = tmp_path / "source", tmp_path / "there", tmp_path / "back"
    save_model(source, dtype, "50KB", save_original_format=original)
    save_tokenizer(source)
    run("convert", source, there, "--ep-size", ep_size)
    assert len(list(there.glob("ep-*.safetensors"))) == ep_size
    run("export", there, back, "--max-shard-size", "50KB", "--workers", 3)
    before, after = read(source), read(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) and after[name].dtype == dtype for name, tensor in before.items())
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    # shards of shards, at another ep size
    run("convert", there, tmp_path / "other", "--ep-size", 2)
    for a, b in ((source, there), (there, back), (source, back), (tmp_path / "other", source)):
        run("verify", a, b)


def test_each_command_says_what_it_wrote(tiny_model: Path, tmp_path: Path) -> None:
    shards, back = tmp_path / "shards", tmp_path / "back"
    said = run("convert", tiny_model, shards, "--ep-size", 4)
    assert f"wrote EP shards, ep 4: {shards} (" in said
    assert f" tensors in {len(list(shards.glob('*.safetensors')))} files, 0.00 GB)" in said
    wrote = f"wrote a Hugging Face directory: {back} ({len(read(tiny_model))} tensors in 1 files, 0.00 GB)"
    assert wrote in run("export", shards, back)


def test_layout_of_a_shard(shards: Path, tiny_model: Path) -> None:
    """Experts 2 and 3 lie in the second file, down transposed, concatenated along dim 0."""
    shard, hf = load_file(shards / "ep-00001-of-00004.safetensors"), read(tiny_model)
    prefix = "model.layers.1.block_sparse_moe.experts"
    for ours, theirs in (("w1", "w1"), ("v1", "w3"), ("w2", "w2")):
        matrices = [hf[f"{prefix}.{n}.{theirs}.weight"] for n in (2, 3)]
        expected = torch.cat([matrix.t() for matrix in matrices] if ours == "w2" else matrices)
        assert torch.equal(shard[f"model.layers.1.mlp.experts.mlp.{ours}.2-3"], expected)
    manifest = json.loads((shards / "manifest.json").read_text())
    (entry,) = [e for e in manifest["tensors"] if e["name"] == "model.layers.1.mlp.experts.mlp.w2.2-3"]
    assert (entry["experts"], entry["file"]) == ([2, 4], "ep-00001-of-00004.safetensors")


def test_dtype(tiny_model: Path, tmp_path: Path) -> None:
    run("convert", tiny_model, tmp_path / "bf16", "--ep-size", 2, "--dtype", "bfloat16")
    run("export", tmp_path / "bf16", tmp_path / "back")
    assert all(tensor.dtype == torch.bfloat16 for tensor in read(tmp_path / "back").values())
    assert "float32 against bfloat16" in run("verify", tiny_model, tmp_path / "back", code=1)
    run("verify", tiny_model, tmp_path / "back", "--rtol", 0.01)
    run("verify", tiny_model, tmp_path / "back", "--rtol", 1e-6, code=1)


def test_inspect(tiny_model: Path, shards: Path) -> None:
    """From the heads alone: form, family, numbers, tensors."""
    told, of_source = run("inspect", shards, "--tensors"), run("inspect", tiny_model)
    assert "EP shards, ep 4" in told
    assert "family mixtral" in told
    assert "ep-00002-of-00004.safetensors model.layers.0.mlp.experts.mlp.v1.4-5 [96, 32] float32" in told
    tensors = read(tiny_model)
    total = sum(tensor.numel() for tensor in tensors.values())
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    for said in (told, of_source):
        assert f"elements {total:,}, of them {experts:,} in tensors of experts" in said
        assert "complete" not in said, "which is not known without the model"
    assert "Hugging Face directory" in of_source
    assert f"tensors {len(tensors)}: {len(tensors)} float32" in of_source


def test_inspect_with_its_model(tiny_model: Path, shards: Path, tmp_path: Path) -> None:
    told, model = run("inspect", shards, "--check"), tiny_mixtral()
    total = model.num_parameters()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    for said in (
        "experts 8 in each of 2 layers, top-2 routing",
        f"parameters {total:,}, of them {experts:,} in experts",
        f"active {total - experts * 6 // 8:,} per token",
        f"per rank {total:,} at ep 1, {total // 2:,} at ep 2",
        "complete yes",
        "checksums match",
    ):
        assert said in told
    assert "checksums none in this form" in run("inspect", tiny_model, "--check")

    def change(tensors: Any) -> None:
        del tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    shutil.copytree(tiny_model, tmp_path / "model")
    change_tensors(tmp_path / "model" / "model.safetensors", change)
    run("inspect", tmp_path / "model")  # the headers are sound
    told = run("inspect", tmp_path / "model", "--check", code=1)
    assert "carried 1 tensors (0.0 MB): model.layers.0.self_attn.rotary_emb (1)" in told
    assert "complete no: tensor lm_head.weight is missing" in told


def test_inspect_finds_a_damaged_byte(shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    file = tmp_path / "shards" / "ep-00001-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    run("inspect", tmp_path / "shards")
    assert f"{file}: is damaged" in run("inspect", tmp_path / "shards", "--check", code=2)
    for name, *flags in (("convert", "--ep-size", 2), ("export",)):
        assert f"{file}: is damaged" in run(name, tmp_path / "shards", tmp_path / "out", *flags, code=2)
        assert not (tmp_path / "out").exists()


def test_shards_with_rows_twice(shards: Path, tmp_path: Path) -> None:
    """A parameter that another tensor has once more, though all checksums are right."""
    path = tmp_path / "shards"
    shutil.copytree(shards, path)

    def change(manifest: Any) -> None:
        entry = next(e for e in manifest["tensors"] if e["parameter"] == "model.norm.weight")
        file = path / entry["file"]
        change_tensors(file, lambda tensors: tensors.update(again=tensors[entry["name"]] + 1))
        content = file.read_bytes()
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        sums = {"xxh3_128": xxhash.xxh3_128(content), "header_xxh3_128": xxhash.xxh3_128(header)}
        manifest["files"][entry["file"]] |= {name: found.hexdigest() for name, found in sums.items()}
        manifest["files"][entry["file"]]["bytes"] = len(content)
        manifest["tensors"].append({**entry, "name": "again"})

    change_manifest(path, change)
    for command in (("inspect", path, "--check"), ("export", path, tmp_path / "back")):
        assert "model.norm.weight has dim-0 index 0 in two tensors" in run(*command, code=2)


def test_shards_of_another_version(shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "shards")
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert manifest["version"] == 4
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps({**manifest, "version": 3}))
    for command in (("inspect", tmp_path / "shards"), ("export", tmp_path / "shards", tmp_path / "back")):
        assert "version 3 is unknown; this release reads 'expertmesh-ep-shards' version 4: convert" in run(
            *command, code=2
        )


def test_an_interrupted_conversion_is_not_whole_and_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write, room, out = conversion._write_file, 2, tmp_path / "out"

    def record(file: Any, *rest: Any) -> Any:
        if len(written) == room:
            raise OSError(28, "No space left on device")
        written.append(file.name)
        return write(file, *rest)

    command = ("convert", tiny_model, out, "--ep-size", 4, "--workers", 1)
    monkeypatch.setattr(conversion, "_write_file", record)
    assert "No space left on device" in run(*command, code=2)
    assert not (out / "manifest.json").exists()
    run("inspect", out, code=2)
    run("export", out, tmp_path / "back", code=2)
    written.clear()
    room = 9
    run(*command)
    rest = ["ep-00002-of-00004.safetensors", "ep-00003-of-00004.safetensors", "dense-00001-of-00001.safetensors"]
    assert written == rest
    run("verify", tiny_model, out)
    assert not list(out.glob("*.done")) + list(out.glob("*.part"))


def test_a_changed_source_is_converted_anew(tmp_path: Path) -> None:
    """What an interrupted conversion had finished is worth nothing once the source is another."""
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(source)
    run("convert", source, out, "--ep-size", 2)
    (out / "manifest.json").unlink()
    (out / "ep-00000-of-00002.safetensors.done").write_text(json.dumps({"fingerprint": "another", "record": {}}))
    save_model(source, seed=1)
    run("convert", source, out, "--ep-size", 2)
    run("verify", source, out)


BAD_ARGUMENTS = [
    ("convert {model} {out} --ep-size 3", "--ep-size 3 does not divide the 8 experts"),
    ("convert /no/such {out} --ep-size 2", "convert /no/such: no such directory"),
    ("convert {model} {model} --ep-size 2", "which this command reads"),
    ("export {shards} {shards}", "which this command reads"),
    ("convert {model} {shards} --ep-size 2", "already exists and is complete"),
    ("export /no/such {out}", "/no/such: no such directory"),
    ("export {shards} {out} --max-shard-size x", "--max-shard-size x"),
    ("export {shards} {out} --workers 0", "--workers 0"),
    ("verify {model} /no/such", "/no/such: no such directory"),
    ("verify {model} {model} --rtol -1", "--rtol -1.0: must be 0 or more"),
    ("verify {model} {model} --rtol nan", "--rtol nan: must be 0 or more"),
    ("frobnicate", "frobnicate"),
    # of a run's output directory, what lies in it; else what the directory is, not only the file that it lacks
    ("inspect {run}", "{run}/config.json: no such file; there is {run}/hf/config.json"),
    ("merge {run}/hf {run} {out}", "; there is {run}/adapter/adapter_config.json"),
    ("merge {run}/adapter {run}/adapter {out}", "; {run}/adapter is an adapter; "),
    ("merge {run}/hf {run}/hf {out}", "; {run}/hf is a model, not an adapter"),
    ("merge {run}/hf {run}/step-1 {out}", "; {run}/step-1 is a training checkpoint; give the adapter"),
    ("merge {run}/empty {run}/adapter {out}", "{run}/empty/config.json: no such file$"),
    ("inspect {run}/checkpoints", "/config.json: no such file; there is {run}/checkpoints/step-2$"),
    ("export {run}/checkpoints/notes {out}", "notes: is a file; give one of its training checkpoints, such as "),
    ("inspect {run}/hf/config.json", "{run}/hf/config.json: is a file; give a directory, as {run}/hf$"),
]


def test_bad_arguments(tiny_model: Path, shards: Path, tmp_path: Path) -> None:
    places = {"model": tiny_model, "shards": shards, "out": tmp_path / "out", "run": tmp_path / "run"}
    shutil.copytree(tiny_model, tmp_path / "run/hf")
    files = ("adapter/adapter_config.json", "step-1/checkpoint.json", "empty/notes.json")
    for file in (*files, "checkpoints/step-2/checkpoint.json", "checkpoints/notes"):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text("{}")
    for command, said in BAD_ARGUMENTS:
        found = run(*command.format(**places).split(), code=2)
        assert said.format(**places) in f"{found}$", command
        assert not (tmp_path / "out").exists()
    with pytest.raises(ExpertMeshError, match="step-1 is a training checkpoint; `expertmesh-checkpoints export` makes"):
        open_source(tmp_path / "run/step-1")
    with pytest.raises(ExpertMeshError, match=f"--model {tmp_path}/run: .*; there is {tmp_path}/run/hf/config.json"):
        find_config(str(tmp_path / "run"))


def test_overwrite(tiny_model: Path, tmp_path: Path) -> None:
    run("convert", tiny_model, tmp_path / "out", "--ep-size", 8)
    run("convert", tiny_model, tmp_path / "out", "--ep-size", 2, code=2)
    run("convert", tiny_model, tmp_path / "out", "--ep-size", 2, "--overwrite")
    assert len(list((tmp_path / "out").glob("ep-*"))) == 2
