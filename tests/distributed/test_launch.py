"""`python -m expertmesh.launch`: our exit codes, and no summary of what a rank has told in one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertmesh.sharding.torchrun import STOPPED
from tests.distributed.test_train_ep import start
from tests.distributed.whole_runs import ROOT

WORKER = """
import os, signal, sys, time
from pathlib import Path

how, out = sys.argv[1:]
is_second = os.environ["LOCAL_RANK"] == "1"
if how == "crash" and is_second:
    raise RuntimeError("the second has crashed")
if how == "killed" and is_second:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "done":
    sys.exit(0)
if how == "saves long":
    def save(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3)
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
if how == "saves":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
Path(out, os.environ["LOCAL_RANK"]).touch()
time.sleep(200)
"""


def launch(*more: str) -> list[str]:
    return [sys.executable, "-m", "expertmesh.launch", "--standalone", "--nproc-per-node", "2", *more]


@pytest.fixture
def worker(tmp_path: Path) -> str:
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return str(file)


def test_a_mistake_is_told_in_one_line() -> None:
    package = {"PYTHONPATH": str(ROOT / ".package"), "OMP_NUM_THREADS": "1"}
    done = start(launch("train_ep.py", "--model", "/nowhere", "--dataset", "d", "--use-cpu"), **package)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train_ep.py: error: --model /nowhere: no such directory\n"


@pytest.mark.slow
def test_a_mistake_in_a_flag_of_torchrun() -> None:
    done = start(launch("--nproc-per-node", "many", "x.py"), PYTHONPATH=str(ROOT / ".package"), OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (2, "launch: error: Unsupported nproc_per_node value: many\n")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code", "cause"), [("crash", 1, 1), ("killed", 137, -9), ("done", 0, 0)])
def test_how_ranks_end(how: str, code: int, cause: int, worker: str, tmp_path: Path) -> None:
    """A crash shows its own traceback and torch's summary, without the traceback of torchrun."""
    done = start(launch(worker, how, str(tmp_path)), PYTHONPATH=str(ROOT / ".package"), OMP_NUM_THREADS="1")
    assert done.returncode == code, done.stderr
    assert done.stderr.count("Traceback") == (how == "crash")
    assert ("RuntimeError: the second has crashed" in done.stderr) == (how == "crash")
    assert (f"exitcode  : {cause} " in done.stderr and "Root Cause" in done.stderr) == (code != 0), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "times"), [("saves", STOPPED, 1), ("saves long", STOPPED, 3), ("dies", 128 + signal.SIGTERM, 1)]
)
def test_a_signal_to_the_launcher(how: str, code: int, times: int, worker: str, tmp_path: Path) -> None:
    """Its ranks get it too, and may save however often it is repeated. That they have is its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".package"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(launch(worker, how, str(tmp_path)), env=environment, stderr=subprocess.PIPE) as launcher:
        assert launcher.stderr is not None
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert launcher.poll() is None
        for _ in range(times):
            launcher.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert launcher.wait(100) == code
        assert b"Traceback" not in launcher.stderr.read()
