"""configs/launch/ray_train.py under Ray Train itself: two workers on this machine, of which one is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.distributed.whole_runs import ROOT, lines
from tests.processes import processes
from tests.real.conftest import kept_packages

pytestmark = pytest.mark.release

PACKAGES = ("ray==2.60.0", "msgpack", "jsonschema", "jsonschema-specifications", "attrs", "referencing", "rpds-py")
"""Ray, and what it needs of what we have not."""
STEPS, SECONDS = 100, 600.0


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """With Ray, from the user's cache."""
    packages = kept_packages("ray", "--no-deps", *PACKAGES)
    paths = os.pathsep.join([str(packages), str(ROOT / ".package")])
    return {**os.environ, "PYTHONPATH": paths, "RAY_DEDUP_LOGS": "0"}


def workers() -> set[int]:
    """Process ids of Ray Train's workers."""
    return {each.number for each in processes() if each.words[0].startswith("ray::RayTrainWorker")}


def command(settings: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "configs/launch/ray_train.py"), "2", str(settings), *flags]


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> Path:
    values = {
        "model": str(tiny_model), "dataset": str(tiny_data), "output_dir": str(tmp_path / "out"), "use_cpu": True,
        "ep_size": 2, "max_steps": STEPS, "save_steps": 10, "save_total_limit": 2, "logging_steps": 10,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


def test_a_worker_that_is_killed(environment: dict[str, str], settings: Path, tmp_path: Path) -> None:
    """All workers begin again, and go on from the newest checkpoint."""
    out = tmp_path / "out"
    before = workers()
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen(command(settings), env=environment, cwd=tmp_path, stdout=said, stderr=said)
        try:
            end = time.monotonic() + SECONDS
            while not any((out / "checkpoints").glob("step-*/checkpoint.json")) and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(max(workers() - before), signal.SIGKILL)
            code = run.wait(SECONDS)
        finally:
            run.terminate()
            run.wait(60)
    printed = (tmp_path / "said").read_text()
    assert code == 0, printed[-3000:]
    assert "resumed from " in printed
    assert lines(out)[-1]["step"] == STEPS
    assert (out / "hf" / "model.safetensors").exists()


def test_a_mistake(environment: dict[str, str], settings: Path, tmp_path: Path) -> None:
    """In flags: told once, by the command itself."""
    words = command(settings, "--ep-size", "three")
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert done.stderr.startswith("train_ep.py: error: ")
    assert "--ep-size" in done.stderr
