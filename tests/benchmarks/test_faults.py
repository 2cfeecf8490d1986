"""benchmarks.faults in its short form: each fault ends as it should, and going on gives the undisturbed weights."""

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.network import can_make_networks
from benchmarks.runs import Run, worker_pids

RANK = "import time; time.sleep(60); print('was not ended')"
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
"""As torchrun does: it starts a process, and waits for it."""


@pytest.fixture
def printed_by(
    run_whole: Callable[[int, list[str]], Run], capfd: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    def printed(flags: list[str]) -> str:
        code = faults.main(flags, run_whole)
        out = capfd.readouterr().out
        assert code == 0, out
        return out

    return printed


@pytest.mark.slow
def test_short_form(printed_by: Callable[[list[str]], str]) -> None:
    printed = printed_by(["--short"])
    # its rows: what was injected, how often, what happened, seconds, difference
    for name, fault in faults.FAULTS.items():
        assert (f"| {fault.what} | " in printed) == (fault.in_short and not fault.of_pipelines), name


@pytest.mark.release
def test_between_stages(printed_by: Callable[[list[str]], str]) -> None:
    """A rank that is lost, or hangs, as it exchanges with another stage: the others say in which."""
    flags = ["--faults", "die-sending", "hang-receiving", "--pp-size", "2", "--times", "1", "--ranks", "2"]
    printed = printed_by([*flags, "--steps", "6"])
    assert "the others say in which stage they lost it" in printed
    assert "every rank reports where it hangs, --ddp-timeout 30, the stage included" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "num_ranks", "more"),
    [
        ("cp", 2, ""),
        pytest.param("pp", 4, "", marks=pytest.mark.release),
        pytest.param("ep", 2, "--task dpo --kills 20 --steps 60", marks=pytest.mark.release),
        pytest.param("ep", 2, "--task kto --kills 3", marks=pytest.mark.release),
    ],
)
def test_killed_ranks_lose_nothing(
    printed_by: Callable[[list[str]], str], axis: str, num_ranks: int, more: str
) -> None:
    """A run whose ranks are killed ends with the weights of one that is left alone, and its metrics are complete."""
    flags = ["--faults", "die-again", "--times", "1", "--kills", "2", "--steps", "12", "--ranks", str(num_ranks)]
    printed = printed_by([*flags, f"--{axis}-size", "2", *more.split()])
    kills = (re.findall(r"--kills (\d+)", more) or ["2"])[0]
    assert f"| 1 | {kills} kills, it resumes by itself each time | | 0.0e+00 |" in re.sub(" +", " ", printed)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_networks(), reason="needs root and network namespaces")
def test_two_nodes(printed_by: Callable[[list[str]], str]) -> None:
    """In network namespaces: the link between them is cut, which ends the run within its time limit, or slowed."""
    printed = printed_by(["--faults", "link-cut", "link-slow", "--times", "1", "--ranks", "2", "--steps", "6"])
    assert "every rank reports where it hangs" in printed
    assert "it continues, slower" in printed


@pytest.mark.parametrize("program", ["train_ep.py", "benchmarks.inject"])
def test_a_run_that_hangs_is_ended_with_its_ranks(tmp_path: Path, program: str) -> None:
    bench = faults.Bench(tmp_path, 1, 1, random.Random(0), timeout=0.01)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK, program], text=True, stdout=subprocess.PIPE)
    while not worker_pids(launcher.pid):
        assert launcher.poll() is None
        time.sleep(0.01)
    with pytest.raises(faults.Unexpected, match="a run hangs"):
        bench.finish(launcher)
    # it reaches the end of its pipe once every process that could write to it has ended
    assert launcher.stdout is not None
    assert launcher.stdout.read() == ""
    launcher.wait()
