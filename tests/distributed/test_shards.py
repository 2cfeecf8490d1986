"""EP shards loaded onto ranks: at any ep size, and never damaged ones."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.ep_shards.manifest import read_manifest
from expertmesh.checkpoints.hf.source import read_header
from expertmesh.sharding.topology import Topology
from tests.checkpoints.test_cli import run
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import load_error, read, round_trip
from tests.tiny import save_model, save_tokenizer


@pytest.fixture(scope="module")
def shards(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "ep8"
    assert run("convert", tiny_model, out, "--ep-size", 8) == 0
    save_tokenizer(out / "unused")
    shutil.rmtree(out / "unused")
    return out


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "topology", [Topology(1, 1), Topology(2, 2), Topology(4, 2, "hybrid"), Topology(4, 4), Topology(8, 8)], ids=str
)
def test_any_ep_size_reads_them(
    ranks: RankPool, shards: Path, tiny_model: Path, tmp_path: Path, topology: Topology
) -> None:
    ranks.run(round_trip, topology.world_size, shards, tmp_path / "hf", topology)
    before, after = read(tiny_model), read(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert all((after[name] == before[name]).all() for name in before)
    assert main(["verify", str(tmp_path / "hf"), str(shards)]) == 0


@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(2, 2), Topology(4, 2)], ids=str)
def test_expert_width_that_no_granule_of_checksums_divides(ranks: RankPool, tmp_path: Path, topology: Topology) -> None:
    """25 rows an expert, several experts a file: their checksums run over the seams between experts."""
    source, shards = tmp_path / "source", tmp_path / "shards"
    save_model(source, intermediate_size=25, num_local_experts=4, vocab_size=321)
    assert run("convert", source, shards, "--ep-size", 2) == 0
    ranks.run(round_trip, topology.world_size, shards, tmp_path / "hf", topology)
    before, after = read(source), read(tmp_path / "hf")
    assert all((after[name] == before[name]).all() for name in before)
    assert run("verify", source, shards) == 0


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def otherwise(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As written with a transformers for which nothing beside experts is held transposed."""
    out = tmp_path_factory.mktemp("otherwise") / "ep4"
    with mock.patch("expertmesh.moe.hf_model.build.hold_transposed"):
        assert run("convert", tiny_model, out, "--ep-size", 4) == 0
    assert not any(entry["transposed"] for entry in read_manifest(out)["tensors"])
    return out


@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(4, 2)], ids=str)
def test_those_with_matrices_the_other_way_round_are_read(
    ranks: RankPool, otherwise: Path, shards: Path, tiny_model: Path, tmp_path: Path, topology: Topology
) -> None:
    """Their o_proj lies as in Hugging Face form, and here it is (in, out); a byte changed in it is found at load."""
    ranks.run(round_trip, topology.world_size, otherwise, tmp_path / "hf", topology)
    before, after = read(tiny_model), read(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert all((after[name] == before[name]).all() for name in before)
    assert run("verify", otherwise, shards) == 0
    assert run("convert", otherwise, tmp_path / "anew", "--ep-size", 8) == 0
    names = {entry["name"]: entry["transposed"] for entry in read_manifest(tmp_path / "anew")["tensors"]}
    assert names[O_PROJ]
    new, old = (load_file(path / "dense-00001-of-00001.safetensors")[O_PROJ] for path in (tmp_path / "anew", otherwise))
    assert (new == old.t()).all()

    spoilt = tmp_path / "spoilt"
    shutil.copytree(otherwise, spoilt)
    file = spoilt / "dense-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[read_header(file)[O_PROJ].offset + 5] ^= 4
    file.write_bytes(content)
    (told,) = set(ranks.run(load_error, topology.world_size, spoilt, topology))
    assert f"{file}: is damaged: the content of {O_PROJ}" in told


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _change_at(share: float) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[min(int(share * len(content)), len(content) - 1)] ^= 4
        file.write_bytes(bytes(content))

    return change


DAMAGES = {
    "truncated": _truncate,
    "emptied": _empty,
    "first byte": _change_at(0),
    "byte in the head": _change_at(0.01),
    "byte in the middle": _change_at(0.5),
    "last byte": _change_at(1),
}


def spoilt_by(damage: str, names: list[str]) -> list[str]:
    """The files that a kind of damage is tried on: all, or every third, other ones for each kind."""
    return names if damage == "byte in the middle" else names[list(DAMAGES).index(damage) % 3 :: 3]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("topology", "damage"),
    [
        *((Topology(1, 1), damage) for damage in DAMAGES),
        # what is seen when a file is opened, and what when its bytes are read, each by the ranks that do
        *((Topology(4, 2), damage) for damage in ("truncated", "byte in the middle")),
    ],
    ids=str,
)
def test_damage_is_found_at_load_by_file(
    ranks: RankPool, shards: Path, tmp_path: Path, topology: Topology, damage: str
) -> None:
    """Each file of the directory in turn: all of them by one kind of damage, a part of them by each other kind."""
    names = sorted(file.name for file in shards.iterdir())
    assert {"manifest.json", "config.json", "dense-00001-of-00001.safetensors"} <= set(names)
    for name in spoilt_by(damage, names):
        spoilt = tmp_path / name
        shutil.copytree(shards, spoilt)
        DAMAGES[damage](spoilt / name)
        messages = set(ranks.run(load_error, topology.world_size, spoilt, topology))
        assert len(messages) == 1
        assert f"{spoilt / name}:" in messages.pop(), (name, damage)


def test_a_missing_file_is_named(ranks: RankPool, shards: Path, tmp_path: Path) -> None:
    for name in ("ep-00003-of-00008.safetensors", "manifest.json"):
        spoilt = tmp_path / name
        shutil.copytree(shards, spoilt)
        (spoilt / name).unlink()
        (message,) = set(ranks.run(load_error, 2, spoilt, Topology(2, 2)))
        assert name in message
