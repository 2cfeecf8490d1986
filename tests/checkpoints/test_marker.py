"""The marker that makes a training checkpoint complete, and what it says of the files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from expertmesh.checkpoints.files.checksums import file_checksum
from expertmesh.checkpoints.training_state.marker import check_file, whole_checkpoints
from expertmesh.checkpoints.training_state.saving import Progress, Saver
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


def test_what_a_new_checkpoint_takes_the_place_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two stay, and the best; what was saved for being the best goes with that; so does what came later."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    saver: Any = Saver.__new__(Saver)
    saver.directory, saver.limit, saver.origin = tmp_path, 2, SimpleNamespace(exported=[])
    saver.transposed, saver.base, saver.carried, saver.facts = [], None, {}, {}

    def complete(step: int, best: int) -> list[int]:
        partial = tmp_path / f"partial-{step}"
        partial.mkdir()
        saver._complete(partial, Progress(step, 0, {}, {}, {"save_steps": 2}, {"step": best}), {})
        return [int(path.name.removeprefix("step-")) for path in whole_checkpoints(tmp_path)]

    assert complete(2, best=2) == [2]
    assert complete(4, best=2) == [4, 2]
    assert complete(6, best=2) == [6, 4, 2], "the best"
    assert complete(7, best=7) == [7, 6]
    assert complete(8, best=7) == [8, 7]
    assert complete(9, best=9) == [9, 8], "7 was for the best alone"
    assert complete(10, best=9) == [10, 9]
    assert complete(4, best=4) == [4], "of a run that went back"
    assert (tmp_path / "best").resolve().name == "step-00000004"
