"""The memory bound of loading and exporting, on a checkpoint of at least 1 GB and 4 ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ep_size", [4, 2])
def test_no_rank_holds_much_more_than_its_shard(tmp_path: Path, ep_size: int) -> None:
    command = [sys.executable, "-m", "benchmarks.load_memory", "--ranks", "4", "--ep-size", str(ep_size)]
    command += ["--gigabytes", "1.0", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures) == 4
    assert sum(f["shard_mb"] for f in figures) >= 1000
    for f in figures:
        assert max(f["load_peak_mb"], f["export_peak_mb"]) <= 1.3 * f["shard_mb"] + 200
