"""A short form of the chaos benchmark: a run whose ranks are killed ends with the weights of one that is left alone."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_ranks_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--kills", "2", "--steps", "12"]
    command += ["--timeout", "400", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["kills"] == 2
    assert figures["largest_weight_difference"] == 0.0
    assert figures["metrics_complete"]
    assert figures["left_behind"] == []
