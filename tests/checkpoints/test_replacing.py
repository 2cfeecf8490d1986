"""A directory that takes the place of another: killed before any of the operations that do it, neither is lost."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from expertmesh.checkpoints.files.directories import replace_directory, sweep_beside, temporary_beside
from expertmesh.checkpoints.training_state.marker import MARKER, whole_checkpoints
from expertmesh.checkpoints.training_state.saving import checkpoint_name, sweep
from tests.checkpoints.commands import contents, run
from tests.tiers import tiered

OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir", "chmod", "symlink")


class Killed(BaseException):
    pass


@contextmanager
def killed_before(operation: int, at_once: bool = False) -> Iterator[list[str]]:
    """In the block, the file system changes `operation` times and never again, whatever then cleans up: as if the
    process had been killed. Yields the changes that were made.

    Args:
        at_once: whether the process goes no further than to the last of them, and writes no file after it.
    """
    made: list[str] = []

    def guarded(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            if len(made) >= operation:
                raise Killed
            made.append(name)
            result = change(*arguments, **settings)
            if at_once and len(made) == operation:
                raise Killed
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, guarded(name, getattr(os, name)))
        with suppress(Killed):
            yield made


def write(directory: Path, content: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("a", "b", MARKER):
        (directory / name).write_text(content)


def read(directory: Path) -> set[tuple[str, str]]:
    return {(file.name, file.read_text()) for file in directory.iterdir()} if directory.exists() else set()


def complete(content: str) -> set[tuple[str, str]]:
    return {(name, content) for name in ("a", "b", MARKER)}


def test_killed_before_any_operation_of_a_replacement(tmp_path: Path) -> None:
    """And killed again while what is left of it is done."""
    out = tmp_path / "hf"
    operations = 0
    found = []
    for kill in range(100):
        for again in range(8):
            shutil.rmtree(tmp_path)
            write(out, "old")
            new = temporary_beside(out)
            write(new, "new")
            with killed_before(kill) as made:
                replace_directory(new, out)
            everywhere = [read(directory) for directory in tmp_path.iterdir()]
            assert complete("old") in everywhere or complete("new") in everywhere
            with killed_before(again):
                sweep_beside(out)
            everywhere = [read(directory) for directory in tmp_path.iterdir()]
            assert complete("old") in everywhere or complete("new") in everywhere
            sweep_beside(out)
            assert [directory.name for directory in tmp_path.iterdir()] == ["hf"]
            assert read(out) in (complete("old"), complete("new")), (kill, again, made)
        found.append(read(out) == complete("new"))
        if len(made) < kill:
            operations = len(made)
            break
    assert operations >= 4 + 3, "renames of both, and the deletion of what was replaced"
    # once the new one has left its temporary name it is complete, and is what is found
    assert found == sorted(found)
    assert found.index(True) == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", [["export"], ["convert", "--ep-size", "2"]], ids=lambda command: command[0])
def test_killed_before_any_operation_of_a_command_that_overwrites(
    tiny_model: Path, tmp_path: Path, command: list[str]
) -> None:
    """Given again, it ends as if it had not been killed, and there is nothing beside it."""
    name, *more = command
    argv = [name, tiny_model, tmp_path / "out", *more, "--workers", 1]
    run(*argv)
    made, readable = contents(tmp_path / "out"), 0
    for kill in range(100):
        (tmp_path / "out" / "old").write_text("old")
        before = contents(tmp_path / "out")
        with killed_before(kill) as operations:
            run(*argv, "--overwrite")
        found = [contents(directory) for directory in tmp_path.iterdir()]
        assert before in found or made in found, (kill, operations)
        readable += (tmp_path / "out").exists()
        if len(operations) < kill:
            break
        run(*argv, "--overwrite")
        assert contents(tmp_path / "out") == made
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(operations) > 6
    assert readable == kill, "all but once, between two renames, there is one of its name"


@pytest.mark.parametrize(
    "command", tiered([(["export"],)], slow=[(["convert", "--ep-size", "2"],)]), ids=["export", "convert"]
)
def test_killed_after_any_operation_of_a_command_that_begins(
    tiny_model: Path, tmp_path: Path, command: list[str]
) -> None:
    """What it left is no complete directory, and is gone on with, or written anew in other files."""
    name, *more = command
    argv = [name, tiny_model, tmp_path / "out", *more, "--workers", 1]
    run(*argv)
    made = contents(tmp_path / "out")
    run(name, tiny_model, tmp_path / "other", *more, "--max-shard-size", "50KB")
    other = contents(tmp_path / "other")
    for kill in range(1, 100):
        shutil.rmtree(tmp_path / "out")
        with killed_before(kill, at_once=True) as operations:
            run(*argv)
        if len(operations) < kill:
            break
        # its notes may still be there
        is_complete = (tmp_path / "out/manifest.json").exists() or contents(tmp_path / "out") == made
        again = [*argv, "--max-shard-size", "50KB"] if kill % 2 else argv
        said = run(*again, code=2 if is_complete else 0)
        assert ("is complete" in said) is is_complete
        assert contents(tmp_path / "out") == (other if kill % 2 and not is_complete else made), operations
    assert len(operations) > 4, operations


def test_what_is_overwritten_keeps_its_permissions_and_files_of_an_earlier_attempt_go(
    tiny_model: Path, tmp_path: Path
) -> None:
    out, begun = tmp_path / "out", tmp_path / ".out-next.part"
    for directory in (out, begun / "additional_chat_templates"):
        directory.mkdir(parents=True)
        (directory / "old").write_text("old")
    (begun / "model-00001-of-00002.safetensors").write_text("not noted")
    out.chmod(0o700)
    run("export", tiny_model, out, code=2)
    run("export", tiny_model, out, "--overwrite")
    assert out.stat().st_mode & 0o777 == 0o700
    run("export", tiny_model, tmp_path / "anew")
    assert contents(out) == contents(tmp_path / "anew")
    assert not begun.exists()


def test_the_working_directory_is_emptied(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is in a directory would be left in what is deleted."""
    (tmp_path / "old").write_text("old")
    monkeypatch.chdir(tmp_path)
    run("export", tiny_model, ".", "--overwrite")
    assert not Path("old").exists()
    assert Path("config.json").exists()


def test_killed_before_any_operation_of_a_step_saved_again(tmp_path: Path) -> None:
    final = tmp_path / checkpoint_name(5)
    for kill in range(100):
        shutil.rmtree(tmp_path)
        write(tmp_path / checkpoint_name(4), "older")
        write(final, "old")
        new = temporary_beside(final)
        write(new, "new")
        with killed_before(kill) as made:
            replace_directory(new, final)
        assert sweep(tmp_path) == []
        assert whole_checkpoints(tmp_path) == [final, tmp_path / checkpoint_name(4)]
        assert read(final) in (complete("old"), complete("new")), (kill, made)
        assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(4), checkpoint_name(5)]
        if len(made) < kill:
            return
    raise AssertionError("the replacement never ended")


def test_what_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, renamed = os.rename, list[Any]()
    failing = 0

    def fails(source: Any, target: Any) -> None:
        renamed.append(source)
        if len(renamed) == failing:
            raise OSError(28, "No space left on device")
        rename(source, target)

    for failing in (1, 2, 3):
        out = tmp_path / str(failing) / "hf"
        write(out, "old")
        new = temporary_beside(out)
        write(new, "new")
        renamed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fails)
            with pytest.raises(OSError, match="No space"):
                replace_directory(new, out)
        assert read(out) == complete("old")
        assert read(new) == complete("new")


def test_a_link_in_its_place_and_a_neighbour_of_a_longer_name(tmp_path: Path) -> None:
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "hf"
    write(elsewhere, "kept")
    out.symlink_to(elsewhere)
    neighbour = temporary_beside(tmp_path / "hf-2")
    new = temporary_beside(out)
    write(new, "new")
    replace_directory(new, out)
    sweep_beside(out)
    assert not out.is_symlink()
    assert read(out) == complete("new")
    assert read(elsewhere) == complete("kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["elsewhere", "hf", neighbour.name])
