"""Files are written atomically, whatever the process dies in."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expertmesh.moe.util.atomic_write import place_link, whole


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("before", [{}, {"file": "old"}])
def test_all_at_the_end_or_nothing(tmp_path: Path, durable: bool, before: dict[str, str]) -> None:
    path = tmp_path / "file"
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(KeyboardInterrupt), whole(path, durable) as partial:  # noqa: PT012
        partial.write_text("half")
        raise KeyboardInterrupt
    assert content(tmp_path) == before
    with whole(path, durable) as partial:
        partial.write_text("new")
        assert (path.read_text() if path.exists() else None) == before.get("file")
    assert content(tmp_path) == {"file": "new"}


def test_a_kill_leaves_what_was_there(tmp_path: Path) -> None:
    """And what it leaves half-written, longer than what is written next, is replaced."""
    path = tmp_path / "file"
    path.write_text("old")
    code = "import os, pathlib, sys\nfrom expertmesh.moe.util.atomic_write import whole\n"
    code += "with whole(pathlib.Path(sys.argv[1])) as partial:\n"
    code += " partial.write_text('half' * 1000)\n os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert content(tmp_path) == {"file": "old", "file.part": "half" * 1000}
    with whole(path) as partial:
        partial.write_text("new")
    assert content(tmp_path) == {"file": "new"}


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Each has its own; the last to end counts."""
    with whole(tmp_path / "file", writer="1") as first:
        first.write_text("first")
        with whole(tmp_path / "file", writer="2") as second:
            second.write_text("second")
        assert (tmp_path / "file").read_text() == "second"
    assert content(tmp_path) == {"file": "first"}


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_permissions_stay(tmp_path: Path, mode: int) -> None:
    path, fresh = tmp_path / "file", tmp_path / "fresh"
    fresh.write_text("as open() makes it")
    for _ in range(2):
        with whole(path) as partial:
            partial.write_text("")
        assert path.stat().st_mode == fresh.stat().st_mode
        path.chmod(mode)
        fresh.chmod(mode)


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    for text in ("first", "second"):
        with whole(link) as partial:
            partial.write_text(text)
        assert link.is_symlink()
        assert content(tmp_path / "there") == {"file": text}


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """A pipe, and so /dev/stdout or /dev/null, is not replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole(pipe) as partial:
            partial.write_text("text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError), whole(tmp_path) as partial:
        partial.write_text("text")


def test_link_is_placed_at_one_stroke(tmp_path: Path) -> None:
    """Over one that leads elsewhere, and over what a killed process left."""
    link = tmp_path / "best"
    for target in ("one", "two"):
        (tmp_path / target).mkdir()
        (tmp_path / "best.part").symlink_to("nowhere")
        place_link(link, Path(target))
        assert os.readlink(link) == target
        assert not (tmp_path / "best.part").is_symlink()
