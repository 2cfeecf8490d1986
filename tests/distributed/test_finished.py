"""Runs that have ended, started again by the command that started them: nothing is trained or written twice."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from expertmesh.checkpoints.files.checksums import seal
from expertmesh.training.monitoring import log
from expertmesh.training.run.finished import Finished
from tests.distributed.whole_runs import SIX_STEPS, Ended, Runs, Told, assert_same_bits, batch_of_12, tell
from tests.tiers import tiered

ONE_STEP = "--resume auto --max-steps 1 --save-steps 0"


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was written, and what is in it."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def changes_nothing(out: Path, start: Callable[[], Ended]) -> str:
    """What the run says."""
    before = tree(out)
    ended = start()
    assert tree(out) == before
    return ended.printed + ended.errors


def test_what_is_not_exported_is_saved(runs: Runs) -> None:
    """The last step, also where --save-steps does not divide it."""
    flags = f"{SIX_STEPS} {batch_of_12(1)} --no-export"
    assert runs(1, flags).saved == [4, 6]
    ended = runs(1, f"{flags} --overwrite-output-dir --save-steps 0 --max-steps 1")
    assert "the trained weights are not saved" in ended.printed


@pytest.mark.parametrize(
    "more", tiered(["", "--save-steps 0"], slow=["--adapter lora", "--no-export", "--no-export --save-steps 0"])
)
def test_a_finished_run_started_again_does_nothing(runs: Runs, more: str) -> None:
    """By the very same command, on other ranks, also where it was shorter than --save-steps."""
    flags = f"--resume auto --max-steps 2 --global-batch-size 4 {more}"
    ended = runs(2, flags)
    out, saves = ended.out, "--save-steps 0" not in more
    assert not saves or ended.saved == [2]
    for steps, beyond in ((2, ""), (1, ", beyond the 1")):
        said = changes_nothing(out, lambda: runs(1, f"{flags} --max-steps {steps}"))  # noqa: B023
        assert f"already finished at step 2{beyond}" in said
    assert "that run had seed 42, this one has 7" in changes_nothing(out, lambda: runs.refuses(1, f"{flags} --seed 7"))
    if more == "--save-steps 0":
        said = changes_nothing(out, lambda: runs.refuses(1, f"{flags} --max-steps 3"))
        assert "finished at step 2 and left no training checkpoint" in said
    else:
        assert runs(1, f"{flags} --max-steps 3").values("step") == [1, 2, 3]
        assert "already finished at step 3" in runs(1, f"{flags} --max-steps 3").printed


def without_a_record(argv: list[str]) -> Told:
    """A run that cannot write finished.json."""
    with mock.patch.object(Finished, "write", side_effect=OSError(28, "No space left on device")):
        return tell(argv)


@pytest.mark.parametrize(
    ("flags", "exported", "other", "said"),
    tiered(
        [("", "hf", "--max-shard-size 1MB", "finished at step 1 and left no training checkpoint")],
        slow=[("--adapter lora", "adapter", "--merge", "merge {model} {out}/adapter {out}/hf`")],
    ),
)
def test_killed_between_export_and_record_a_run_without_checkpoints_has_finished(
    runs: Runs, flags: str, exported: str, other: str, said: str
) -> None:
    flags = f"{ONE_STEP} {flags}"
    ended = runs(1, flags, call=without_a_record)
    assert "finished.json was not written: [Errno 28] No space left on device" in ended.printed
    out, before = ended.out, tree(ended.out)
    (out / exported).rename(out / f".{exported}-new.part")  # or a moment earlier
    assert "already finished at step 1; nothing is trained or written" in runs(1, flags).printed
    assert tree(out) == before
    told = changes_nothing(out, lambda: runs.refuses(1, f"{flags} {other}"))
    assert said.format(model=runs.model, out=out) in told
    shutil.rmtree(out / exported)
    assert "already finished" not in runs(1, flags).printed, "what it has announced and is not there is made anew"
    assert (out / "finished.json").exists()
    assert not list(out.glob("finished.json?*"))


def without_a_report(argv: list[str]) -> Told:
    """A run that ends before it can write report.html."""
    with mock.patch.object(log, "write_report", side_effect=OSError("killed")):
        return tell(argv)


@pytest.mark.parametrize("stale", [False, True], ids=["missing", "of a run under way"])
def test_killed_before_its_report_a_finished_run_gets_it_when_started_again(runs: Runs, stale: bool) -> None:
    out = runs(1, ONE_STEP, call=without_a_report).out
    report = out / "report.html"
    assert not report.exists()
    if stale:
        report.write_text("running")
        os.utime(report, ns=(0, (out / "finished.json").stat().st_mtime_ns - 1))
    said = runs(1, ONE_STEP).printed
    assert "already finished at step 1" in said
    assert "report.html is written now" in said
    assert '"state":"finished"' in report.read_text()
    assert "report.html" not in changes_nothing(out, lambda: runs(1, ONE_STEP))


def test_a_record_of_another_release(runs: Runs) -> None:
    """Without a setting of exports, or a field, which counts as no record: nothing that it exported is lost."""
    out = runs(1, ONE_STEP).out
    record = json.loads((out / "finished.json").read_text())
    del record["settings"]["max_shard_size"], record["checksum"]
    for content, told in (
        (json.dumps(seal(record)), "finished at step 1 and left no training checkpoint to resume from"),
        (json.dumps(record), "already contains hf"),
        (json.dumps(seal({**record, "order": None})), "already contains hf"),
        ("{", "already contains hf"),
    ):
        (out / "finished.json").write_text(content)
        assert told in changes_nothing(out, lambda: runs.refuses(1, ONE_STEP))


def test_an_export_that_is_gone_is_made_again(runs: Runs) -> None:
    flags = f"{batch_of_12(1)} --max-steps 2 --save-steps 2 --resume auto"
    ended = runs(1, flags)
    expected = ended.weights
    shutil.rmtree(ended.out / "hf")
    said = runs(1, flags).printed
    assert "already finished" not in said
    assert "all 2 steps of --max-steps are already done" in said
    assert_same_bits(ended.weights, expected)
