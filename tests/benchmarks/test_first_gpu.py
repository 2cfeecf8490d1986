"""The run for a machine with a GPU, as far as a CPU can tell: its steps, its limits, and what it makes of results."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import first_gpu
from benchmarks.first_gpu import (
    Outcome,
    Step,
    in_time,
    is_not_slower,
    kernels_found,
    passed,
    run,
    search_path,
    write,
)
from benchmarks.gpu_step import idle
from expertmesh.training.environment import CHECKOUT


@pytest.mark.slow
def test_its_steps_run_on_a_cpu(tmp_path: Path) -> None:
    """Those that are no tests, which the suite runs anyway."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.first_gpu",
        "--use-cpu",
        "--steps",
        "3,5,6,7,8",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    page = (tmp_path / "first_gpu.md").read_text()
    assert done.returncode == 0, done.stdout + page
    found = json.loads((tmp_path / "first_gpu.json").read_text())
    assert [step["verdict"] for step in found["steps"]] == ["as expected"] * 5
    assert page.count("**as expected**") == 5
    assert "losses of all variants agree" in (tmp_path / "8-throughput.log").read_text()


def test_every_gpu_step_has_one_on_the_cpu(tmp_path: Path) -> None:
    names = [step.name for step in first_gpu.gpu_steps(tmp_path)]
    assert names == [step.name for step in first_gpu.cpu_steps(tmp_path)]
    assert len(set(names)) == len(names)
    files = {part for step in first_gpu.gpu_steps(tmp_path) for command in step.commands for part in command}
    tests = Path(CHECKOUT, "tests", "gpu").glob("test_*.py")
    assert files >= {f"tests/gpu/{file.name}" for file in tests}


def python_step(code: str, read: object = lambda out, printed: (True, printed.splitlines()[-1])) -> Step:
    return Step("name", "title", 1, "expected", [[sys.executable, "-c", code]], read)  # type: ignore[arg-type]


def test_a_step_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    outcome = run(1, python_step(code), tmp_path, 1.0, use_cpu=True)
    assert outcome.verdict == "stopped at its limit"
    time.sleep(3)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("code", "read", "verdict", "found"),
    [
        ("print('fine')", lambda out, printed: (True, "good"), "as expected", "good"),
        ("print('slow')", lambda out, printed: (False, "3 % MFU"), "not as expected", "3 % MFU"),
        ("raise SystemExit(3)", lambda out, printed: (True, "half"), "failed", "exit codes [3]; half"),
        ("pass", lambda out, printed: (True, json.loads((out / "no.json").read_text())), "not as expected", "no.json"),
    ],
)
def test_verdicts(tmp_path: Path, code: str, read: object, verdict: str, found: str) -> None:
    outcome = run(2, python_step(code, read), tmp_path, 30.0, use_cpu=True)
    assert outcome.verdict == verdict
    assert found in outcome.found
    assert "[2-name.log]" in outcome.found
    write(tmp_path, {"commit": "abc"}, [outcome])
    assert f"**{verdict}**" in (tmp_path / "first_gpu.md").read_text()


def test_what_does_not_fit_is_left_out_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def fake(number: int, step: Step, out: Path, limit: float, use_cpu: bool) -> Outcome:
        ran.append(number)
        clock[0] += 30
        return Outcome(step.name, step.title, step.expected, "as expected", "", 30.0)

    clock = [0.0]
    monkeypatch.setattr(first_gpu, "run", fake)
    monkeypatch.setattr(first_gpu.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "argv", ["first_gpu", "--use-cpu", "--minutes", "1.2", "--out", str(tmp_path)])
    assert first_gpu.main() == 1
    assert ran == [1, 2]
    page = (tmp_path / "first_gpu.md").read_text()
    assert page.count("**left out**: no time was left") == 6


def test_test_results_are_counted_and_failures_named(tmp_path: Path) -> None:
    cases = '<testcase name="a"/><testcase name="b[bf16]"><failure/></testcase>'
    counts = 'tests="5" failures="1" errors="0" skipped="2"'
    (tmp_path / "kernels.xml").write_text(f"<testsuites><testsuite {counts}>{cases}</testsuite></testsuites>")
    assert passed("kernels")(tmp_path, "") == (False, "2 passed, 1 failed, 2 skipped: b[bf16]")
    counts = 'tests="2" failures="0" errors="0" skipped="2"'
    (tmp_path / "kernels.xml").write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    assert passed("kernels")(tmp_path, "")[0] is False, "nothing ran"


@pytest.mark.parametrize(
    ("ours", "of_layer", "is_right", "found"),
    [(1.25, 2.0, True, "0.80 of the ceiling, 1.50 x"), (2.0, 2.0, False, "0.50 of"), (1.25, 3.0, False, "1.00 x")],
)
def test_the_kernel_of_auto_is_held_to_ceiling_and_transformers(
    tmp_path: Path, ours: float, of_layer: float, is_right: bool, found: str
) -> None:
    both = "forward + backward"
    taken = [("experts", "ceiling", both, 1.0), ("experts", "mine", both, ours), ("layer", "mine", both, of_layer)]
    taken += [("layer", "HF grouped_mm", both, 3.0), ("experts", "mine", "forward", 0.1)]
    results = [dict(part=part, variant=name, passes=passes, median_ms=ms) for part, name, passes, ms in taken]
    (tmp_path / "a.json").write_text(json.dumps({"auto": {"model": "mine"}, "results": results}))
    verdict, words = kernels_found(["a"], 0.66, 1.1)(tmp_path, "")
    assert verdict is is_right
    assert found in words


@pytest.mark.parametrize(("ours", "is_right"), [([1.0, 1.2, 9.0], True), ([2.5, 2.5, 0.1], False)])
def test_steps_are_held_to_the_speed_of_transformers(tmp_path: Path, ours: list[float], is_right: bool) -> None:
    results = [{"rounds": [{"seconds": [2.0, 2.0]}, {"seconds": [2.0]}]}, {"rounds": [{"seconds": ours}]}]
    (tmp_path / "throughput.json").write_text(json.dumps({"aborted": None, "results": results}))
    assert is_not_slower(tmp_path, "")[0] is is_right


def test_processes_find_the_package(tmp_path: Path) -> None:
    code = in_time(
        [sys.executable, "-c", "import expertmesh, tests, benchmarks"],
        (tmp_path / "log").open("w"),
        {"PYTHONPATH": search_path()},
        60.0,
    )
    assert code == 0, (tmp_path / "log").read_text()


def test_idle_time_is_what_no_stream_fills() -> None:
    kernels = [(0.0, 10.0, "a"), (5.0, 20.0, "b"), (8.0, 12.0, "c"), (30.0, 40.0, "d"), (45.0, 100.0, "e")]
    share, gaps = idle(kernels)
    assert share == pytest.approx(15 / 100)
    assert gaps == ["0.01 ms, b -> d", "0.01 ms, d -> e"] or gaps[0].endswith("b -> d")
    assert idle([]) == (0.0, [])
