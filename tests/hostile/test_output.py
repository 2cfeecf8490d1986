"""Output directories that cannot be written, hold something else, or go away half-way."""

import contextlib
import errno
import io
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import PreTrainedTokenizerFast

from expertmesh import train_ep
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training import lock
from expertmesh.training.lock import DirectoryLock
from expertmesh.training.monitoring.log import RunLog
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.hostile.models import SMALL
from tests.hostile.test_model_directory import small
from tests.tiny import save_model, save_tokenizer
from tests.training.test_init_adapter import MODULES
from tests.training.test_init_adapter import write as write_adapter

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
        "trackers/expertmesh/events.out.tfevents",
    ],
)
@pytest.mark.parametrize("resume", [None, "elsewhere"])
def test_nothing_is_overwritten_unasked(
    ranks: RankPool, tmp_path: Path, arguments: list[str], held: str, resume: str | None
) -> None:
    """Neither by a new run, nor by one that resumes from a checkpoint of another directory."""
    (tmp_path / "out" / held).parent.mkdir(parents=True)
    (tmp_path / "out" / held).write_text("precious")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "checkpoint.json").write_text("{}")  # which is read after this
    flags = [] if resume is None else ["--resume", str(tmp_path / resume)]
    ((code, errors),) = ranks.run(run_main, 1, [*arguments, str(tmp_path / "out"), *flags], join_group=False)
    assert code == 2
    assert "already contains" in errors
    assert "--overwrite-output-dir" in errors
    assert tree(tmp_path) == {f"out/{held}": b"precious", "elsewhere/checkpoint.json": b"{}"}


def test_exported_model_is_not_replaced_by_a_restart(ranks: RankPool, tmp_path: Path, arguments: list[str]) -> None:
    """--resume auto, where nothing is left to resume from."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("precious")
    ((code, errors),) = ranks.run(run_main, 1, [*arguments, str(tmp_path), "--resume", "auto"], join_group=False)
    assert code == 2
    assert "already contains hf" in errors
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


@pytest.mark.sample(6)
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


def _without_room_for_the_tokenizer(argv: list[str]) -> tuple[int, str]:
    """train_ep.py, on a disk that fills when a tokenizer's file is written: the package that does it raises a plain
    Exception."""
    save = PreTrainedTokenizerFast.save_pretrained

    def to_a_full_device(tokenizer: PreTrainedTokenizerFast, directory: Path) -> Any:
        (Path(directory) / "tokenizer.json").unlink(missing_ok=True)
        (Path(directory) / "tokenizer.json").symlink_to("/dev/full")
        return save(tokenizer, directory)

    with mock.patch.object(PreTrainedTokenizerFast, "save_pretrained", to_a_full_device):
        return run_main(argv)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("flags", "said", "left"),
    [
        (("--no-export", "--save-steps", "1"), "checkpoint of step 1: OSError: No space left", "checkpoints"),
        (("--save-steps", "1", "--on-save-error", "continue", "--no-export"), None, "checkpoints"),
        (("--save-steps", "0"), "hf: cannot be written: No space left", None),
        (("--save-steps", "0", "--adapter", "lora"), "adapter: cannot be written: No space left", None),
    ],
    ids=["save", "save and continue", "export", "adapter"],
)
def test_disk_is_full_at_the_tokenizer(
    ranks: RankPool, tmp_path: Path, arguments: list[str], flags: tuple[str, ...], said: str | None, left: str | None
) -> None:
    out = tmp_path / "out"
    argv = [*arguments, str(out), "--tokenizer", arguments[arguments.index("--model") + 1], *flags]
    (code, errors), *others = ranks.run(_without_room_for_the_tokenizer, 2, argv, join_group=False)
    assert others == [(code, "")]
    assert code == (0 if said is None else 2), errors
    assert errors == "" if said is None else said in errors and errors.count("\n") == 1
    written = {"metrics.jsonl", "config.yaml", "environment.json", "report.html", left or "finished.json.announced"}
    assert {path.name for path in out.iterdir()} == written
    assert left is None or list((out / left).iterdir()) == []


def _without_room_for_the_merged_tokenizer(argv: list[str]) -> tuple[int, str]:
    save = PreTrainedTokenizerFast.save_pretrained

    def fails_in_hf(tokenizer: PreTrainedTokenizerFast, directory: Path) -> Any:
        if Path(directory).name.startswith(".hf-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(tokenizer, directory)

    with mock.patch.object(PreTrainedTokenizerFast, "save_pretrained", fails_in_hf):
        return run_main(argv)


def test_a_merged_model_is_not_whole_without_its_tokenizer(
    ranks: RankPool, tmp_path: Path, arguments: list[str]
) -> None:
    """It does not have its name; and the command that merges goes on with it, as with any that is incomplete."""
    out, model = tmp_path / "out", arguments[arguments.index("--model") + 1]
    argv = [*arguments, str(out), "--tokenizer", model, "--adapter", "lora", "--merge", "--save-steps", "0"]
    ((code, errors),) = ranks.run(_without_room_for_the_merged_tokenizer, 1, argv, join_group=False)
    assert code == 2
    assert "hf: cannot be written: No space left" in errors
    assert not (out / "hf").exists()
    assert checkpoints("merge", model, out / "adapter", out / "hf") == (0, "")
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"adapter", "hf"}


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
    assert (code, "contains other files" in errors) == (2, True)
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


def test_export_goes_on_under_another_plan(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the one before had finished are gone: transformers would read them in the place of the index."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("expertmesh.checkpoints.convert.copy_side_files", fails)
        assert checkpoints("export", small, tmp_path / "begun")[0] == 2
    assert (tmp_path / "begun" / "model.safetensors").exists()
    for out in ("whole", "begun"):
        assert checkpoints("export", small, tmp_path / out, "--max-shard-size", "1KB") == (0, "")
    assert tree(tmp_path / "begun") == tree(tmp_path / "whole")


@pytest.mark.parametrize("command", [("convert", "--ep-size", "2"), ("export",)], ids=["convert", "export"])
def test_conversion_whose_directory_goes_away(
    small: Path, tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("copy_side_files", "write_files"):
        out = tmp_path / name

        def gone(*_: object, out: Path = out, **__: object) -> None:
            shutil.rmtree(out)
            (out / "x").write_text("")

        with monkeypatch.context() as patch:
            patch.setattr(f"expertmesh.checkpoints.convert.{name}", gone)
            code, errors = checkpoints(*command, small, out)
        assert (code, f"{out}" in errors) == (2, True), errors
        assert "cannot be written" in errors
        assert not out.exists()


@pytest.mark.slow
def test_overwriting_clears_what_a_run_writes_and_nothing_else(
    ranks: RankPool, tmp_path: Path, arguments: list[str], tiny_data: Path
) -> None:
    """All of it, though the next run writes less; what was put beside it stays."""
    out = tmp_path / "out"
    everything = [
        *arguments, str(out), "--save-steps", "2", "--eval-ratio", "0.1", "--profile", "1", "--report-to",
        "tensorboard", "--adapter", "lora", "--lora-rank", "2", "--merge", "--load-best-model-at-end",
    ]  # fmt: skip
    assert ranks.run(run_main, 1, everything, join_group=False) == [(0, "")]
    written = {path.name for path in out.iterdir()}
    assert {"hf", "adapter", "checkpoints", "profile", "trackers", "report.html"} <= written
    for name in (".hf-1.part", ".profile-1.part", "checkpoints/.step-00000001-1.part", "stuck"):
        (out / name).mkdir()
    for name in ("metrics.jsonl.part", "report.html.7.part", "checkpoints/best.part"):
        (out / name).write_text("half of it")
    kept = {"notes.txt", "hf.tar", "hf-2/config.json", "checkpoints/last.ckpt", "film.mkv.part", "runs/events.out"}
    for name in kept:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("precious")
    less = [*arguments, str(out), "--save-steps", "0", "--no-export", "--overwrite-output-dir"]
    assert ranks.run(run_main, 1, less, join_group=False) == [(0, "")]
    assert set(tree(out)) == {"config.yaml", "environment.json", "finished.json", "metrics.jsonl", "report.html", *kept}
    # there is nothing of the first run left to resume from
    assert ranks.run(run_main, 1, [*arguments, str(out), "--resume", "auto"], join_group=False) == [(0, "")]
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_what_a_link_leads_to_is_not_cleared(ranks: RankPool, tmp_path: Path, arguments: list[str]) -> None:
    """hf/ kept on another disk, and profile/ on one that is no longer there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "config.json").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "hf").symlink_to(tmp_path / "disk")
    for name in ("profile", "report.html"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "no disk" / name)
    argv = [*arguments, str(tmp_path / "out"), "--overwrite-output-dir", "--no-export", "--save-steps", "0"]
    assert ranks.run(run_main, 1, argv, join_group=False) == [(0, "")]
    assert tree(tmp_path / "disk") == {"config.json": b"precious"}
    assert set(tree(tmp_path / "out")) == {
        "config.yaml",
        "environment.json",
        "finished.json",
        "metrics.jsonl",
        "report.html",
    }
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("flag", ["--model", "--tokenizer", "--dataset", "--eval-dataset", "--chat-template"])
def test_what_is_to_be_read_is_not_cleared(
    ranks: RankPool, tmp_path: Path, arguments: list[str], tiny_data: Path, flag: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(arguments[arguments.index("--model") + 1], out / "hf")
    shutil.copy(tiny_data, out / "hf" / "data.jsonl")
    (out / "hf" / "chat.jinja").write_text("{{ messages }}")
    read = {"--model": "hf", "--tokenizer": "hf", "--chat-template": "hf/chat.jinja"}.get(flag, "hf/data.jsonl")
    before = tree(tmp_path)
    argv = [*arguments, str(out), "--overwrite-output-dir", flag, str(out / read)]
    ((code, errors),) = ranks.run(run_main, 1, argv, join_group=False)
    assert code == 2
    assert f"{flag} {out / read}: this run is to read it" in errors
    assert tree(tmp_path) == before


@pytest.mark.parametrize("flag", ["--model", "--tokenizer", "--dataset", "--eval-dataset", "--init-adapter"])
def test_nothing_is_written_among_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, arguments: list[str]
) -> None:
    """However the directory is written, and before anything is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "read").mkdir()
    (tmp_path / "link").symlink_to("read")
    if flag == "--init-adapter":
        write_adapter(tmp_path / "read", MODULES)
    before = tree(tmp_path)
    argv = [*arguments[:-1], "--adapter", "lora", flag, "link/" + ":1" * (flag == "--dataset")]
    for out, how in {"read": "is", "./read/": "is", "link": "is", f"{tmp_path}/read/a/b": "lies in"}.items():
        with pytest.raises(ExpertMeshError, match=f"^--output-dir {out}: {how} {flag} link/, which this run reads"):
            train_ep.read_flags([*argv, "--output-dir", out])
    assert tree(tmp_path) == before


def test_results_outlive_a_run_that_cannot_begin(ranks: RankPool, tmp_path: Path, arguments: list[str]) -> None:
    """They are cleared once the new run has read all it needs."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("precious")
    argv = [*arguments, str(tmp_path), "--overwrite-output-dir", "--dataset", "/no/such.jsonl"]
    ((code, _),) = ranks.run(run_main, 1, argv, join_group=False)
    assert code == 2
    assert tree(tmp_path) == {"hf/config.json": b"precious"}


def _beside_another(argv: list[str], out: Path) -> tuple[int, str]:
    """train_ep.py, while another process is at work in its output directory."""
    with mock.patch.object(lock, "_WAIT_SECONDS", 0.2):
        other = DirectoryLock(out)
        other.acquire()
        try:
            return run_main(argv)
        finally:
            other.release()


@pytest.mark.parametrize("flags", [[], ["--overwrite-output-dir"], ["--resume", "auto"]], ids=["fresh", "over", "auto"])
def test_two_runs_in_one_directory(ranks: RankPool, tmp_path: Path, arguments: list[str], flags: list[str]) -> None:
    argv = [*arguments, str(tmp_path), *flags]
    ((code, errors),) = ranks.run(_beside_another, 1, argv, tmp_path, join_group=False)
    assert code == 2
    assert f"--output-dir {tmp_path}: another run writes there: process" in errors
    assert tree(tmp_path) == {}
