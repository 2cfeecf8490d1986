"""The benchmark of the loss runs, and shows what it is for: less memory for the same loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.release
def test_less_memory_for_the_same_loss(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.cross_entropy", "--tokens", "2048", "--width", "64", "--device", "cpu"]
    command += ["--share", "0.4", "--dtype", "bfloat16", "--repetitions", "1", "--rounds", "1"]
    command += ["--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2048 tokens, 40% of them trained" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["full"]["peak_mb_ratio_to_full"] == 1
    # all logits take 262 MB in fp32, and their loss holds two such tensors at once; those of a chunk take 67 MB
    assert figures["full"]["peak_mb"] > 500
    assert figures["chunked"]["peak_mb"] < 0.5 * figures["full"]["peak_mb"]
    assert figures["chunked"]["loss"] == pytest.approx(figures["full"]["loss"], rel=1e-4)
