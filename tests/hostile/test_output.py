"""Output directories that cannot be written, hold something else, or go away half-way."""

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from checkpoints.__main__ import main as checkpoints_main
from tests.distributed.pool import RankPool
from tests.distributed.test_train_ep import run_main
from tests.hostile.models import SMALL
from tests.hostile.test_model_directory import small
from tests.tiny import save_model, save_tokenizer
from training.log import RunLog

__all__ = ["small"]


@pytest.fixture(scope="module")
def arguments(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("trained")
    save_model(path, **{**SMALL, "vocab_size": 320})
    save_tokenizer(path)
    return ["--model", str(path), "--dataset", str(tiny_data), "--use-cpu", "--max-steps", "3", "--output-dir"]


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/self", "/dev/null", "x" * 300])
def test_cannot_be_written(ranks: RankPool, tmp_path: Path, arguments: list[str], where: str) -> None:
    (tmp_path / "file").write_text("precious")
    ((code, errors),) = ranks.run(run_main, 1, [*arguments, str(tmp_path / where)], join_group=False)
    assert code == 2
    assert str(tmp_path / where) in errors
    assert "Traceback" not in errors
    assert tree(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize(
    "held",
    [
        "config.yaml",
        "metrics.jsonl",
        "hf/config.json",
        "checkpoints/last.ckpt",
        "checkpoints/step-00000005/x",
        "profile/rank-0.step-5.json",
    ],
)
@pytest.mark.parametrize("resume", [None, "elsewhere"])
def test_nothing_is_overwritten_unasked(
    ranks: RankPool, tmp_path: Path, arguments: list[str], held: str, resume: str | None
) -> None:
    """Neither by a new run, nor by one that goes on from a checkpoint of another directory."""
    (tmp_path / "out" / held).parent.mkdir(parents=True)
    (tmp_path / "out" / held).write_text("precious")
    (tmp_path / "elsewhere").mkdir()
    flags = [] if resume is None else ["--resume", str(tmp_path / resume)]
    ((code, errors),) = ranks.run(run_main, 1, [*arguments, str(tmp_path / "out"), *flags], join_group=False)
    assert code == 2
    assert "already holds" in errors
    assert "--overwrite-output-dir" in errors
    assert tree(tmp_path) == {f"out/{held}": b"precious"}


def test_exported_model_is_not_replaced_by_a_restart(ranks: RankPool, tmp_path: Path, arguments: list[str]) -> None:
    """--resume auto, where nothing is left to go on from."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("precious")
    ((code, errors),) = ranks.run(run_main, 1, [*arguments, str(tmp_path), "--resume", "auto"], join_group=False)
    assert code == 2
    assert "already holds hf" in errors
    assert tree(tmp_path) == {"hf/config.json": b"precious"}


def _disappearing(argv: list[str], how: str, before_check: int) -> tuple[int, str]:
    """train_ep.py, whose output directory goes away before it is looked at for the n-th time."""
    out = Path(argv[argv.index("--output-dir") + 1])
    check = RunLog.check_directory
    checks = itertools.count(1)

    def and_go_away(log: RunLog) -> None:
        if next(checks) == before_check:
            out.rename(out.with_name("moved"))
            if how == "deleted":
                shutil.rmtree(out.with_name("moved"), ignore_errors=True)
            elif how == "replaced":
                out.mkdir()
                (out / "metrics.jsonl").write_text("precious")
        check(log)

    RunLog.check_directory = and_go_away  # type: ignore[assignment, method-assign]
    try:
        return run_main(argv)
    finally:
        RunLog.check_directory = check  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
@pytest.mark.parametrize("before_check", [2, 4], ids=["before step 2 is logged", "before the export"])
@pytest.mark.parametrize("save_steps", ["0", "1"])
def test_goes_away(
    ranks: RankPool, tmp_path: Path, arguments: list[str], how: str, before_check: int, save_steps: str
) -> None:
    out = tmp_path / "out"
    argv = [*arguments, str(out), "--save-steps", save_steps, "--async-save", "false"]
    ((code, errors),) = ranks.run(_disappearing, 1, argv, how, before_check, join_group=False)
    assert code == 2
    assert f"--output-dir {out}: was deleted, moved or replaced" in errors
    assert tree(out) == ({"metrics.jsonl": b"precious"} if how == "replaced" else {})
    assert out.exists() == (how == "replaced"), "was made anew"


class _Full:
    """metrics.jsonl on a device that is full."""

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    close = flush = lambda self: self.write("")


def _on_a_full_disk(argv: list[str]) -> tuple[int, str]:
    enter = RunLog.__enter__

    def and_fill(log: RunLog) -> RunLog:
        entered = enter(log)
        log.file = _Full()  # type: ignore[assignment]
        return entered

    RunLog.__enter__ = and_fill  # type: ignore[method-assign]
    try:
        return run_main(argv)
    finally:
        RunLog.__enter__ = enter  # type: ignore[method-assign]


def test_disk_is_full(ranks: RankPool, tmp_path: Path, arguments: list[str]) -> None:
    ((code, errors),) = ranks.run(_on_a_full_disk, 1, [*arguments, str(tmp_path / "out")], join_group=False)
    assert code == 2
    assert "metrics.jsonl: cannot be written: No space left on device" in errors


def checkpoints(*arguments: object) -> tuple[int, str]:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = checkpoints_main([str(argument) for argument in arguments])
    return code, errors.getvalue()


@pytest.mark.parametrize("command", [("convert", "--ep-size", "2"), ("export",)], ids=["convert", "export"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
def test_converting_into_the_wrong_place(
    small: Path, tmp_path: Path, command: tuple[str, ...], overwrite: bool
) -> None:
    """A file, a path below one, the source itself, and a directory that holds it."""
    source = tmp_path / "models" / "source"
    shutil.copytree(small, source)
    (tmp_path / "file").write_text("precious")
    before = tree(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(source)
    for out in (
        tmp_path / "file",
        tmp_path / "file" / "below",
        source,
        link,
        source / "..",
        tmp_path,
        Path("/proc/self"),
    ):
        flags = ["--overwrite"] if overwrite and out != Path("/proc/self") else []
        code, errors = checkpoints(*command, source, out, *flags)
        assert (code, str(out) in errors) == (2, True), (out, errors)
        assert tree(tmp_path) == before


def test_directory_with_other_files_is_kept(small: Path, tmp_path: Path) -> None:
    """A download that has begun is no conversion that has."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "film.mkv.part").write_text("precious")
    code, errors = checkpoints("export", small, tmp_path / "out")
    assert (code, "holds other files" in errors) == (2, True)
    assert tree(tmp_path) == {"out/film.mkv.part": b"precious"}


@pytest.mark.parametrize("note", ["", "{", "[]", "{}", '{"fingerprint": 1, "record": {}}', '{"record": null}'])
def test_conversion_goes_on_from_a_damaged_note(small: Path, tmp_path: Path, note: str) -> None:
    assert checkpoints("convert", small, tmp_path / "whole", "--ep-size", 2)[0] == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "begun")
    (tmp_path / "begun" / "manifest.json").unlink()
    (tmp_path / "begun" / "ep-00000-of-00002.safetensors").write_bytes(b"half of it")
    (tmp_path / "begun" / "ep-00000-of-00002.safetensors.done").write_text(note)
    code, errors = checkpoints("convert", small, tmp_path / "begun", "--ep-size", 2)
    assert code == 0, errors
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("whole", "begun")]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("end", [".part", ".done", ".done.part"])
def test_conversion_goes_on_after_a_kill(small: Path, tmp_path: Path, end: str) -> None:
    """What it died in writing, under another plan even, is neither kept nor listed."""
    assert checkpoints("convert", small, tmp_path / "whole", "--ep-size", 2)[0] == 0
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / f"ep-00000-of-00004.safetensors{end}").write_bytes(b"half of it")
    assert checkpoints("convert", small, tmp_path / "begun", "--ep-size", 2) == (0, "")
    assert tree(tmp_path / "begun") == tree(tmp_path / "whole")


@pytest.mark.parametrize("command", [("convert", "--ep-size", "2"), ("export",)], ids=["convert", "export"])
def test_conversion_whose_directory_goes_away(
    small: Path, tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("copy_side_files", "write_files"):
        out = tmp_path / name

        def gone(*_: object, out: Path = out) -> None:
            shutil.rmtree(out)
            (out / "x").write_text("")

        with monkeypatch.context() as patch:
            patch.setattr(f"checkpoints.convert.{name}", gone)
            code, errors = checkpoints(*command, small, out)
        assert (code, f"{out}" in errors) == (2, True), errors
        assert "cannot be written" in errors
        assert not out.exists()
