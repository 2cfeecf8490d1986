"""The benchmark of the loss runs, and shows what it is for: less memory for the same loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.arms import MB

ROOT = Path(__file__).parents[2]


@pytest.mark.release
def test_less_memory_for_the_same_loss(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.cross_entropy", "--tokens", "2048", "--device", "cpu"]
    command += ["--hidden-size", "64", "--share", "0.4", "--dtype", "bfloat16", "--repetitions", "1", "--rounds", "1"]
    command += ["--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens 2048, share 0.4, dtype bfloat16" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())["results"]
    full, chunked = (figures[kind][0] for kind in ("full", "chunked"))
    # all logits take 262 MB in fp32, and their loss holds two such tensors at once; those of a chunk take 67 MB
    assert full["more"]["peak"] > 500 * MB
    assert chunked["more"]["peak"] < 0.5 * full["more"]["peak"]
    assert chunked["losses"] == pytest.approx(full["losses"], rel=1e-4)
