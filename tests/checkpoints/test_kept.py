"""Files that are kept for a later run: what is damaged, cut or exchanged is told, and nothing else."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expertmesh.checkpoints.files.kept import damage, record_kept, recorded_key
from expertmesh.training.reference_logprobs import _checksum, _read


def test_what_is_kept_is_as_it_was(tmp_path: Path) -> None:
    first, second, record = (tmp_path / name for name in ("first.npy", "second.npy", "facts.json"))
    contents = {first: b"abc" * 1000, second: b"abd" * 1000}

    def restore() -> None:
        for file, content in contents.items():
            file.write_bytes(content)

    restore()
    assert recorded_key(record) == ""
    record_kept(record, "key", [*contents])
    assert (recorded_key(record), damage(record, [*contents])) == ("key", "")
    flipped = bytes([contents[first][0] ^ 1]) + contents[first][1:]
    for content in (flipped, contents[first][:-1], contents[second]):
        first.write_bytes(content)
        assert damage(record, [*contents]) == f"{first}: is damaged: its checksum is not the one in facts.json"
    first.unlink()
    assert "first.npy: cannot be read: No such file" in damage(record, [*contents])
    restore()
    table = json.loads(record.read_text())
    for damaged in (json.dumps({**table, "key": "other"}), record.read_text()[:-5], "[]", ""):
        record.write_text(damaged)
        assert recorded_key(record) == ""
        assert damage(record, [*contents])


@pytest.mark.parametrize("change", ["a bit", "shorter", "of another run", "not there", "cut", "as it was"])
def test_a_reference_is_read_as_it_was_written(change: str, tmp_path: Path) -> None:
    path, found = tmp_path / "reference.safetensors", {"training": torch.randn(4, 2, dtype=torch.float64)}
    said = {"fingerprint": "key", "checksum": _checksum(found)}
    save_file({"training": found["training"][:3].clone()} if change == "shorter" else found, path, said)
    content = path.read_bytes()
    changed = {"a bit": content[:-1] + bytes([content[-1] ^ 1]), "cut": content[:100]}
    path.write_bytes(changed.get(change, content))
    if change == "not there":
        path.unlink()
    read, why_not = _read(path, "other" if change == "of another run" else "key")
    assert (read is None) == (change != "as it was")
    said = {"of another run": "is of another model", "not there": "is not there", "cut": "cannot be", "as it was": ""}
    assert why_not.startswith(said.get(change, "is damaged"))
