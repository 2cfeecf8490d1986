"""Names and links that lead out of the directory, things that are no files, and code beside the weights."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from expertmesh.checkpoints.ep_shards.manifest import MANIFEST
from expertmesh.checkpoints.files.checksums import seal
from expertmesh.checkpoints.hf.hub import resolve_model
from expertmesh.checkpoints.training_state.marker import MARKER
from expertmesh.checkpoints.training_state.resuming import find_checkpoint
from expertmesh.training.data.chat import set_chat_template
from tests.hostile.harness import Refused, Watch
from tests.hostile.models import loaded, loaded_model, same_bits, tokenizer_of
from tests.hostile.mutations import dumped
from tests.hostile.test_inputs import INDEX, Call

Origin = Callable[[str], Path]
PART = "model-00001-of-00003.safetensors"
ELSEWHERE = [
    "../outside/{}", "{outside}/{}", "../../x/{}", "./../outside/{}", "sub/../../outside/{}", "..", ".", "", "/",
]  # fmt: skip
NO_FILES = ["a\0b", "x" * 300, "x/" * 3000, "\ud800", "sub", "pipe", "link", "loop", "device", "nowhere"]


def _spoil(path: Path, watch: Watch, file: Path) -> Path:
    """Put a directory, pipe, links and device into `path`, and the file's twin outside of it."""
    outside = watch.directory / "outside"
    outside.mkdir(exist_ok=True)
    shutil.copy(file, outside / file.name)
    (path / "sub").mkdir()
    os.mkfifo(path / "pipe")
    (path / "link").symlink_to(outside / file.name)
    (path / "loop").symlink_to("loop")
    (path / "device").symlink_to("/dev/zero")
    watch.forbid(outside)
    return outside


def names_in_tables(watch: Watch, in_parts: Path, shards: Path, trained: Path) -> None:
    """Each table in turn names, for a file of its own, another."""
    for origin, table_name, file, read in (
        (in_parts, INDEX, PART, loaded),
        (shards, MANIFEST, "config.json", loaded),
        (trained, MARKER, "state/__0_0.distcp", lambda path: find_checkpoint(str(path), path.parent)),
    ):
        path = watch.directory / table_name.removesuffix(".json")
        shutil.copytree(origin, path)
        table = json.loads((path / table_name).read_text())
        outside = _spoil(path, watch, path / file)
        for template in ELSEWHERE + NO_FILES:
            name = template.format(Path(file).name, outside=outside)
            text = json.dumps({key: value for key, value in table.items() if key != "checksum"})
            changed = json.loads(text.replace(json.dumps(file), json.dumps(name)))
            (path / table_name).write_bytes(dumped(changed if table_name == INDEX else seal(changed)))
            watch.refuse(f"{table_name} names {name!r:.60}", partial(read, path), str(path))


def links(watch: Watch, in_parts: Path, shards: Path, trained: Path) -> None:
    """A link under a listed name: out of the directory it is refused, within it or into the hub's cache it is not."""
    outside = watch.directory / "outside"
    outside.mkdir()
    for origin, file in (
        (in_parts, PART),
        *((shards, name) for name in ("config.json", "dense-00001-of-00002.safetensors")),
        *((trained, name) for name in ("state/__0_0.distcp", "state/.metadata", "model/config.json")),
    ):
        expected = loaded(origin)
        shutil.rmtree(outside)
        shutil.copytree(origin, outside)
        for target, is_refused in ((outside / file, True), (f"{Path(file).name}.moved", False)):
            path = watch.directory / "linked"
            shutil.copytree(origin, path)
            (path / file).rename(path / f"{file}.moved")
            (path / file).symlink_to(target)
            found = watch.attempt(f"{file} is a link to {target}", partial(loaded, path), "outside of")
            assert isinstance(found, Refused) == is_refused, (file, target)
            assert is_refused or same_bits(found, expected)
            shutil.rmtree(path)


def hub_cache(watch: Watch, in_parts: Path, *_: Path) -> None:
    """As `huggingface_hub` lays it out; and a snapshot that borrows from another model's blobs."""
    expected = loaded(in_parts)
    ours, theirs = (watch.directory / "hub" / f"models--x--{name}" for name in ("ours", "theirs"))
    for repository, blobs, is_refused in ((ours, ours, False), (theirs, ours, True)):
        snapshot = repository / "snapshots" / "0123abc"
        snapshot.mkdir(parents=True)
        (blobs / "blobs").mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(sorted(in_parts.iterdir())):
            shutil.copy(file, blobs / "blobs" / str(number))
            (snapshot / file.name).symlink_to(os.path.relpath(blobs / "blobs" / str(number), snapshot))
        found = watch.attempt(f"snapshot of {repository}", partial(loaded, snapshot), "outside of")
        assert isinstance(found, Refused) == is_refused
        assert is_refused or same_bits(found, expected)


def things_that_are_no_files(watch: Watch, small: Path, *_: Path) -> None:
    """Under the names that are always read."""
    for name in ("config.json", INDEX, "model.safetensors", MANIFEST, MARKER):
        for thing in ("directory", "pipe", "device", "dangling link", "loop"):
            path = watch.directory / "model"
            shutil.copytree(small, path)
            (path / name).unlink(missing_ok=True)
            if thing == "directory":
                (path / name).mkdir()
            elif thing == "pipe":
                os.mkfifo(path / name)
            else:
                target = {"device": "/dev/zero", "dangling link": "nowhere", "loop": name}[thing]
                (path / name).symlink_to(target)
            found = watch.attempt(f"{name} is a {thing}", partial(loaded, path), str(path))
            # what is not there is not missed where the directory has another form
            assert isinstance(found, Refused) or thing in ("dangling link", "loop"), (name, thing)
            shutil.rmtree(path)


CODE = """
import pathlib
pathlib.Path({canary!r}).touch()
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast
class Config(MixtralConfig): pass
class Model(MixtralForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


def code_beside_weights(watch: Watch, small: Path, trained: Path) -> None:
    canary, path = watch.directory / "canary", watch.directory / "model"
    shutil.copytree(small, path)
    for file in (trained / "model").glob("tokenizer*"):
        shutil.copy(file, path)
    code = CODE.format(canary=str(canary))
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "torch.py", "json.py"):
        (path / name).write_text(code)
    for name in ("pytorch_model.bin", "tokenizer.pkl", "training_args.bin", "optimizer.pt"):
        (path / name).write_bytes(pickle.dumps(Call(os.system, f"touch {canary}")))
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] = 10
    of_tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    maps: list[Any] = [
        {"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"},
        {"AutoConfig": "../model/configuration_x.Config", "AutoTokenizer": ["tokenization_x.Tokenizer", None]},
        {"AutoConfig": "other/repository--configuration_x.Config"},
        {"AutoTokenizer": ["tokenization_x.Tokenizer", "tokenization_x.Tokenizer"]},
        {"AutoTokenizer": "tokenization_x.Tokenizer", "AutoConfig": 3},
        "configuration_x.Config",
        [],
    ]
    others: list[dict[str, Any]] = [
        {"architectures": ["modeling_x.Model"]},
        {"_attn_implementation": "kernels-community/x", "attn_implementation": "other/kernel"},
        {"custom_pipelines": {"x": {"impl": "modeling_x.Model"}}},
        {"quantization_config": {"quant_method": "x", "modules_to_not_convert": "modeling_x"}},
        {"tokenizer_class": "Tokenizer", "transformers_version": "9" * 50},
        {"dtype": "os.system", "torch_dtype": "load"},
    ]
    for changes in [{"auto_map": auto_map} for auto_map in maps] + others:
        (path / "config.json").write_bytes(dumped({**config, **changes}))
        watch.attempt(f"config {changes}", lambda: loaded_model(path), str(path))
        (path / "tokenizer_config.json").write_bytes(dumped({**of_tokenizer, **changes}))
        watch.attempt(f"tokenizer {changes}", lambda: tokenizer_of(path), str(path))
    # without weights in safetensors, the pickled ones are no substitute
    (path / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, path / "model.safetensors.bin")
    watch.refuse("only pytorch_model.bin", lambda: loaded(path), str(path))


def names_given(watch: Watch, data: Path) -> None:
    for name in [
        "",
        ".",
        "..",
        "x" * 300,
        "x/" * 3000,
        "\0",
        "a\0b",
        "\ud800",
        "/dev/zero",
        "/proc/self/mem",
        "~",
        "a/b/c",
    ]:
        watch.attempt(f"--model {name!r:.60}", partial(resolve_model, name), "--model")
    tokenizer = tokenizer_of(data / "tokenizer")
    for name in ("x" * 300, "a\0b", "/dev/zero", "..", str(watch.directory)):
        watch.refuse(f"{name!r:.50}", partial(set_chat_template, tokenizer, name), "--chat-template")


@pytest.mark.parametrize(
    ("function", "origins", "num_cases"),
    [
        pytest.param(names_in_tables, ["in parts", "shards", "trained"], 57, marks=pytest.mark.slow),
        pytest.param(links, ["in parts", "shards", "trained"], 12, marks=pytest.mark.slow),
        (hub_cache, ["in parts"], 2),
        (things_that_are_no_files, ["model"], 25),
        (code_beside_weights, ["model", "trained"], 27),
        (names_given, ["data"], 17),
    ],
)
def test_paths(
    campaign: Callable[..., int],
    origin: Origin,
    function: Callable[..., None],
    origins: tuple[str, ...],
    num_cases: int,
) -> None:
    assert campaign(function, *map(origin, origins)) == num_cases
