"""Broken and hostile EP shards and training checkpoints: manifest.json, checkpoint.json, and the files they list."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.ep_shards.manifest import MANIFEST, check_all_bytes
from expertmesh.checkpoints.files.checksums import file_checksum, seal
from expertmesh.checkpoints.inspection import describe, describe_model, read_heads
from expertmesh.checkpoints.opening import open_readable
from expertmesh.checkpoints.training_state.marker import MARKER, recorded_transposed
from expertmesh.checkpoints.training_state.resuming import find_checkpoint
from expertmesh.moe.util.errors import ExpertMeshError
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.hostile.harness import Refused, Watch, fuzz
from tests.hostile.models import SMALL, Tensors, loaded, same_bits
from tests.hostile.mutations import BROKEN_TEXTS, HOSTILE_VALUES, changed_bytes, changed_document, dumped
from tests.tiny import save_model, save_tokenizer
from tests.untrained import add_tensors

UNTRAINED = "model.layers.0.self_attn.rotary_emb.inv_freq"
"""A tensor that is not trained."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    save_model(path / "hf", **SMALL)
    add_tensors(path / "hf", {UNTRAINED: torch.ones(4)})
    command = ["convert", str(path / "hf"), str(path / "ep2"), "--ep-size", "2", "--max-shard-size", "1KB"]
    assert main(command) == 0
    return path / "ep2"


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training checkpoint of one step."""
    path = tmp_path_factory.mktemp("saved")
    save_model(path / "model", **{**SMALL, "vocab_size": 320})
    add_tensors(path / "model", {UNTRAINED: torch.ones(4)})
    save_tokenizer(path / "model")
    argv = ["--model", str(path / "model"), "--dataset", str(tiny_data), "--output-dir", str(path), "--use-cpu"]
    argv += ["--max-steps", "1", "--save-steps", "1", "--export", "false", "--overwrite-output-dir"]
    ((code, errors),) = ranks.run(run_main, 1, argv, join_group=False)
    assert code == 0, errors
    return path / "checkpoints" / "step-00000001"


def described(path: Path) -> Tensors:
    """What is in a checkpoint, after `inspect` has told it and every byte was held against the checksums."""
    assert list(describe(path, read_heads(path), True))
    assert list(describe_model(open_readable(path)))
    check_all_bytes(path)
    return loaded(path)


def manifests(watch: Watch, num_cases: int, shards: Path) -> None:
    def transposed(content: bytes) -> set[str]:
        return {entry["parameter"] for entry in json.loads(content)["tensors"] if entry.get("transposed")}

    own = transposed((shards / MANIFEST).read_bytes())

    def as_said(weights: Tensors, content: bytes) -> Tensors:
        return turned(weights, transposed(content) ^ own)

    _tables(watch, num_cases, shards, MANIFEST, described, as_said)


def markers(watch: Watch, num_cases: int, saved: Path) -> None:
    def resumed(path: Path) -> Tensors:
        assert find_checkpoint(str(path), path.parent) == (path, [])
        return described(path)

    own = recorded_transposed(saved)

    def as_said(weights: Tensors, content: bytes) -> Tensors:
        return turned(weights, set(json.loads(content).get("transposed", [])) ^ own)

    _tables(watch, num_cases, saved, MARKER, resumed, as_said)


def turned(weights: Tensors, names: set[str]) -> Tensors:
    """A square matrix is the other way round if a table says so: whoever can seal it can also write weights."""
    return {name: weight.t() if name in names else weight for name, weight in weights.items()}


def _tables(
    watch: Watch,
    num_cases: int,
    origin: Path,
    name: str,
    read: Callable[[Path], Tensors],
    as_said: Callable[[Tensors, bytes], Tensors] = lambda weights, _: weights,
) -> None:
    """Mutations of a sealed table: its bytes, its content, and its content with a seal to match.

    Args:
        as_said: the weights that are to be read where a table is taken, from those of the original.
    """
    path = watch.directory / "checkpoint"
    shutil.copytree(origin, path)
    expected = read(path)
    original = (path / name).read_bytes()
    table = {key: value for key, value in json.loads(original).items() if key != "checksum"}

    def attempt(case: str, content: bytes) -> None:
        (path / name).write_bytes(content)
        found = watch.attempt(case, lambda: read(path), str(path))
        if not isinstance(found, Refused):
            assert same_bits(found, as_said(expected, content)), f"{case}: another model"

    def sealed(document: Any) -> bytes:
        return dumped(seal(document))

    for text_name, text in BROKEN_TEXTS.items():
        attempt(text_name, text)
    for number, key in enumerate(table):
        for value in HOSTILE_VALUES[number % 3 :: 3]:
            attempt(f"{key} = {value!r:.60}", sealed({**table, key: value}))
    contents = st.one_of(
        changed_document(table).map(sealed), changed_document(json.loads(original)).map(dumped), changed_bytes(original)
    )
    fuzz(num_cases, contents, lambda content: attempt(f"{content!r:.2000}", content))


def damaged_shards(watch: Watch, num_cases: int, shards: Path) -> None:
    """Any change of a shard's bytes is found when it is loaded."""
    _damaged(watch, num_cases, shards, sorted(file.name for file in shards.glob("*.safetensors")))


def damaged_states(watch: Watch, num_cases: int, saved: Path) -> None:
    _damaged(watch, num_cases, saved, ["state/.metadata", "state/__0_0.distcp", "model/config.json"])


def _damaged(watch: Watch, num_cases: int, origin: Path, names: list[str]) -> None:
    path = watch.directory / "checkpoint"
    shutil.copytree(origin, path)
    originals = {name: (path / name).read_bytes() for name in names}

    def attempt(change: tuple[str, bytes]) -> None:
        name, content = change
        (path / name).write_bytes(content)
        found = watch.attempt(f"{name}: {content!r:.300}", lambda: loaded(path), Path(name).name)
        assert isinstance(found, Refused) == (content != originals[name]), f"{name}: {content!r:.300}"
        (path / name).write_bytes(originals[name])

    changes = [st.tuples(st.just(name), changed_bytes(content)) for name, content in originals.items()]
    fuzz(num_cases, st.one_of(changes), attempt)


def forged_states(watch: Watch, num_cases: int, saved: Path) -> None:
    """A changed state with checksums to match: whoever can write them can also write other weights, but run no code."""
    path = watch.directory / "checkpoint"
    shutil.copytree(saved, path)
    names = ["state/.metadata", "state/__0_0.distcp"]
    originals = {name: (path / name).read_bytes() for name in names}
    canary = watch.directory / "canary"

    def attempt(change: tuple[str, bytes]) -> None:
        name, content = change
        (path / name).write_bytes(content)
        _reseal(path, name)
        watch.attempt(f"{name}: {content!r:.300}", lambda: loaded(path), str(path))
        (path / name).write_bytes(originals[name])
        assert not canary.exists(), f"{name}: ran code"
        _reseal(path, name)

    for payload in (
        _Call(os.system, f"touch {canary}"),
        _Call(canary.touch),
        _Call(eval, f"open({str(canary)!r}, 'w')"),
    ):
        attempt((names[0], pickle.dumps(payload)))
        attempt((names[1], pickle.dumps(payload)))
    for text in BROKEN_TEXTS.values():
        attempt((names[0], text))
    elsewhere = originals[names[0]].replace(b"__0_0.distcp", b"../../secret")
    assert elsewhere != originals[names[0]]
    attempt((names[0], elsewhere))
    changes = [st.tuples(st.just(name), changed_bytes(content)) for name, content in originals.items()]
    fuzz(num_cases, st.one_of(changes), attempt)


class _Call:
    """Pickled, it is a call that is made by whoever unpickles it."""

    def __init__(self, function: Any, *args: Any):
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _reseal(path: Path, name: str) -> None:
    marker = {key: value for key, value in json.loads((path / MARKER).read_text()).items() if key != "checksum"}
    file = path / name
    marker["files"][name] = {"bytes": file.stat().st_size, "xxh3_128": file_checksum(file)}
    (path / MARKER).write_bytes(dumped(seal(marker)))


@pytest.mark.parametrize("said", ["F32", 0, None])
def test_manifest_says_which_matrices_are_transposed(shards: Path, tmp_path: Path, said: Any) -> None:
    """Of a square one the shape does not tell."""
    shutil.copytree(shards, tmp_path / "ep2")
    manifest = json.loads((tmp_path / "ep2" / MANIFEST).read_bytes())
    del manifest["checksum"]
    (entry,) = [entry for entry in manifest["tensors"] if entry["name"].endswith("o_proj.weight")]
    entry["transposed"] = said
    (tmp_path / "ep2" / MANIFEST).write_bytes(dumped(seal(manifest)))
    with pytest.raises(ExpertMeshError, match=rf"{MANIFEST}: .*o_proj\.weight: transposed is {said!r}, not true"):
        open_readable(tmp_path / "ep2")
    del entry["transposed"]
    (tmp_path / "ep2" / MANIFEST).write_bytes(dumped(seal(manifest)))
    with pytest.raises(ExpertMeshError, match="transposed is None"):
        open_readable(tmp_path / "ep2")


@pytest.mark.release
def test_manifests(campaign: Callable[..., None], shards: Path) -> None:
    campaign(manifests, shards)


@pytest.mark.release
def test_markers(campaign: Callable[..., None], saved: Path) -> None:
    campaign(markers, saved)


@pytest.mark.release
def test_damaged_shards(campaign: Callable[..., None], shards: Path) -> None:
    campaign(damaged_shards, shards)


def test_damaged_states(campaign: Callable[..., None], saved: Path) -> None:
    campaign(damaged_states, saved)


@pytest.mark.release
def test_forged_states(campaign: Callable[..., None], saved: Path) -> None:
    campaign(forged_states, saved)
