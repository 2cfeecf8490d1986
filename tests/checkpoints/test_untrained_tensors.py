"""What is not trained, and what lies beside the weights: carried over by every command, or dropped when asked."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from expertmesh.checkpoints.ep_shards.manifest import open_checkpoint
from expertmesh.checkpoints.files.dtypes import as_tensor
from expertmesh.checkpoints.files.encodings import decoded
from expertmesh.checkpoints.files.open_files import OpenFiles
from expertmesh.checkpoints.files.tensors import DiskTensor
from expertmesh.checkpoints.hf.headers import read_header
from expertmesh.checkpoints.hf.source import open_source
from expertmesh.checkpoints.hf.untrained_tensors import carried_values
from expertmesh.checkpoints.training_state import marker
from expertmesh.checkpoints.training_state.marker import carried_record, check_carried
from expertmesh.moe.hf_model.rope import read_rope_scaling
from expertmesh.moe.util.errors import ExpertMeshError
from tests.checkpoints.commands import change_manifest, change_tensors, run
from tests.encoded import BLOCK, change_config, from_fp8, to_fp8, to_mxfp4
from tests.untrained import (
    PREDICTOR,
    SIDE_FILES,
    VISION,
    add_tensors,
    assert_same_bits,
    read,
    save_deepseek,
    save_multimodal,
)

Saved = tuple[Path, dict[str, Tensor]]
"""A model, and what of it is not trained."""


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("multimodal") / "model"
    return path, save_multimodal(path)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("deepseek") / "model"
    return path, save_deepseek(path)


def load(kind: Any, path: Path) -> Any:
    """A model of transformers, all of whose tensors are in the directory."""
    model, told = kind.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["mismatched_keys"]
    return model


def test_a_vision_tower_and_predictors_go_there_and_back(multimodal: Saved, tmp_path: Path) -> None:
    source, untrained = multimodal
    shards, back = tmp_path / "shards", tmp_path / "back"
    told = run("convert", source, shards, "--ep-size", 2, "--max-shard-size", "30KB")
    assert f"copied unchanged, because not trained: {len(untrained)} tensors" in told
    assert len(list(shards.glob("carried-*.safetensors"))) > 1
    run("export", shards, back, "--max-shard-size", "50KB")
    assert_same_bits(read(back), read(source))
    for pair in ((source, shards), (shards, back), (back, source)):
        run("verify", *pair)
    told = run("inspect", back, "--check")
    assert f"carried {len(untrained)} tensors" in told
    assert f"mtp ({sum(name.startswith(PREDICTOR) for name in untrained)})" in told
    model = load(AutoModelForImageTextToText, back)
    assert type(model).__name__ == "Qwen3_5MoeForConditionalGeneration"
    assert_same_bits(model.state_dict(), {n: t for n, t in untrained.items() if n.startswith(VISION)})


@pytest.mark.parametrize("of_whole", [False, True])
def test_the_whole_decides_whether_embeddings_are_tied(multimodal: Saved, tmp_path: Path, of_whole: bool) -> None:
    """As in transformers, where the text part says something else, or its class another default."""
    source, out, name = tmp_path / "source", tmp_path / "out", "lm_head.weight"
    shutil.copytree(multimodal[0], source)
    said = json.loads((source / "config.json").read_text())
    said["tie_word_embeddings"], said["text_config"]["tie_word_embeddings"] = of_whole, not of_whole
    (source / "config.json").write_text(json.dumps(said))
    model: Any = AutoModelForImageTextToText.from_pretrained(source)
    assert model.config.tie_word_embeddings == of_whole
    if of_whole:  # the file has both, with other values; from transformers' export it has one
        told = run("convert", source, out, "--ep-size", 2, code=2)
        assert f"{name} differs from model.embed_tokens.weight, though config.json ties them; set tie_word" in told
        return
    assert not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    run("convert", source, out, "--ep-size", 2)
    scaled = open_source(source, read_rope_scaling("yarn:4"))
    for opened in (open_source(source), scaled):
        assert name in opened.names.parameters
    run("export", out, tmp_path / "text", "--drop-untrained")
    causal = load(AutoModelForCausalLM, tmp_path / "text")
    assert not causal.config.tie_word_embeddings
    assert torch.equal(causal.lm_head.weight, model.lm_head.weight)


@pytest.mark.slow
def test_layers_beyond_the_last_go_there_and_back(deepseek: Saved, tmp_path: Path) -> None:
    source, beyond = deepseek
    run("convert", source, tmp_path / "shards", "--ep-size", 4)
    run("export", tmp_path / "shards", tmp_path / "back")
    assert_same_bits(read(tmp_path / "back"), read(source))
    run("verify", source, tmp_path / "back")
    assert f"model.layers.3 ({len(beyond)})" in run("inspect", tmp_path / "back", "--check")
    load(AutoModelForCausalLM, tmp_path / "back")


def test_files_beside_the_weights_go_along(multimodal: Saved, tmp_path: Path) -> None:
    """Code among them, which is only copied; not what describes the files of weights."""
    source, _ = multimodal
    run("convert", source, tmp_path / "shards", "--ep-size", 2)
    run("export", tmp_path / "shards", tmp_path / "back")
    for path in (tmp_path / "shards", tmp_path / "back"):
        assert {name: (path / name).read_text() for name in SIDE_FILES} == SIDE_FILES
        assert json.loads((path / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert not (tmp_path / "back" / "manifest.json").exists()
    assert not (tmp_path / "shards" / "model.safetensors.index.json").exists()
    (tmp_path / "shards" / "additional_chat_templates" / "tools.jinja").write_text("another")
    run("inspect", tmp_path / "shards", "--check", code=2)  # the manifest has its checksum


@pytest.mark.parametrize("via_shards", [False, True], ids=["directly", "via shards"])
def test_dropping_leaves_a_causal_model(multimodal: Saved, tmp_path: Path, via_shards: bool) -> None:
    source, untrained = multimodal
    out, between = tmp_path / "out", tmp_path / "shards"
    if via_shards:
        told = run("convert", source, between, "--ep-size", 2, "--drop-untrained")
        assert f"left out, because not trained: {len(untrained)} tensors" in told
        run("export", between, out)
    else:
        run("export", source, out, "--drop-untrained")
    everything = read(source)
    assert read(out).keys() == everything.keys() - untrained.keys()
    assert_same_bits(everything, read(out))
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["mtp_num_hidden_layers"] == 0
    assert not {"vision_config", "auto_map"} & config.keys()
    assert not (out / "preprocessor_config.json").exists()
    model = load(AutoModelForCausalLM, out)
    expected = load(AutoModelForCausalLM, source)
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    run("inspect", out, "--check")
    told = run("verify", source, out, code=1)
    assert all(f"{name}: only in {source}" in told for name in untrained)


def test_dropping_predictors(deepseek: Saved, tmp_path: Path) -> None:
    source, beyond = deepseek
    run("export", source, tmp_path / "out", "--drop-untrained")
    assert read(tmp_path / "out").keys() == read(source).keys() - beyond.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    load(AutoModelForCausalLM, tmp_path / "out")
    run("inspect", tmp_path / "out", "--check")


def test_predictors_that_the_files_lack_are_not_promised(deepseek: Saved, tmp_path: Path) -> None:
    """As transformers saves such a model: with the number in config.json, and without their tensors. A server that
    drafts by them would not start."""
    source, beyond = deepseek
    shutil.copytree(source, tmp_path / "model")
    change_tensors(tmp_path / "model" / "model.safetensors", lambda tensors: [tensors.pop(name) for name in beyond])
    change_config(tmp_path / "model", num_nextn_predict_layers=1)
    said = "config.json no longer has num_nextn_predict_layers 1: the model's files have no layer for multi-token"
    assert said in run("export", tmp_path / "model", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    assert said not in run("export", source, tmp_path / "there")
    assert json.loads((tmp_path / "there" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def without(source: Path, out: Path, prefix: str) -> dict[str, Tensor]:
    """A copy of a model in one file, without the tensors of these names."""
    shutil.copytree(source, out)
    tensors = {name: tensor for name, tensor in read(out).items() if not name.startswith(prefix)}
    for file in (*out.glob("*.safetensors"), *out.glob("*.index.json")):
        file.unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("via_shards", [False, True], ids=["directly", "via shards"])
def test_a_tower_that_the_files_lack_is_not_promised(multimodal: Saved, tmp_path: Path, via_shards: bool) -> None:
    """What is exported loads as the language model that it is, the untrained layers for prediction with it."""
    model, out = tmp_path / "model", tmp_path / "out"
    tensors = without(multimodal[0], model, VISION)
    source = model
    if via_shards:
        run("convert", model, source := tmp_path / "shards", "--ep-size", 2)
    said = run("export", source, out)
    assert "config.json names a Qwen3_5MoeForConditionalGeneration, which lacks" in said
    assert "; the export is of the language model alone" in said
    assert_same_bits(read(out), tensors)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["mtp_num_hidden_layers"] == 1
    assert not (out / "preprocessor_config.json").exists()
    ids = torch.arange(3, 20)[None]
    exported, expected = load(AutoModelForCausalLM, out), load(AutoModelForCausalLM, model)
    assert torch.equal(exported(ids).logits, expected(ids).logits)
    assert "complete yes" in run("inspect", out, "--check")


def test_a_tower_of_which_something_is_missing(multimodal: Saved, tmp_path: Path) -> None:
    """It stays, and what transformers will draw is named."""
    without(multimodal[0], tmp_path / "model", f"{VISION}patch_embed.proj.bias")
    said = run("export", tmp_path / "model", tmp_path / "out")
    assert "lacks 1 tensors: model.visual.patch_embed.proj.bias (1); transformers draws them at random" in said
    assert "vision_config" in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_tower_and_no_predictors(multimodal: Saved, tmp_path: Path) -> None:
    without(multimodal[0], tmp_path / "model", PREDICTOR)
    assert "config.json no longer has mtp_num_hidden_layers 1" in run("export", tmp_path / "model", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["text_config"]["mtp_num_hidden_layers"], "vision_config" in config) == (0, True)


@pytest.mark.parametrize(
    ("prefix", "claim"),
    [
        (VISION, "complete no: config.json names a Qwen3_5MoeForConditionalGeneration, which lacks"),
        (f"{VISION}patch_embed.proj.bias", "lacks 1 tensors: model.visual.patch_embed.proj.bias (1)"),
        (PREDICTOR, "no tensors of layers for multi-token prediction that config.json names: mtp_num_hidden_layers"),
    ],
)
def test_inspect_names_claims_that_no_tensor_fills(multimodal: Saved, tmp_path: Path, prefix: str, claim: str) -> None:
    path = tmp_path / "model"
    without(multimodal[0], path, prefix)
    # what transformers does without makes it no less whole: what it saves itself lacks that too
    assert claim in run("inspect", path, "--check", code=0 if prefix == PREDICTOR else 1)


@pytest.mark.parametrize("thing", ["link out", "pipe", "device", "large"])
def test_files_that_do_not_go_along(tiny_model: Path, tmp_path: Path, thing: str) -> None:
    """They are told before anything is written; a link within the directory, and a directory, are all right."""
    model, name = tmp_path / "model", "preprocessor_config.json"
    shutil.copytree(tiny_model, model)
    (model / "kept.json").write_text("{}")
    (model / "processor_config.json").symlink_to("kept.json")
    (model / "directory.json").mkdir()
    (model / "hf_quant_config.json").write_text("{}")
    run("export", model, tmp_path / "out")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert (tmp_path / "out" / "processor_config.json").read_text() == "{}"
    secret = tmp_path / "secret"
    secret.write_text("secret")
    if thing == "pipe":
        os.mkfifo(model / name)
    elif thing == "large":
        (model / name).touch()
        os.truncate(model / name, 2**30 + 1)
    else:
        (model / name).symlink_to(secret if thing == "link out" else "/dev/zero")
    for command in (("export", model, tmp_path / "no"), ("convert", model, tmp_path / "no", "--ep-size", 2)):
        assert name in run(*command, code=2)
        assert not (tmp_path / "no").exists()


PREDICTED = "model.layers.3.mlp.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def encoded(deepseek: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DeepSeek in FP8, its predictors too, with a scale of the activations."""
    path = tmp_path_factory.mktemp("encoded") / "model"
    shutil.copytree(deepseek[0], path)
    tensors = {}
    for name, tensor in read(path).items():
        tensors[name] = tensor
        if re.search(r"proj.*\.weight$", name) and tensor.dim() == 2 and "embed" not in name:
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor)
    tensors[f"{PREDICTED.removesuffix('weight')}input_scale"] = torch.ones(())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": list(BLOCK)})
    return path


@pytest.mark.slow
def test_encoded_predictors_stay_codes_in_shards(encoded: Path, tmp_path: Path) -> None:
    run("convert", encoded, tmp_path / "shards", "--ep-size", 2)
    run("convert", tmp_path / "shards", tmp_path / "again", "--ep-size", 4)
    stored = read(encoded)
    beyond = {name: t for name, t in stored.items() if "layers.3." in name and not name.endswith("input_scale")}
    assert stored[PREDICTED].dtype == torch.float8_e4m3fn
    for path in (tmp_path / "shards", tmp_path / "again"):
        carried = {n: t for file in path.glob("carried-*.safetensors") for n, t in load_file(file).items()}
        assert carried.keys() == beyond.keys()
        assert_same_bits(carried, beyond)
        run("verify", encoded, path)
        run("inspect", path, "--check")


@pytest.mark.sample(7)
@pytest.mark.parametrize("way", ["directly", "via shards", "via bfloat16"])
def test_encoded_predictors_are_dequantized_in_exports(encoded: Path, tmp_path: Path, way: str) -> None:
    """Where the config no longer says how codes are read, there are none."""
    source = encoded
    if way != "directly":
        source = tmp_path / "shards"
        more = ("--dtype", "bfloat16") if way == "via bfloat16" else ()
        run("convert", encoded, source, "--ep-size", 2, *more)
    run("export", source, tmp_path / "back")
    stored, found = read(encoded), read(tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert found.keys() == {name for name in stored if not name.endswith(("_scale_inv", "input_scale"))}
    assert not any(tensor.dtype == torch.float8_e4m3fn for tensor in found.values())
    for name in found:
        if "layers.3." in name:
            scales = stored.get(f"{name}_scale_inv")
            expected = stored[name] if scales is None else from_fp8(stored[name], scales)
            assert_same_bits(found, {name: expected})
    if way != "via bfloat16":  # which rounds what is plain, too
        run("verify", encoded, tmp_path / "back")
    run("verify", encoded, tmp_path / "back", "--rtol", 0.01)
    load(AutoModelForCausalLM, tmp_path / "back")


def test_mxfp4_is_dequantized_as_transformers_does_it(tmp_path: Path) -> None:
    """A stack of matrices in MXFP4, of which only one that is not trained is left."""
    blocks, scales = to_mxfp4(torch.randn(3, 5, 64))
    save_file({"mtp.experts.up_blocks": blocks, "mtp.experts.up_scales": scales}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    for transposed in (True, False):
        carried = decoded(stored, None, transposed).tensors["mtp.experts.up"]
        expected = convert_moe_packed_tensors(blocks, scales).contiguous()
        expected = expected if transposed else expected.transpose(1, 2)
        found = np.concatenate(list(carried_values(carried, OpenFiles())))
        assert torch.equal(as_tensor(found, "BF16").view(*carried.shape), expected)


def test_long_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces have complete rows; a row longer than a piece is cut."""
    monkeypatch.setattr("expertmesh.checkpoints.hf.untrained_tensors._PIECE_BYTES", 100)
    tensors = {"a": torch.randn(7, 3, 5), "b": torch.randn(120), "c": torch.tensor(1.5), "d": torch.randn(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    for part in stored.values():
        carried = DiskTensor(part.name, part.shape, part.dtype, parts=(part,))
        pieces = list(carried_values(carried, OpenFiles()))
        assert all(piece.nbytes <= 100 for piece in pieces)
        assert all(piece.size % 5 == 0 for piece in pieces if carried.name == "a")
        found = np.concatenate([*pieces, np.empty(0, np.float32)])
        assert np.array_equal(found, tensors[carried.name].numpy().reshape(-1))


def test_a_hub_id(multimodal: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands take one; what is fetched is what is read, under whatever names an index has it."""
    source, snapshot = multimodal[0], tmp_path / "models--x--y" / "snapshots" / "0123abc"
    remote = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]

    def snapshot_download(repo_id: str, allow_patterns: list[str], revision: str | None = None) -> str:
        assert (repo_id, revision) in (("x/y", None), ("x/y", "0123abc"))
        offered = [*remote, "consolidated.safetensors"]
        for name in filter_repo_objects(offered, allow_patterns=allow_patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    run("verify", "x/y", source)
    run("inspect", "x/y", "--check")
    run("export", "x/y", tmp_path / "out")
    assert {name for name in remote if (snapshot / name).exists()} == set(remote)
    monkeypatch.undo()
    for command in (("verify", "x/y", source), ("inspect", "x/y"), ("export", "x/y", tmp_path / "no")):
        said = run(*command, code=2)
        assert f"{command[0]} x/y: no such directory, and not available from the hub" in said


def test_verify_compares_what_is_carried(multimodal: Saved, tmp_path: Path) -> None:
    """Its values, and its shape, also where one begins as the other does, and goes on."""
    source, norm, experts = multimodal[0], f"{PREDICTOR}norm.weight", f"{PREDICTOR}layers.0.mlp.experts.gate_up_proj"
    for number, (change, said, close) in enumerate(
        (
            (lambda t: t[experts].view(torch.int16)[3, 1, 2].bitwise_xor_(1), f"{experts}: 1 of", 0),
            (lambda t: t.update({norm: torch.cat([t[norm], t[norm]])}), f"{norm}: shape [", 1),
        )
    ):
        other = tmp_path / str(number)
        shutil.copytree(source, other)
        change_tensors(other / "extra.safetensors", change)
        for pair in ((source, other), (other, source)):
            assert said in run("verify", *pair, code=1)
        run("verify", source, other, "--rtol", 0.01, code=close)


def test_a_training_checkpoint_knows_what_its_exports_carry(
    multimodal: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its content too: one of the same name, shape and dtype is another."""
    source, name = tmp_path / "source", f"{PREDICTOR}fc.weight"
    shutil.copytree(multimodal[0], source)
    opened = open_source(source)
    checkpoint = open_checkpoint(opened, opened.names)
    recorded = {"carried": carried_record(checkpoint)}
    monkeypatch.setattr(marker, "read_marker", lambda path: recorded)
    check_carried(tmp_path, checkpoint)
    change_tensors(source / "extra.safetensors", lambda tensors: tensors[name].add_(1))
    with pytest.raises(ExpertMeshError, match=f"{re.escape(name)} is different in .*--drop-untrained"):
        check_carried(tmp_path, open_checkpoint(opened, opened.names))


def test_stretched_positions_leave_frequencies_behind(tiny_model: Path, tmp_path: Path) -> None:
    """Those that old files hold follow from the config, and are no longer right once it has others."""
    model, name = tmp_path / "model", "model.layers.0.self_attn.rotary_emb.inv_freq"
    shutil.copytree(tiny_model, model)
    add_tensors(model, {name: torch.ones(4)})
    run("convert", model, tmp_path / "shards", "--ep-size", 2)
    for path in (model, tmp_path / "shards"):
        plain, stretched = open_source(path), open_source(path, read_rope_scaling("yarn:4"))
        assert [tensor.name for tensor in open_checkpoint(plain, plain.names).carried] == [name]
        assert not open_checkpoint(stretched, stretched.names).carried


def test_a_manifest_that_lists_a_carried_tensor_twice(multimodal: Saved, tmp_path: Path) -> None:
    run("convert", multimodal[0], tmp_path / "shards", "--ep-size", 2)
    change_manifest(tmp_path / "shards", lambda manifest: manifest["carried"].append(manifest["carried"][0]))
    assert "lists a tensor of an export twice" in run("export", tmp_path / "shards", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()
