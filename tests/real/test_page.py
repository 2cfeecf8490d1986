"""docs/how-to/tune-a-real-model.md: its commands, on problems made here, with fewer steps and words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.commands import write_lines
from benchmarks.real import made_up
from tests.real.conftest import KEPT
from tests.test_readmes import DOCS, ROOT, blocks, commands

PAGE = DOCS / "how-to" / "tune-a-real-model.md"
LEFT_OUT = ("hf download", "benchmarks.llama_cpp")
"""The hub is not asked by any test; llama.cpp is by `test_programs`."""
SHORT = {
    "--max-steps 60": "--max-steps 1",
    "--generate-max-new-tokens 60": "--generate-max-new-tokens 2",
    "max_new_tokens=60": "max_new_tokens=2",
}


@pytest.mark.release
def test_as_on_the_page(real_model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["XDG_CACHE_HOME"] = str(KEPT.parents[1])
    (tmp_path / "train_ep.py").symlink_to(ROOT / "train_ep.py")
    for split, number in (("train", 8), ("test", 2)):
        write_lines(made_up(number), tmp_path / f"gsm8k-{split}.jsonl")
    text, page = PAGE.read_text(encoding="utf-8"), tmp_path / "page.md"
    for as_there, in_short in SHORT.items():
        assert text.count(as_there) == 1
        text = text.replace(as_there, in_short)
    page.write_text(text, encoding="utf-8")
    words = [["bash", "-c", each] for each in commands(page) if not any(left in each for left in LEFT_OUT)]
    words += [[sys.executable, "-c", code] for code in blocks(page, "python")]
    assert len(words) == 5
    said = ""
    for command in words:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
    assert "step 0: eval loss" in said
    assert "step 1: sample generations" in said
    assert "tuned/hf: " in said
