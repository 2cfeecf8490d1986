"""Output directories that cannot be written, hold something else, or go away half-way."""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from expertmesh import train_ep
from expertmesh.checkpoints.files import lock
from expertmesh.checkpoints.files.lock import DirectoryLock
from expertmesh.checkpoints.hf.side_files import SideFiles
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.monitoring.log import RunLog
from tests.checkpoints.commands import contents as tree
from tests.checkpoints.commands import run
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main
from tests.flags import last_of_each
from tests.hostile.models import SMALL
from tests.tiny import save_model, save_tokenizer
from tests.training.test_init_adapter import MODULES
from tests.training.test_init_adapter import write as write_adapter

ALWAYS = {"config.yaml", "environment.json", "metrics.jsonl", "report.html"}
OVER = "--overwrite-output-dir"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    save_model(path, **{**SMALL, "vocab_size": 320})
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def arguments(model: Path, tiny_data: Path) -> list[str]:
    return ["--model", str(model), "--dataset", str(tiny_data), "--use-cpu", "--max-steps", "3", "--output-dir"]


@pytest.fixture
def small(origin: Callable[[str], Path]) -> Path:
    return origin("model")


HELD = ["config.yaml", "metrics.jsonl", "hf/config.json", "checkpoints/last.ckpt", "checkpoints/step-00000005/x",
        "profile/rank-0.step-5.json", "trackers/expertmesh/events.out.tfevents"]  # fmt: skip
ELSEWHERE = ["--resume", "{root}/elsewhere"]
IN_THE_WAY: list[tuple[str, str, list[str], str]] = [
    # a file that is there, the output directory, flags, and what is said
    *(("file", where, [], "{out}") for where in ("file", "file/below", "/proc/self", "/dev/null", "x" * 300)),
    # neither by a new run, nor by one that resumes from a checkpoint of another directory
    *((f"out/{held}", "out", ELSEWHERE * (number % 2), OVER) for number, held in enumerate(HELD)),
    # nothing is left to resume from
    ("out/hf/config.json", "out", ["--resume", "auto"], "already contains hf"),
    # results are cleared once the new run has read all it needs
    ("out/hf/config.json", "out", [OVER, "--dataset", "/no/such.jsonl"], "/no/such.jsonl"),
    # what is to be read is not cleared
    *(("out/hf/chat.jinja", "out", [OVER, flag, f"{{out}}/{name}"], f"{flag} {{out}}/{name}: this run reads it")
      for flag, name in {"--model": "hf", "--tokenizer": "hf", "--dataset": "hf/data.jsonl",
                         "--eval-dataset": "hf/data.jsonl", "--chat-template": "hf/chat.jinja"}.items()),
]  # fmt: skip


@pytest.mark.parametrize(("held", "where", "flags", "said"), IN_THE_WAY)
def test_nothing_is_lost(
    ranks: RankPool,
    tmp_path: Path,
    arguments: list[str],
    model: Path,
    held: str,
    where: str,
    flags: list[str],
    said: str,
) -> None:
    if held == "out/hf/chat.jinja":
        shutil.copytree(model, tmp_path / "out" / "hf")
        shutil.copy(arguments[3], tmp_path / "out" / "hf" / "data.jsonl")
    for name in (held, "elsewhere/checkpoint.json"):  # which is read after this
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    before, out = tree(tmp_path), str(tmp_path / where)
    argv = [*arguments, out, *(flag.format(root=tmp_path, out=out) for flag in flags)]
    ((code, errors),) = ranks.run(run_main, 1, argv, join_group=False)
    assert code == 2
    assert said.format(root=tmp_path, out=out) in errors
    assert said != OVER or "already contains" in errors
    assert "Traceback" not in errors
    assert tree(tmp_path) == before


# ---- what happens while it is written ----


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _full_log(out: Path) -> Iterator[None]:
    """metrics.jsonl on a device that is full."""
    enter = RunLog.__enter__

    def and_fill(log: RunLog) -> RunLog:
        entered = enter(log)
        log.file = mock.Mock(write=_full, close=_full, flush=_full)
        return entered

    with mock.patch.object(RunLog, "__enter__", and_fill):
        yield


@contextmanager
def _full_tokenizer(out: Path) -> Iterator[None]:
    """A disk that fills when a tokenizer's file is written."""
    write = SideFiles.write

    def to_a_full_device(beside: SideFiles, directory: Path) -> None:
        (directory / "tokenizer.json").symlink_to("/dev/full")
        write(beside, directory)

    with mock.patch.object(SideFiles, "write", to_a_full_device):
        yield


@contextmanager
def _full_hf(out: Path) -> Iterator[None]:
    """The same, of a merged model's alone."""
    write = SideFiles.write

    def fails_in_hf(beside: SideFiles, directory: Path) -> None:
        (_full if directory.name.startswith(".hf-") else write)(beside, directory)

    with mock.patch.object(SideFiles, "write", fails_in_hf):
        yield


@contextmanager
def _gone(out: Path, how: str, before_check: int) -> Iterator[None]:
    """The directory goes away before it is looked at for the n-th time."""
    check, checks = RunLog.check_directory, itertools.count(1)

    def and_go_away(log: RunLog) -> None:
        if next(checks) == before_check:
            out.rename(out.with_name("moved"))
            if how == "deleted":
                shutil.rmtree(out.with_name("moved"), ignore_errors=True)
            elif how == "replaced":
                out.mkdir()
                (out / "metrics.jsonl").write_text("precious")
        check(log)

    with mock.patch.object(RunLog, "check_directory", and_go_away):
        yield


@contextmanager
def _beside_another(out: Path) -> Iterator[None]:
    """Another process is at work there."""
    with mock.patch.object(lock, "_WAIT_SECONDS", 0.2):
        other = DirectoryLock(out)
        other.acquire()
        try:
            yield
        finally:
            other.release()


def run_while(argv: list[str], fault: Callable[..., Any], *args: Any) -> tuple[int, str]:
    """train_ep.py, while something happens to its output directory."""
    with fault(Path(argv[argv.index("--output-dir") + 1]), *args):
        return run_main(argv)


NO_ROOM = "cannot be written: No space left on device"
NO_SAVE = ("--no-export", "--save-steps", "1")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("fault", "flags", "said", "left"),
    [
        (_full_log, (), f"metrics.jsonl: {NO_ROOM}", None),
        (_full_tokenizer, NO_SAVE, "checkpoint of step 1: OSError: [Errno 28] No space left", "checkpoints"),
        (_full_tokenizer, (*NO_SAVE, "--on-save-error", "continue"), None, "checkpoints"),
        (_full_tokenizer, ("--save-steps", "0"), f"hf: {NO_ROOM}", "finished.json.announced"),
        (_full_tokenizer, ("--save-steps", "0", "--adapter", "lora"), f"adapter: {NO_ROOM}", "finished.json.announced"),
    ],
    ids=["log", "save", "save and continue", "export", "adapter"],
)
def test_disk_is_full(
    ranks: RankPool, tmp_path: Path, arguments: list[str], model: Path,
    fault: Any, flags: tuple[str, ...], said: str | None, left: str | None,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    argv = [*arguments, str(out), "--tokenizer", str(model), *flags]
    world_size = 1 if left is None else 2
    (code, errors), *others = ranks.run(run_while, world_size, argv, fault, join_group=False)
    assert others == [(code, "")] * (world_size - 1)
    assert code == (0 if said is None else 2), errors
    assert errors == "" if said is None else said in errors and errors.count("\n") == 1
    assert left is None or {path.name for path in out.iterdir()} == {*ALWAYS, left}
    assert left != "checkpoints" or list((out / left).iterdir()) == []


def test_a_merged_model_is_not_whole_without_its_tokenizer(
    ranks: RankPool, tmp_path: Path, arguments: list[str], model: Path
) -> None:
    """It does not have its name; and the command that merges goes on with it, as with any that is incomplete."""
    out = tmp_path / "out"
    argv = [*arguments, str(out), "--tokenizer", str(model), "--adapter", "lora", "--merge", "--save-steps", "0"]
    ((code, errors),) = ranks.run(run_while, 1, argv, _full_hf, join_group=False)
    assert code == 2
    assert f"hf: {NO_ROOM}" in errors
    assert not (out / "hf").exists()
    run("merge", model, out / "adapter", out / "hf")
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"adapter", "hf"}


@pytest.mark.parametrize(
    ("how", "before_check", "save_steps"),
    [
        ("deleted", 2, "0"),  # before step 2 is logged
        pytest.param("moved", 4, "1", marks=pytest.mark.slow),  # before the export
        pytest.param("replaced", 2, "1", marks=pytest.mark.slow),
        pytest.param("replaced", 4, "0", marks=pytest.mark.slow),
    ],
)
def test_goes_away(
    ranks: RankPool, tmp_path: Path, arguments: list[str], how: str, before_check: int, save_steps: str
) -> None:
    out = tmp_path / "out"
    argv = [*arguments, str(out), "--save-steps", save_steps, "--async-save", "false"]
    ((code, errors),) = ranks.run(run_while, 1, argv, _gone, how, before_check, join_group=False)
    assert code == 2
    assert f"--output-dir {out} was deleted, moved or replaced" in errors
    assert tree(out) == ({"metrics.jsonl": b"precious"} if how == "replaced" else {})
    assert out.exists() == (how == "replaced"), "was made anew"


@pytest.mark.parametrize("flags", [[], [OVER], ["--resume", "auto"]], ids=["fresh", "over", "auto"])
def test_two_runs_in_one_directory(ranks: RankPool, tmp_path: Path, arguments: list[str], flags: list[str]) -> None:
    argv = [*arguments, str(tmp_path), *flags]
    ((code, errors),) = ranks.run(run_while, 1, argv, _beside_another, join_group=False)
    assert code == 2
    assert f"--output-dir {tmp_path}: another run writes to it: process" in errors
    assert tree(tmp_path) == {}


# ---- overwriting ----


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
    less = [*arguments, str(out), "--save-steps", "0", "--no-export", OVER]
    assert ranks.run(run_main, 1, less, join_group=False) == [(0, "")]
    assert set(tree(out)) == {*ALWAYS, "finished.json", *kept}
    # there is nothing of the first run left to resume from
    assert ranks.run(run_main, 1, [*arguments, str(out), "--resume", "auto"], join_group=False) == [(0, "")]
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "loss" in line] == [1, 2, 3]


def test_what_a_link_leads_to_is_not_cleared(ranks: RankPool, tmp_path: Path, arguments: list[str]) -> None:
    """hf/ kept on another disk, and profile/ on one that is no longer there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "config.json").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "hf").symlink_to(tmp_path / "disk")
    for name in ("profile", "report.html"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "no disk" / name)
    argv = [*arguments, str(tmp_path / "out"), OVER, "--no-export", "--save-steps", "0"]
    assert ranks.run(run_main, 1, argv, join_group=False) == [(0, "")]
    assert tree(tmp_path / "disk") == {"config.json": b"precious"}
    assert set(tree(tmp_path / "out")) == {*ALWAYS, "finished.json"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


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
            train_ep.read_flags(last_of_each([*argv, "--output-dir", out]))
    assert tree(tmp_path) == before


# ---- commands for checkpoints ----


@pytest.mark.parametrize("command", ["convert", "export"])
def test_converting_into_the_wrong_place(small: Path, tmp_path: Path, command: str) -> None:
    """A file, a path below one, the source itself, and a directory that holds it, whether or not it may overwrite."""
    source, file, link = tmp_path / "models" / "source", tmp_path / "file", tmp_path / "link"
    shutil.copytree(small, source)
    file.write_text("precious")
    before = tree(tmp_path)
    link.symlink_to(source)
    size = ["--ep-size", 2] if command == "convert" else []
    for out in (file, file / "below", source, link, source / "..", tmp_path, Path("/proc/self")):
        for flags in ([], ["--overwrite"])[: 1 if out == Path("/proc/self") else 2]:
            assert str(out) in run(command, source, out, *size, *flags, code=2)
            assert tree(tmp_path) == before


def test_directory_with_other_files_is_kept(small: Path, tmp_path: Path) -> None:
    """A download that has begun is no conversion that has."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "film.mkv.part").write_text("precious")
    assert "contains other files" in run("export", small, tmp_path / "out", code=2)
    assert tree(tmp_path) == {"out/film.mkv.part": b"precious"}


def test_conversion_goes_on_after_a_kill(small: Path, tmp_path: Path) -> None:
    """From damaged notes of what was done; what it died in writing, under another plan even, is not kept or listed."""
    run("convert", small, tmp_path / "whole", "--ep-size", 2)
    begun, file, other = tmp_path / "begun", "ep-00000-of-00002.safetensors", "ep-00000-of-00004.safetensors"
    notes = ["", "{", "[]", "{}", '{"fingerprint": 1, "record": {}}', '{"record": null}']
    left = [{file: "half of it", f"{file}.done": note} for note in notes]
    for files in [*left, *({f"{other}{end}": "half of it"} for end in (".part", ".done", ".done.part"))]:
        shutil.rmtree(begun, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", begun)
        (begun / "manifest.json").unlink()
        for name, content in files.items():
            (begun / name).write_text(content)
        run("convert", small, begun, "--ep-size", 2)
        assert tree(begun) == tree(tmp_path / "whole"), files


def test_export_goes_on_under_another_plan(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the one before had finished are gone: transformers would read them in the place of the index."""
    with monkeypatch.context() as patch:
        patch.setattr(SideFiles, "write", _full)
        run("export", small, tmp_path / "begun", code=2)
    assert (tmp_path / "begun" / "model.safetensors").exists()
    for out in ("whole", "begun"):
        run("export", small, tmp_path / out, "--max-shard-size", "1KB")
    assert tree(tmp_path / "begun") == tree(tmp_path / "whole")


@pytest.mark.parametrize("part", ["hf.side_files.SideFiles.write", "convert.write_files"])
def test_conversion_whose_directory_goes_away(
    small: Path, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        shutil.rmtree(out)
        (out / "x").write_text("")

    out = tmp_path / "out"
    monkeypatch.setattr(f"expertmesh.checkpoints.{part}", gone)
    for command in (("convert", small, out, "--ep-size", 2), ("export", small, out)):
        errors = run(*command, code=2)
        assert f"{out}" in errors
        assert "cannot be written" in errors
        assert not out.exists()
