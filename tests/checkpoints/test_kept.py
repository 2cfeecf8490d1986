"""Files that are kept for a later run: what is damaged, cut or exchanged is told, and nothing else."""

import json
from pathlib import Path

from expertmesh.checkpoints.files.kept import damage, record_kept, recorded_key


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
