"""A power cut before any operation leaves the old or the new, complete; and what was told to be there, there."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import expertmesh
from expertmesh.checkpoints.files.directories import replace_directory, sweep_beside, temporary_beside
from expertmesh.checkpoints.training_state.marker import check_file, read_marker, whole_checkpoints
from expertmesh.checkpoints.training_state.saving import sweep
from expertmesh.moe.util.atomic_write import whole
from expertmesh.training.run.finished import Finished, read_finished
from tests.checkpoints.commands import contents, run
from tests.distributed.pool import RankPool
from tests.power_cut import recorded, states
from tests.tiers import tiered


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file(tmp_path: Path, before: str | None) -> None:
    file = tmp_path / "disk" / "file"
    file.parent.mkdir()
    if before is not None:
        file.write_text(before)
    with recorded(file.parent) as disk, whole(file, durable=True) as partial:
        partial.write_text("new")
    for moment, found in states(disk, tmp_path / "found"):
        text = (found / "file").read_text() if (found / "file").exists() else None
        assert text == "new" or (text == before and moment != "the end"), moment


def write(directory: Path, content: str) -> None:
    for name in ("a", "b", "deep/er/c"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def names_of(content: str) -> dict[str, bytes]:
    return dict.fromkeys(("a", "b", "deep/er/c"), content.encode())


def replace(directory: Path) -> None:
    """By a new one that is made now."""
    new = temporary_beside(directory / "hf")
    write(new, "new")
    replace_directory(new, directory / "hf")


def check_replaced(found: Path, moment: str, old: dict[str, bytes] | None, new: dict[str, bytes]) -> None:
    sweep_beside(found / "hf")
    here = contents(found / "hf") if (found / "hf").exists() else None
    assert here == new or (here == old and moment != "the end"), (moment, here)


@pytest.mark.parametrize("stands", [False, True])
def test_a_directory(tmp_path: Path, stands: bool) -> None:
    (tmp_path / "disk").mkdir()
    if stands:
        write(tmp_path / "disk" / "hf", "old")
    with recorded(tmp_path / "disk") as disk:
        replace(tmp_path / "disk")
    for moment, found in states(disk, tmp_path / "found"):
        check_replaced(found, moment, names_of("old") if stands else None, names_of("new"))


def test_a_replacement_that_another_process_has_begun(tmp_path: Path) -> None:
    """Killed after its renames, of which nothing is on disk yet."""
    directory = tmp_path / "disk"
    write(directory / "hf", "old")

    module = "expertmesh.checkpoints.files.directories"
    with recorded(directory) as disk:
        with (
            pytest.raises(KeyboardInterrupt),
            mock.patch(f"{module}.sync"),
            mock.patch(f"{module}.delete", side_effect=[None, KeyboardInterrupt]),
        ):
            replace(directory)
        sweep_beside(directory / "hf")
    for moment, found in states(disk, tmp_path / "found"):
        check_replaced(found, moment, names_of("old"), names_of("new"))


COMMANDS = {"export": [], "convert": ["--ep-size", 2]}
CONVERSIONS = [("convert", False), ("convert", True)]


@pytest.mark.parametrize(("command", "stands"), tiered([("export", False)], slow=[("export", True), *CONVERSIONS]))
def test_a_command(tiny_model: Path, tmp_path: Path, command: str, stands: bool) -> None:
    """Given again after the cut, it makes what it would have made: files that it takes for finished are."""
    out = tmp_path / "disk" / "hf"
    argv = [command, tiny_model, *COMMANDS[command], "--workers", 1]
    run(*argv, tmp_path / "made")
    new = contents(tmp_path / "made")
    out.parent.mkdir()
    if stands:
        write(out, "old")
    with recorded(out.parent) as disk:
        run(*argv, out, *["--overwrite"] * stands)
    for moment, found in states(disk, tmp_path / "found"):
        if moment == "the end":
            assert new.items() <= contents(found / "hf").items(), "beside it, notes whose deletion was lost"
        elif not (found / "hf").exists() or contents(found / "hf") != new:
            if stands:
                sweep_beside(found / "hf")
                assert contents(found / "hf") in (names_of("old"), new), moment
            run(*argv, found / "hf", "--overwrite")
            assert contents(found / "hf") == new, moment
        shutil.rmtree(found)


def _cut_saves(model: Path, directory: Path) -> None:
    """Of training checkpoints only the latest is kept, and the best; the run goes back from step 3 to 2."""
    engine = expertmesh.load(str(model), use_cpu=True, save_total_limit=1)
    (directory / "disk").mkdir(parents=True)
    done = []
    with recorded(directory / "disk") as disk:
        for step, best in ((1, 1), (2, 1), (3, 3), (2, 2)):
            engine.step_number = step
            engine.save(directory / "disk", best={"step": best})
            done.append(step)
            disk.tell(f"saved {len(done)}")
    saved = 0
    for moment, found in states(disk, directory / "found"):
        saved = int(moment.split()[1]) if moment.startswith("saved") else saved
        sweep(found)
        there = whole_checkpoints(found)
        assert there or saved == 0, moment
        for path in there:
            for name, entry in read_marker(path)["files"].items():
                check_file(path, name, entry)
        if moment == f"saved {saved}":
            assert there[0].name == f"step-{done[saved - 1]:08d}"
        if (found / "best").is_symlink():
            assert (found / "best").exists(), (moment, there)


@pytest.mark.slow
def test_training_checkpoints(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    """Whatever has a checkpoint's name is complete, down to the tokenizer; the last one that was told is there."""
    ranks.run(_cut_saves, 1, tiny_model, tmp_path)


def _files_of_a_rank(model: Path, directory: Path) -> None:
    engine = expertmesh.load(str(model), use_cpu=True)
    directory.mkdir()
    with (
        mock.patch("expertmesh.checkpoints.files.directories.sync_tree"),  # rank 0's, which may be on another node
        recorded(directory) as disk,
    ):
        written = list((engine.save(directory) / "state").iterdir())
    assert {file.suffix for file in written} == {".distcp", ""}
    for file in written:
        assert disk.bytes[file.stat().st_ino] == file.read_bytes(), file.name


def test_each_rank_syncs_what_it_writes(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    ranks.run(_files_of_a_rank, 1, tiny_model, tmp_path / "disk")


def _cut_export(model: Path, directory: Path, settings: dict[str, Any]) -> None:
    engine = expertmesh.load(str(model), use_cpu=True, **settings)
    out = directory / "disk" / "hf"
    out.mkdir(parents=True)
    write(out, "old")
    with recorded(directory / "disk") as disk:
        engine.export(out, overwrite=True)
    new = contents(out)
    assert {"tokenizer.json", "tokenizer_config.json"} < set(new)
    for moment, found in states(disk, directory / "found"):
        check_replaced(found, moment, names_of("old"), new)
        shutil.rmtree(found)


@pytest.mark.parametrize("settings", [{}, {"adapter": "lora"}], ids=["all", "adapter"])
def test_exports_of_a_run(ranks: RankPool, tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    ranks.run(_cut_export, 1, tiny_model, tmp_path, settings)


def test_the_record_of_a_finished_run(tmp_path: Path) -> None:
    settings = {"export": True, "adapter": "none"}
    finished = Finished(3, 3, "all", settings, {}, {})
    directory = tmp_path / "disk"
    directory.mkdir()
    with recorded(directory) as disk:
        finished.announce(directory)
        write(temporary := temporary_beside(directory / "hf"), "new")
        replace_directory(temporary, directory / "hf")
        disk.tell("exported")
        finished.write(directory)
    for moment, found in states(disk, tmp_path / "found"):
        done = read_finished(found)
        assert done == finished if moment in ("exported", "the end") else done in (None, finished), moment
        assert done is None or contents(found / "hf") == names_of("new"), moment
        assert moment != "the end" or (found / "finished.json").exists()
