"""The marker that makes a training checkpoint complete, and what it says of the files."""

from pathlib import Path

import pytest

from expertmesh.checkpoints.files.checksums import file_checksum
from expertmesh.checkpoints.training_state.marker import check_file
from expertmesh.moe.util.errors import ExpertMeshError


def test_a_file_is_compared_by_size_and_by_every_byte(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    file = tmp_path / "state" / "part"
    file.parent.mkdir()
    file.write_bytes(content)
    entry = {"bytes": len(content), "xxh3_128": file_checksum(file)}
    check_file(tmp_path, "state/part", entry)
    for place in (0, 700_000, len(content) - 1):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ExpertMeshError, match="state/part: is damaged: its checksum is not the one"):
            check_file(tmp_path, "state/part", entry)
    for other in (content[:-1], content + b"x"):
        file.write_bytes(other)
        with pytest.raises(ExpertMeshError, match=f"has {len(other)} bytes; checkpoint.json says {len(content)}"):
            check_file(tmp_path, "state/part", entry)
    file.unlink()
    with pytest.raises(ExpertMeshError, match="no such file"):
        check_file(tmp_path, "state/part", entry)
