"""metrics.jsonl of a resumed run: what is kept, and that a kill in the midst of it loses nothing; the report that
a run writes of what it remembers."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.monitoring.console import StepTable
from expertmesh.training.monitoring.log import RunLog
from expertmesh.training.report import page
from expertmesh.training.report.page import write_report
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main

STEPS = 6


def line(step: int, **more: Any) -> bytes:
    return json.dumps({"step": step, **more}).encode() + b"\n"


ALL = b"".join(line(step, loss=1.0) for step in range(1, STEPS + 1))
UNUSUAL = '{"step": 4, "text": "two\u2028lines"}\n'.encode()
WARNING = line(4, warning="a loss spike")


def go_on(out: Path, step: int, failing: bool = False) -> str:
    """What a run says that goes on after `step`: it logs an event and the next step, and looks for its file."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.HashStore())
    config = TrainConfig(model="m", dataset=["d"], output_dir=str(out), resume="auto")
    log = RunLog(config, out, STEPS, ranks, None)
    replace = Path.replace

    def or_fail(path: Path, target: Any) -> Path:
        if failing and Path(target).name == "metrics.jsonl":
            raise OSError(5, "Input/output error", str(path))
        return replace(path, target)

    Path.replace = or_fail  # type: ignore[assignment, method-assign]
    try:
        with log:
            log.begin_after(step)
            log.event({"step": step + 1, "warning": "of the second life"}, "")
            log.check_directory()
    except ExpertMeshError as error:
        return str(error)
    finally:
        Path.replace = replace  # type: ignore[method-assign]
    return ""


BEFORE = ALL[: ALL.index(line(5, loss=1.0))]
KEPT = {
    "nothing": (b"", b""),
    "steps that no checkpoint has": (ALL, BEFORE),
    "events": (BEFORE + WARNING + line(5, warning="x"), BEFORE + WARNING),
    "cut off in a line": (line(4) + line(5)[:7], line(4)),
    "cut off before the end of the line": (line(3) + line(4)[:-1], line(3) + line(4)),
    "no records": (line(3) + b"\xff\x00" * 9 + b"\n[4]\n4\n{}\n\n" + line(4), line(3) + line(4)),
    "unusual text": (UNUSUAL, UNUSUAL),
}


@pytest.mark.parametrize(("logged", "kept"), KEPT.values(), ids=KEPT)
def test_what_is_kept(ranks: RankPool, tmp_path: Path, logged: bytes, kept: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(logged)
    (tmp_path / "metrics.jsonl.part").write_bytes(b"of a run that was killed in the midst of this" * 1000)
    (tmp_path / "report.html.4711.part").write_text("<html>")
    assert ranks.run(go_on, 1, tmp_path, 4) == [""]
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept + line(5, warning="of the second life")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.yaml", "environment.json", "metrics.jsonl", "report.html"}


def test_rewriting_fails(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks are told, and what was logged is still there."""
    (tmp_path / "metrics.jsonl").write_bytes(ALL)
    for said in ranks.run(go_on, 2, tmp_path, 4, True):
        assert "metrics.jsonl" in said
        assert "cannot be written: Input/output error" in said
    assert (tmp_path / "metrics.jsonl").read_bytes() == ALL
    assert not (tmp_path / "metrics.jsonl.part").exists()
    assert f'"step":{STEPS},' in (tmp_path / "report.html").read_text(encoding="utf-8"), "of what was logged before"


def run_and_compare(argv: list[str]) -> tuple[int, str, list[bytes], int]:
    """train_ep.py, its exit code and errors; each report that it wrote, compared with one of the file; and how often it
    read metrics.jsonl for them."""
    written: list[bytes] = []

    def both(output_dir: Path, *of_the_run: Any) -> Path:
        report = write_report(output_dir, *of_the_run)
        written.append(_content_of(report))
        with mock.patch.object(page, "read_history", read.side_effect):
            assert _content_of(write_report(output_dir, of_the_run[0])) == written[-1]
        return report

    with (
        mock.patch.object(page, "read_history", side_effect=page.read_history) as read,
        mock.patch("expertmesh.training.monitoring.log.write_report", both),
    ):
        code, errors = run_main(argv)
    return code, errors, written, read.call_count


def _content_of(report: Path) -> bytes:
    return re.sub(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d\+00:00)?", b"", report.read_bytes())


@pytest.mark.release
def test_report_of_what_the_run_remembers(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """The page is that of the file at every evaluation, of a resumed run too, and no evaluation reads the file."""
    argv = [
        "--model", str(tiny_model), "--dataset", str(tiny_data), "--output-dir", str(tmp_path), "--use-cpu",
        "--per-device-train-batch-size", "2", "--eval-ratio", "0.1", "--eval-steps", "2", "--save-steps", "3",
        "--generate-steps", "3", "--generate-max-new-tokens", "2", "--no-export", "--max-steps",
    ]  # fmt: skip
    for more, reports in ((["5"], 7), (["9", "--resume", str(tmp_path / "checkpoints" / "step-00000003")], 8)):
        ((code, errors, written, reads),) = ranks.run(run_and_compare, 1, [*argv, *more], join_group=False)
        assert (code, errors) == (0, "")
        assert len(set(written)) == len(written) == reports
        assert reads == 0


def logged(step: int, **changes: Any) -> dict[str, Any]:
    """What a run logs of 10 steps of 2 s each, 500 tokens a step; it has begun 60 s of evaluation and these ago."""
    return {
        "step": step, "epoch": step / 40, "learning_rate": 1e-3, "steps": 10, "seconds": 60.0 + 2.0 * step, "loss": 1.5,
        "grad_norm": 0.25, "tokens": 5000, "tokens_per_second": 250.0, "step_seconds": 2.0, "peak_memory_mb": 704.0,
        "expert_load_max_over_mean": 1.25, **changes,
    }  # fmt: skip


def lines_of(out: Path, start: int, metrics: dict[str, Any], num_steps: int = 100) -> str:
    """What a run prints at a logged step, having begun after another one."""
    ranks = Ranks(0, 1, torch.device("cpu"), dist.HashStore())
    log = RunLog(TrainConfig(model="m", dataset=["d"], output_dir=str(out)), out, num_steps, ranks, None)
    said: list[str] = []
    with (
        mock.patch("expertmesh.training.monitoring.log.tqdm.write", said.append),
        mock.patch.multiple(log, _record=mock.DEFAULT, _write_report=mock.DEFAULT),
    ):
        for _ in log.steps(start):
            log.step(metrics)
            break
    header, line = said
    assert len(header) == len(line) or "skipped" in line
    return line


def test_a_line_says_when_where_and_how_long(tmp_path: Path) -> None:
    line = lines_of(tmp_path, 0, logged(30))
    clock, rest = line[:8], line[8:]
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock)
    # 120 s for 30 steps, evaluation counted, so 280 s for 70
    assert rest == "  30/100   0.75  1.5000    0.25 1.00e-3      2   250  0.66     4:40"


def test_time_left_of_a_resumed_run_is_by_its_own_steps(tmp_path: Path) -> None:
    """Its clock has begun with it."""
    assert lines_of(tmp_path, 20, logged(30, seconds=20.0)).endswith(" 2:20")
    assert lines_of(tmp_path, 0, logged(10, seconds=40.0), num_steps=4000).endswith(" 4:26:00")
    assert lines_of(tmp_path, 0, logged(100)).endswith(" 0:00")


def test_a_line_of_skipped_steps(tmp_path: Path) -> None:
    skipped = logged(30, skipped_steps=10, loss=None, grad_norm=None)
    del skipped["expert_load_max_over_mean"]
    assert "  0.75       -       - 1.00e-3 " in (line := lines_of(tmp_path, 0, skipped))
    assert line.endswith("  10 skipped")


def test_columns_stay_where_they_are() -> None:
    """At 80 columns, of a long run too; the header comes again."""
    table = StepTable(99_999)
    figures = [
        {"grad_norm": 1234.5, "loss": 12.25, "tokens_per_second": 1_234_567.0},
        {"grad_norm": 0.00123, "loss": 0.00001, "peak_memory_mb": 80_123.4},
    ]
    lines = [text for step in range(30) for text in table.lines(logged(step, **figures[step % 2]), 80_000.0)]
    assert {len(text) for text in lines} == {79}
    assert [number for number, text in enumerate(lines) if text.startswith("    time")] == [0, 21]
    assert " 1.23e3 " in lines[1]
    assert " 1.23M " in lines[1]
    assert " 1.23e-3 " in lines[2] or " 0.00123 " in lines[2]


def test_verbose_adds_the_load_of_experts() -> None:
    (_, line), (_, more) = (StepTable(10, verbose).lines(logged(1), 1.0) for verbose in (False, True))
    assert more == f"{line}  expert load 1.25x mean"
