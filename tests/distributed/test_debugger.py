"""--debug-ranks: a debugger on one rank, fed as from a terminal, while the other waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.whole_runs import ROOT


@pytest.mark.release
def test_talks_on_one_rank_while_the_other_waits(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """It opens before training, goes on, opens again where rank 1 meets an error, and leaves that to end the run."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "benchmarks.inject", "raise", "1", "2", "--model", str(tiny_model), "--dataset", str(tiny_data),
        "--output-dir", str(tmp_path), "--use-cpu", "--ep-size", "2", "--max-steps", "3", "--debug-ranks", "1",
    ]  # fmt: skip
    # a terminal gives whoever reads it a line at a time
    ours, theirs = os.openpty()
    os.write(ours, b"p 6 * 7\ncontinue\np model.config.model_type\nquit\n")
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=theirs, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    for end in (ours, theirs):
        os.close(end)
    assert "(Pdb) 42" in done.stdout
    assert "(Pdb) 'mixtral'" in done.stdout, "not in the frame of the error"
    assert "rank 1: OSError: an error made up" in done.stderr
    assert "rank 0: OSError" not in done.stderr
    assert done.returncode == 1
