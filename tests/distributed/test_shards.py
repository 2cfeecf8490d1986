"""EP shards loaded onto ranks: at any ep size, and never damaged ones."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from expertmesh.checkpoints.__main__ import main
from expertmesh.checkpoints.ep_shards.manifest import read_manifest
from expertmesh.checkpoints.hf.headers import read_header
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import load_error, round_trip
from tests.distributed.whole_runs import assert_same_bits, read
from tests.tiers import tiered
from tests.tiny import save_model

SEAMS: dict[str, Any] = dict(intermediate_size=25, num_local_experts=4, vocab_size=321)
"""25 rows an expert, several experts a file: their checksums run over the seams between experts."""


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def shards(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "ep8"
    assert run("convert", tiny_model, out, "--ep-size", 8) == 0
    return out


@pytest.mark.parametrize(
    ("changes", "ep_size", "topology"),
    tiered(
        [({}, 8, Topology(4, 2, "hybrid")), (SEAMS, 2, Topology(2, 2))],
        slow=[({}, 8, Topology(1, 1)), ({}, 8, Topology(4, 2, pp_size=2)), (SEAMS, 2, Topology(4, 2))],
        release=[({}, 8, Topology(4, 4)), ({}, 8, Topology(8, 8))],
    ),
    ids=str,
)
def test_any_ep_size_reads_them(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Any], ep_size: int, topology: Topology
) -> None:
    source, shards, out = tmp_path / "source", tmp_path / "shards", tmp_path / "hf"
    save_model(source, **changes)
    assert run("convert", source, shards, "--ep-size", ep_size) == 0
    ranks.run(round_trip, topology.world_size, shards, out, topology)
    assert_same_bits(read(out), read(source))
    assert run("verify", out, shards) == run("verify", source, shards) == 0


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize("topology", tiered([Topology(1, 1)], slow=[Topology(4, 2)]), ids=str)
def test_those_with_matrices_the_other_way_round_are_read(
    ranks: RankPool, shards: Path, tiny_model: Path, tmp_path: Path, topology: Topology
) -> None:
    """As written with a transformers for which nothing beside experts is held transposed: their o_proj lies as in
    Hugging Face form, and here it is (in, out); a byte changed in it is found at load."""
    otherwise = tmp_path / "ep4"
    with mock.patch("expertmesh.moe.hf_model.build.hold_transposed"):
        assert run("convert", tiny_model, otherwise, "--ep-size", 4) == 0
    assert not any(entry["transposed"] for entry in read_manifest(otherwise)["tensors"])
    ranks.run(round_trip, topology.world_size, otherwise, tmp_path / "hf", topology)
    assert_same_bits(read(tmp_path / "hf"), read(tiny_model))
    assert run("verify", otherwise, shards) == 0
    assert run("convert", otherwise, tmp_path / "anew", "--ep-size", 8) == 0
    names = {entry["name"]: entry["transposed"] for entry in read_manifest(tmp_path / "anew")["tensors"]}
    assert names[O_PROJ]
    file = otherwise / "dense-00001-of-00001.safetensors"
    assert (load_file(tmp_path / "anew" / file.name)[O_PROJ] == load_file(file)[O_PROJ].t()).all()
    content = bytearray(file.read_bytes())
    content[read_header(file)[O_PROJ].offset + 5] ^= 4
    file.write_bytes(content)
    (told,) = set(ranks.run(load_error, topology.world_size, otherwise, topology))
    assert f"{file}: is damaged: the content of {O_PROJ}" in told


def _change_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(bytes(content))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "byte in the middle": _change_middle,
    "missing": Path.unlink,
}


@pytest.mark.parametrize(
    ("topology", "damage"),
    # what is seen when a file is opened, and what when its bytes are read, each by the ranks that do
    tiered(
        [(Topology(1, 1), "truncated"), (Topology(2, 2), "missing")],
        slow=[(Topology(4, 2), "byte in the middle")],
        release=[(Topology(2, 1, pp_size=2), "byte in the middle")],
    ),
    ids=str,
)
def test_damage_is_found_at_load_by_file(
    ranks: RankPool, shards: Path, tmp_path: Path, topology: Topology, damage: str
) -> None:
    """Each file of the directory in turn."""
    names = sorted(file.name for file in shards.iterdir())
    assert {"manifest.json", "config.json", "dense-00001-of-00001.safetensors"} <= set(names)
    for name in names if damage != "missing" else ["ep-00003-of-00008.safetensors", "manifest.json"]:
        spoilt = tmp_path / name
        shutil.copytree(shards, spoilt)
        DAMAGES[damage](spoilt / name)
        (message,) = set(ranks.run(load_error, topology.world_size, spoilt, topology))
        assert name in message if damage == "missing" else f"{spoilt / name}:" in message, (name, damage)
