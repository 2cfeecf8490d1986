"""What waits for long work is told how far it is; of quick work nothing is said."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import expertmesh
from expertmesh.moe.util.progress import CountedProgress
from tests.checkpoints.commands import run


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is said of work of so many seconds, a tenth of a gigabyte in each."""

    def said(seconds: int, is_terminal: bool = False, is_shown: bool = True) -> str:
        now = [0.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        stream = Stream(is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        with CountedProgress("loading a model", seconds * 10**8, is_shown=is_shown) as told:
            for _ in range(seconds):
                now[0] += 1
                told.add(10**8)
        return stream.getvalue()

    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    return said


def test_lines_in_a_file_stay_few(worked: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert worked(1) == ""
    assert worked(40).splitlines() == [
        "loading a model: 0.2 of 4.0 GB, 2 s, about 38 s left",
        "loading a model: 1.7 of 4.0 GB, 17 s, about 23 s left",
        "loading a model: 3.2 of 4.0 GB, 32 s, about 8 s left",
    ]
    assert worked(40, is_shown=False) == ""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert worked(40) == ""


def test_the_line_of_a_terminal_goes_away(worked: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert worked(1, is_terminal=True) == ""
    before, *lines, after = worked(40, is_terminal=True).split("\r\x1b[K")
    assert (before, len(lines), after) == ("", 39, "")
    assert lines[0] == "loading a model: 0.2 of 4.0 GB, 2 s, about 38 s left"
    monkeypatch.setenv("COLUMNS", "40")
    lines = worked(40, is_terminal=True).split("\r\x1b[K")
    assert lines[1] == "…l: 0.2 of 4.0 GB, 2 s, about 38 s left"
    assert all(len(line) < 40 for line in lines)


@pytest.mark.usefixtures("leaving_group")
def test_all_that_takes_long_tells(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, resuming, exporting, and what commands read and write: to the last byte."""
    told: dict[str, tuple[int, int]] = {}
    monkeypatch.setattr(CountedProgress, "is_due", True)
    monkeypatch.setattr(CountedProgress, "say", lambda self, *_: told.update({self.what: (self.done, self.total)}))
    saved, exported, shards, again = (tmp_path / name for name in ("saved", "exported", "shards", "again"))
    engine = expertmesh.load(str(tiny_model), use_cpu=True)
    engine.save(saved)
    (step,) = saved.iterdir()
    engine.resume(step)
    engine.export(exported)
    run("convert", exported, shards, "--ep-size", "2")
    run("export", shards, again)
    run("verify", exported, again)
    run("inspect", shards, "--check")
    done = [
        *(f"loading {tiny_model}", f"checking {step}", f"reading {step}", f"writing {exported}"),
        *(f"writing {shards}", f"writing {again}", f"comparing {exported} with {again}", f"checking {shards}"),
    ]
    assert set(told) == set(done)
    assert all(how_far == total > 0 for how_far, total in told.values()), told
