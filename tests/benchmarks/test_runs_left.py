"""What a run leaves, as the benchmarks that break runs look at it."""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import runs


def test_what_counts_as_complete(tmp_path: Path) -> None:
    figures = {"epoch": 0.5, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 8, "target_tokens": 4}
    steps = [json.dumps({"step": step, **figures, "expert_tokens": [[8]], "seconds": step}) for step in range(1, 5)]
    later = [line.replace('"seconds": ', '"seconds": 9') for line in steps]
    other = steps[2].replace('"loss": 1.0', '"loss": 1.5')
    warning = json.dumps({"step": 2, "warning": "router collapse"})
    expected = tmp_path / "expected"
    expected.write_text("\n".join([*steps, warning]))
    for lines, is_complete in (
        (later, True),
        ([*later[:2], warning, *later[2:], warning], True),
        (steps[:3], False),
        ([steps[0], *steps[2:]], False),
        ([*steps[:2], *steps[1:]], False),
        ([*steps[:2], other, steps[3]], False),
        ([steps[1], steps[0], *steps[2:]], False),
    ):
        (tmp_path / "found").write_text("\n".join(lines))
        assert runs.is_complete(tmp_path / "found", expected) == is_complete, lines


def test_what_is_left_behind(tmp_path: Path) -> None:
    for name in ("checkpoints/step-00000005", "checkpoints/.step-00000006-x.part", "hf", ".hf-x.part"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("checkpoints/best.part", "metrics.jsonl", "metrics.jsonl.part"):
        (tmp_path / name).touch()
    found = runs.left_behind(tmp_path)
    assert sorted(found) == [".hf-x.part", ".step-00000006-x.part", "best.part", "metrics.jsonl.part"]


def test_a_run_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], text=True)
    ended.wait()
    runs.wait_for_progress(tmp_path, steps=1, process=ended, deadline=time.monotonic() - 1)
