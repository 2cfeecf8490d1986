"""The run for a machine with a GPU, as far as a CPU can tell: its steps, its limits, how it goes on, and what it makes
of results."""

import json
import os
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import first_gpu, first_gpu_verdicts, gpu_step, kept_tests, needed, preflight
from benchmarks.ended import in_time
from benchmarks.first_gpu import Call, Part, State, Step, go_on, open_state
from benchmarks.first_gpu_verdicts import kernels_found, no_errors, nothing_missing, passed, steps_found, whole_steps
from benchmarks.gpu_step import busy_time, kernels_of
from expertmesh.training.environment import CHECKOUT
from tests.distributed.whole_runs import Runs
from tests.gpu.one_card import run_on
from tests.tiers import tiered

MACHINE = {"date": "today", "commit": "abc", "device": "a card"}


@pytest.mark.parametrize(
    "names",
    tiered(
        slow=[["preflight", "mixtral", "sanitizer"]],
        release=[["preflight", "mixtral", "qwen3", "experts", "throughput", "sanitizer"]],
    ),
    ids=len,
)
def test_its_steps_run_on_a_cpu(tmp_path: Path, names: list[str]) -> None:
    """Those that are no tests, which the suite runs anyway; cut off and resumed until all are over."""
    of_all = [step.name for step in first_gpu.steps_of(tmp_path, True)]
    command = [sys.executable, "-m", "benchmarks.first_gpu", "--use-cpu", "--minutes", "5"]
    command += ["--steps", *(str(of_all.index(name) + 1) for name in names)]
    command += ["--results", str(tmp_path / "results")]
    for _ in range(12):
        done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=580)
        if done.returncode != first_gpu.CALL_AGAIN:
            break
    page = (tmp_path / "first_gpu.md").read_text()
    assert done.returncode == 0, done.stdout + page
    found = json.loads((tmp_path / "first_gpu.json").read_text())
    verdicts = {step["name"]: step["verdict"] for step in found["steps"]}
    assert {verdicts.pop(name) for name in names} == {"as expected"}
    assert set(verdicts.values()) == {"not finished"}
    assert {path.name for path in (tmp_path / "results").iterdir()} == set(first_gpu.RESULTS)
    with tarfile.open(tmp_path / "results" / "first_gpu.tar") as archive:
        kept = set(archive.getnames())
    assert kept >= {"first_gpu.json", "mixtral.json", "mixtral.log"}
    if "experts" in names:
        assert "card.json" in kept
    if "throughput" in names:
        assert "losses of all variants agree" in (tmp_path / "throughput.log").read_text()


def test_every_gpu_step_has_one_on_the_cpu(tmp_path: Path) -> None:
    steps = first_gpu.steps_of(tmp_path)
    assert [step.name for step in steps] == [step.name for step in first_gpu.steps_of(tmp_path, True)]
    parts = [part.name for step in steps for part in step.parts]
    assert len(set(parts)) == len(parts)
    # a quarter of an hour has all but tables and what they need to begin
    assert [step.name for step in steps[:6]] == ["preflight", "mixtral", "kernels", "runs", "ranks", "qwen3"]
    assert sum(part.minutes for step in steps[:6] for part in step.parts) <= 12.5
    assert all(part.minutes <= 3 for step in steps for part in step.parts)
    files = {word for step in steps for part in step.parts for word in part.command}
    assert files >= {f"tests/gpu/{file.name}" for file in Path(CHECKOUT, "tests", "gpu").glob("test_*.py")}


def test_a_card_that_is_not_here_is_forecast_and_judged_as_its_own_steps_are(tmp_path: Path) -> None:
    """By the same commands, but that no step is computed."""
    there, here = first_gpu.steps_of(tmp_path), first_gpu.steps_of(tmp_path, True, "nvidia-h200")
    for name in first_gpu.RECIPES:
        (own,), (forecast,) = ([step for step in steps if step.name == name] for steps in (there, here))
        assert (forecast.title, forecast.expected) == (own.title, own.expected)
        assert forecast.parts[0].command == [*own.parts[0].command, "--use-cpu", "--as", "nvidia-h200"]
    assert "forecasts of nvidia-h200" in first_gpu.describe_machine(True, "nvidia-h200")["device"]


def test_flags_reach_the_steps_and_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--as the commands and the page; the three files, and no other, are in --results, too."""
    begun: list[Step] = []
    monkeypatch.setattr(first_gpu, "go_on", lambda number, step, *more: begun.append(step))
    out, results = tmp_path / "out", tmp_path / "results"
    flags = ["--use-cpu", "--as", "nvidia-h200", "--out", str(out), "--results", str(results)]
    assert first_gpu.main(flags) == first_gpu.CALL_AGAIN
    one, other = (
        [part.command for step in steps for part in step.parts]
        for steps in (begun, first_gpu.steps_of(out, True, "nvidia-h200"))
    )
    assert one == other
    assert "nvidia-h200" in json.loads((results / "first_gpu.json").read_text())["machine"]["device"]
    assert {path.name for path in results.iterdir()} == {*first_gpu.RESULTS}
    assert all((results / name).read_bytes() == (out / name).read_bytes() for name in first_gpu.RESULTS)
    with pytest.raises(SystemExit):
        first_gpu.main(flags[1:])


@pytest.mark.slow
def test_a_forecast_in_the_place_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all its micro-batches, by the recipe; it meets itself, and half of its speed does not."""
    file = tmp_path / "mixtral.json"
    size = ["--tiny", "--layers", "2", "--rows", "1", "--seq-length", "64", "--recipe", "configs/mixtral_8x7b.yaml"]
    assert gpu_step.main(["--use-cpu", "--as", "nvidia-h200", *size, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "8 x 1 x 64 tokens, bf16, checkpointing selective, adamw_torch_8bit; H200" in printed
    assert "no step was computed" in printed
    found = json.loads(file.read_text())
    assert found["tokens_per_second"] * found["forecast_seconds"] == pytest.approx(8 * 64)
    assert steps_found("mixtral")(tmp_path, "")[0]
    file.write_text(json.dumps(found | {"seconds": [2 * found["forecast_seconds"]]}))
    is_right, words = steps_found("mixtral")(tmp_path, "")
    assert (is_right, "0.50 of the forecast speed" in words) == (False, True)


@pytest.mark.parametrize("name", first_gpu.RECIPES)
def test_a_recipe_for_fewer_layers(name: str) -> None:
    """Its optimizer, and as large a share of layers whose products are kept."""
    file, model = first_gpu.RECIPES[name]
    recipe = yaml.safe_load((CHECKOUT / "configs" / file).read_text())
    size: Any = SimpleNamespace(recipe=CHECKOUT / "configs" / file, model=model, tiny=False, layers=0, rows=2)
    size.__dict__.update(seq_length=64, micro_batches=8, gradient_checkpointing=None, optim=None)
    of_all, layers = recipe.get("keep_expert_products", 0), gpu_step.sized(size, 0).num_hidden_layers
    for fewer in (1, layers // 4, layers):
        settings = gpu_step.settings_of(size, True, fewer)
        assert settings.keep_expert_products == of_all * fewer // layers
        assert (settings.optim, settings.gradient_checkpointing) == (recipe["optim"], recipe["gradient_checkpointing"])
        assert (settings.gradient_accumulation_steps, settings.ep_size, settings.packing) == (8, 1, False)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--as", "H200"], "--as needs --use-cpu"),
        (["--use-cpu", "--as", "abacus"], "--as abacus: there are forecasts of A100, H100, H200"),
        (["--use-cpu", "--recipe", "no.yaml"], "--recipe no.yaml: no such file"),
    ],
)
def test_a_step_that_cannot_be_measured(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_step.main(flags) == 2
    assert said in capsys.readouterr().err


# ---- limits, and how it goes on ----


def python_part(code: str, name: str = "part", minutes: float = 1.0) -> Part:
    return Part(name, [sys.executable, "-c", code], minutes)


def step_of(*parts: Part, read: Any = lambda out, printed: (True, "good")) -> Step:
    return Step("name", "title", "expected", list(parts), read)


def call(step: Step, state: State, out: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """A call of so many seconds; what became of the step."""
    monkeypatch.setattr(first_gpu, "GRACE", 0.0)
    monkeypatch.setattr(first_gpu, "LEAST_SECONDS", 0.5)
    go_on(1, step, state, Call(time.monotonic() + seconds, out, [step], use_cpu=True))
    return first_gpu.verdict_of(step, state.parts, out)[0]


@pytest.mark.parametrize("starts", tiered(["os.setsid() or subprocess.Popen"], slow=["subprocess.Popen"]))
def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: str
) -> None:
    """Also with what has a session of its own, as torchrun's workers, and whose parent is gone."""
    monkeypatch.setattr("benchmarks.ended.GRACE", 0.5)
    mark = tmp_path / "alive"
    grandchild = f"import time, pathlib; time.sleep(2); pathlib.Path({str(mark)!r}).touch()"
    child = f"import os, subprocess, sys; {starts}([sys.executable, '-c', {grandchild!r}], start_new_session=True)"
    code = (
        f"import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"subprocess.run([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    with (tmp_path / "log").open("w") as log:
        assert in_time([sys.executable, "-c", code], log, {}, tmp_path, 1.2) is None
    time.sleep(2)
    assert not mark.exists()


def test_a_command_may_write_what_it_has_when_it_is_ended(tmp_path: Path) -> None:
    code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('half of it')"
    with (tmp_path / "log").open("w") as log:
        assert in_time([sys.executable, "-c", code], log, {}, tmp_path, 1.0) is None
    assert (tmp_path / "log").read_text() == "half of it\n"


@pytest.mark.parametrize(
    ("code", "read", "verdict", "found"),
    [
        ("print('fine')", lambda out, printed: (True, "good"), "as expected", "good"),
        ("print('slow')", lambda out, printed: (False, "3 % MFU"), "not as expected", "3 % MFU"),
        ("raise SystemExit(3)", lambda out, printed: (True, "half"), "failed", "exit codes [3]; half"),
        ("pass", lambda out, printed: (True, json.loads((out / "no.json").read_text())), "not as expected", "no.json"),
    ],
)
def test_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, read: Any, verdict: str, found: str
) -> None:
    state, step = State(MACHINE), step_of(python_part(code), read=read)
    assert call(step, state, tmp_path, 60, monkeypatch) == verdict
    page = (tmp_path / "first_gpu.md").read_text()
    assert all(word in page for word in (f"**{verdict}**", found, "[part.log]", "commit abc", "a card"))


def test_what_a_call_has_no_time_for_is_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that has ended does not run again; one that the call's end cuts off does, from its beginning."""
    quick = python_part("print('once')", "quick")
    slow = python_part("import time; print('begun', flush=True); time.sleep(2); print('ended')", "slow", minutes=0.2)
    state, step = State(MACHINE), step_of(quick, slow)
    assert call(step, state, tmp_path, 1.5, monkeypatch) == "not finished"
    assert "slow" not in {name for name, ran in state.parts.items() if ran.seconds}, "it had less than its limit"
    # what another process makes of the files, whose directory is lost
    elsewhere = tmp_path / "elsewhere"
    state = open_state(elsewhere, tmp_path / "first_gpu.tar", MACHINE | {"date": "tomorrow"})
    assert call(step, state, elsewhere, 20, monkeypatch) == "as expected"
    assert (elsewhere / "quick.log").read_text().count("once") == 2, "its command and its output, once"
    assert (elsewhere / "slow.log").read_text().count("ended\n") == 1


def test_a_part_that_is_longer_than_a_call_is_stopped_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(MACHINE)
    step = step_of(python_part("import time; time.sleep(60)", "long"), python_part("print('after')", "after"))
    assert call(step, state, tmp_path, 1.5, monkeypatch) == "stopped at its limit"
    assert not state.parts["after"].is_over
    call(step, state, tmp_path, 20, monkeypatch)
    assert state.parts["after"].code == 0


def test_what_the_preflight_found_missing_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not find one another would wait until all of a step's time is over."""
    part = replace(python_part("print('tried')"), needs="two ranks")
    for said, verdict in (("NCCL: duplicate GPU", "failed"), ("", "as expected")):
        out = tmp_path / verdict
        out.mkdir()
        (out / "preflight.json").write_text(json.dumps({"two ranks": said}))
        state, step = State(MACHINE), step_of(part)
        assert call(step, state, out, 60, monkeypatch) == verdict
        assert (said or "tried") in (out / "part.log").read_text()
    checks = {part.needs for step in first_gpu.steps_of(tmp_path) for part in step.parts}
    assert checks - {""} <= preflight.CHECKS.keys()


def test_results_of_another_machine_are_not_gone_on_with(tmp_path: Path) -> None:
    Call(0.0, tmp_path, []).write(State(MACHINE))
    assert open_state(tmp_path, None, MACHINE).machine == MACHINE
    with pytest.raises(ValueError, match="another run \\(commit abc, now def\\); give another --out"):
        open_state(tmp_path, None, MACHINE | {"commit": "def"})
    (tmp_path / "first_gpu.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        open_state(tmp_path, None, MACHINE)
    with pytest.raises(ValueError, match="no such file"):
        open_state(tmp_path / "new", tmp_path / "none.tar", MACHINE)


def test_the_next_call_may_have_another_driver(tmp_path: Path) -> None:
    Call(0.0, tmp_path, []).write(State(MACHINE | {"driver": "580.1"}))
    assert open_state(tmp_path, None, MACHINE | {"driver": "580.2", "date": "tomorrow"}).machine["driver"] == "580.1"
    with pytest.raises(ValueError, match="device a card, now another"):
        open_state(tmp_path, None, MACHINE | {"driver": "580.1", "device": "another"})


def test_a_call_counts_from_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes half a minute of a machine's ten that is new."""
    (tmp_path / "torch.py").write_text("import sys; sys.exit(7 if 'benchmarks.ended' in sys.modules else 1)")
    environment = {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}:{CHECKOUT / '.package'}"}
    command = [sys.executable, "-m", "benchmarks.first_gpu", "--out", str(tmp_path / "out")]
    assert subprocess.run(command, cwd=CHECKOUT, env=environment, timeout=60).returncode == 7
    monkeypatch.setattr(first_gpu, "BEGUN", time.monotonic() - 8.9 * 60)
    assert first_gpu.main(["--use-cpu", "--out", str(tmp_path / "out")]) == first_gpu.CALL_AGAIN
    parts = json.loads((tmp_path / "out" / "first_gpu.json").read_text())["parts"]
    assert {part["seconds"] for part in parts.values()} == {0.0}


TESTS = """
import time, pytest
@pytest.mark.parametrize("number", range(8))
def test_each(number):
    time.sleep(0.4)
    assert number != 1
"""


@pytest.mark.slow
def test_tests_keep_their_results_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By case over workers, killed in the midst: what has ended is there, and does not run again."""
    (tmp_path / "test_eight.py").write_text(TESTS)
    kept = tmp_path / "kept.jsonl"
    environment = {"PYTHONPATH": str(CHECKOUT), kept_tests.VARIABLE: str(kept)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.kept_tests"]
    command += ["-n", "2", "--dist", "worksteal", "test_eight.py"]
    first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(kept_tests.read(kept)) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    first.kill()
    first.wait()
    time.sleep(0.5)
    ended = {each["id"] for each in kept_tests.read(kept)}
    assert 3 <= len(ended) < 8
    with kept.open("a") as file:
        file.write('{"id": "half a li')
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    results = kept_tests.read(kept)
    assert sorted(each["id"] for each in results) == [f"test_eight.py::test_each[{n}]" for n in range(8)], done.stdout
    again = [line for line in done.stdout.splitlines() if line.startswith(("passed in", "failed in"))]
    assert len(again) == 8 - len(ended), done.stdout
    assert passed("kept")(tmp_path, "") == (False, "7 passed, 1 failed, 0 skipped: test_each[1]")
    (failed,) = [each for each in results if each["outcome"] == "failed"]
    assert "assert 1 != 1" in failed["last"]
    # nothing is left: pytest then says that no test was collected, which is no failure of a test
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert len(kept_tests.read(kept)) == 8


TORCH = """
class cuda:
    is_lost = False
    @staticmethod
    def is_initialized():
        return True
    @classmethod
    def synchronize(cls):
        if cls.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
LOSES_ITS_GPU = """
import torch, pytest
@pytest.mark.parametrize("number", range(6))
def test_each(number):
    torch.cuda.synchronize()
    torch.cuda.is_lost = number == 1
"""


def test_a_test_that_loses_the_gpu_fails_no_other(tmp_path: Path) -> None:
    """Of a kernel that has failed a test's own code is not told; every call on the GPU after it fails. Another worker
    goes on, with as many tests left out as the first one: those of an earlier session."""
    (tmp_path / "kept.jsonl").write_text('{"id": "test_six.py::test_each[0]", "outcome": "passed"}\n')
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_six.py").write_text(LOSES_ITS_GPU)
    environment = {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}", kept_tests.VARIABLE: str(tmp_path / "kept.jsonl")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.kept_tests"]
    command += ["-n", "1", "test_six.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    results = {each["id"][-2]: each["outcome"] for each in kept_tests.read(tmp_path / "kept.jsonl")}
    assert results == {**dict.fromkeys("02345", "passed"), "1": "failed"}, done.stdout


@pytest.mark.parametrize(("device", "is_closed", "most"), [("cuda", True, 90), ("cpu", False, 600)])
def test_a_run_that_fails_on_a_card_leaves_no_process(
    tmp_path: Path, device: str, is_closed: bool, most: float
) -> None:
    """Of which a card may be lost; and one that hangs takes no more than its part of a step's time."""
    ranks = mock.Mock(run=mock.Mock(return_value=[(2, "", "error: CUDA error: an illegal memory access")]))
    with pytest.raises(AssertionError, match="illegal memory access"):
        run_on(device, Runs(ranks, tmp_path, tmp_path, tmp_path), 1, "--bf16", "run")
    assert ranks.close.called == is_closed
    assert ranks.run.call_args.kwargs["timeout"] <= most


# ---- what it makes of results ----

STEP: dict[str, Any] = {
    "setting": "mixtral-8x7b, 3 layers", "tokens_per_second": 21000.0, "mfu": 0.36, "idle_share": 0.02, "moe_layers": 3,
    "waits": {"moe/dispatch.py:1": 6, "training/steps/step.py:2": 1}, "losses": [10.4, 10.2], "peak_bytes": 70.5e9,
    "forecast_bytes": 70e9, "too_large": 0, "micro_batches": 2, "seconds": [9.0, 1.0, 1.0], "forecast_seconds": 0.98,
    "forecast_mfu": 0.37, "is_dry": False,
}  # fmt: skip
"""As `benchmarks.gpu_step --json` writes it."""


def experts(ours: float, layer: float) -> dict[str, Any]:
    """As `benchmarks.experts --json` writes it: milliseconds of what `auto` takes, where the ceiling takes 1 and
    transformers' layer 3."""
    both = "forward + backward"
    taken = [("experts", "ceiling", both, 1.0), ("experts", "mine", both, ours), ("layer", "mine", both, layer)]
    taken += [("layer", "HF grouped_mm", both, 3.0), ("experts", "mine", "forward", 0.1)]
    results = [dict(part=part, variant=name, passes=passes, median_ms=ms) for part, name, passes, ms in taken]
    return {"auto": {"model": "mine"}, "results": results}


def throughput(ours: list[float], aborted: str | None = None) -> dict[str, Any]:
    """As `benchmarks.throughput --json` writes it: seconds a step of transformers, 2, and of ours."""
    results = {"hf-fsdp": [{"seconds": [2.0, 2.0]}, {"seconds": [2.0]}], "ours-ep=1": [{"seconds": ours}]}
    return {"aborted": aborted, "results": results}


def results_of(*outcomes: str) -> str:
    return "".join(json.dumps({"id": f"f::t[{n}]", "outcome": each}) + "\n" for n, each in enumerate(outcomes))


RIGHT_AND_WRONG: dict[str, tuple[first_gpu_verdicts.Read, str, list[tuple[Any, bool, str]]]] = {
    # by step: what judges, the file that it reads, and what is in it
    "preflight": (
        nothing_missing,
        "preflight.json",
        [
            ({"packages": "", "Triton": ""}, True, "packages, Triton work"),
            ({"packages": "", "Triton": "no gcc"}, False, "Triton: no gcc"),
            ({}, False, ""),
        ],
    ),
    "step": (
        steps_found("mixtral"),
        "mixtral.json",
        [
            (
                STEP,
                True,
                "0.98 of the forecast speed, MFU 36.0% (forecast 37.0%), idle 2.0%, 7 waits, peak memory 1.007",
            ),
            (STEP | {"forecast_seconds": 0.5}, False, "0.50 of the forecast speed"),
            (STEP | {"forecast_seconds": 0.84}, False, "0.84 of the forecast speed"),
            (STEP | {"forecast_seconds": 1.16}, False, "1.16 of the forecast speed"),
            (STEP | {"mfu": None}, True, "0.98 of the forecast speed, idle"),
            (STEP | {"losses": [], "idle_share": None, "is_dry": True}, True, "(forecast 37.0%), 7 waits"),
            (STEP | {"peak_bytes": 73e9}, False, "1.043 of the forecast"),
            (STEP | {"peak_bytes": 66e9}, False, "0.943 of the forecast"),
            (STEP | {"waits": {"a": 8}}, False, "8 waits"),
            (STEP | {"losses": [10.4, float("nan")]}, False, ""),
            (STEP | {"losses": []}, False, ""),
            (STEP | {"too_large": 4}, False, "4 layers did not fit, against the forecast"),
        ],
    ),
    "experts": (
        kernels_found({"a": (0.66, 1.1)}),
        "a.json",
        [
            (experts(1.25, 2.0), True, "mine 0.80 of the ceiling, 1.50 x"),
            (experts(2.0, 2.0), False, "0.50 of"),
            (experts(1.25, 3.0), False, "1.00 x"),
        ],
    ),
    "runs": (
        passed("runs"),
        "runs.jsonl",
        [
            (results_of("passed", "skipped"), True, "1 passed, 0 failed, 1 skipped"),
            (results_of("passed", "failed"), False, "1 failed, 0 skipped: t[1]"),
            (results_of("skipped"), False, "0 passed"),
            ("", False, "0 passed"),
        ],
    ),
    "throughput": (
        whole_steps(judges_speed=True),
        "throughput.json",
        [
            (throughput([1.0, 1.2, 9.0]), True, "1.67 x"),
            (throughput([2.5, 2.5, 0.1]), False, "0.80 x"),
            (throughput([1.0], "losses differ"), False, "aborted: losses differ"),
        ],
    ),
    "throughput on a CPU": (
        whole_steps(judges_speed=False),
        "throughput.json",
        [
            (throughput([2.5, 2.5, 0.1]), True, "0.80 x"),
            (throughput([1.0], "losses differ"), False, "aborted: losses differ"),
        ],
    ),
    "sanitizer": (
        no_errors,
        "printed",
        [
            ("ERROR SUMMARY: 0 errors\nERROR SUMMARY: 0 errors", True, "0, 0 errors"),
            ("ERROR SUMMARY: 0 errors\nERROR SUMMARY: 2 errors", False, "0, 2 errors"),
            ("compute-sanitizer is not here", True, "not here"),
            ("Segmentation fault", False, "no summary"),
        ],
    ),
}


@pytest.mark.parametrize(
    ("name", "content", "is_right", "words"),
    [(name, *case) for name, (_, _, cases) in RIGHT_AND_WRONG.items() for case in cases],
)
def test_the_judgement_of_recorded_results(tmp_path: Path, name: str, content: Any, is_right: bool, words: str) -> None:
    read, file, _ = RIGHT_AND_WRONG[name]
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    verdict, found = read(tmp_path, content if file == "printed" else "")
    assert verdict is is_right
    assert words in found


def test_every_step_has_a_judgement_that_was_tested(tmp_path: Path) -> None:
    """By the function that judges: `passed` is that of three steps."""
    tested = {read.__qualname__ for read, _, _ in RIGHT_AND_WRONG.values()}
    assert {step.read.__qualname__ for step in first_gpu.steps_of(tmp_path)} == tested


def test_idle_time_is_what_no_stream_fills() -> None:
    kernels = [(0.0, 10.0, "a"), (5.0, 20.0, "b"), (8.0, 12.0, "c"), (30.0, 40.0, "d"), (45.0, 100.0, "e")]
    busy, gaps = busy_time(kernels)
    assert busy == 85.0
    assert gaps == ["0.01 ms, b -> d", "0.01 ms, d -> e"] or gaps[0].endswith("b -> d")
    assert busy_time([]) == (0.0, [])


def test_idle_is_a_share_of_steps_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which makes the host slower, and so the times between kernels longer."""
    cuda = torch.autograd.DeviceType.CUDA
    kernel = SimpleNamespace(
        time_range=SimpleNamespace(start=0, end=3e5), name="flash_fwd", device_type=cuda, is_user_annotation=False
    )
    profiler = mock.MagicMock()
    profiler.return_value.__enter__.return_value.events.return_value = [kernel]
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    found: Any = SimpleNamespace(seconds=[9.0, 0.4, 0.4])
    gpu_step.profile(lambda: None, found)
    assert found.idle_share == pytest.approx(0.25)
    assert (found.busiest, found.attention) == (["flash_fwd 100%"], ["flash_fwd"])


def test_waits_are_what_torch_warns_of_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what it says of the mode, the first time, nor what else is warned of in a step."""

    def set_mode(mode: Any) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature, synchronizing operations", stacklevel=1)

    def step() -> None:
        for _ in range(2):
            warnings.warn_explicit("called a synchronizing CUDA operation (Triggered ...)", UserWarning, "/a/b/c.py", 7)
        warnings.warn("expandable segments are experimental", stacklevel=1)

    for name, value in (("synchronize", lambda: None), ("get_sync_debug_mode", lambda: 0)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    assert gpu_step.waits_of(step) == {"b/c.py:7": 2}


def test_annotations_are_no_kernels() -> None:
    """torch puts those of an optimizer and of FSDP on the GPU's timeline, across the times between kernels."""
    device = torch.autograd.DeviceType

    def event(start: float, end: float, name: str, on: Any = device.CUDA, is_annotation: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(time_range=span, name=name, device_type=on, is_user_annotation=is_annotation)

    kernels = [event(0, 10, "gemm"), event(60, 70, "adam"), event(120, 130, "adam")]
    others = [
        event(0, 130, "Optimizer.step#AdamW.step", is_annotation=True),
        event(0, 130, "aten::mm", on=device.CPU),
        event(20, 20, "nothing"),
    ]
    assert busy_time(kernels_of([*others, *kernels]))[0] == 30


def test_as_many_layers_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three forecasts where layers take alike, and as many where the first of them take more than the others, as
    those whose products are kept do."""
    arguments = SimpleNamespace(model="mixtral-8x7b", layers=0)
    tried: list[int] = []
    of_kept = 0.0

    def forecast(config: Any, model: Any, gpu: str) -> Any:
        layers = model.num_hidden_layers
        tried.append(layers)
        needed = SimpleNamespace(total=(7 + 21.6 * layers + of_kept * min(layers, 3)) * 2**30)
        return SimpleNamespace(fit=lambda card: needed)

    monkeypatch.setattr(gpu_step, "settings_of", lambda *given, **more: None)
    monkeypatch.setattr(gpu_step, "forecast", forecast)
    monkeypatch.setattr(gpu_step, "sized", lambda given, layers: SimpleNamespace(num_hidden_layers=layers or 32))
    found = {free: gpu_step.layers_that_fit(arguments, free * 2**30)[0] for free in (28.7, 78, 94, 139, 5000)}  # type: ignore[arg-type]
    assert found == {28.7: 1, 78: 3, 94: 4, 139: 6, 5000: 32}
    assert len(tried) == 2 + 4 * 3
    of_kept = 9.0
    assert [gpu_step.layers_that_fit(arguments, free * 2**30).layers for free in (139, 185, 300)] == [4, 6, 12]  # type: ignore[arg-type]
    of_kept = 0.0
    assert "4 would need 93.4" in gpu_step.layers_that_fit(arguments, 78 * 2**30)[1]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one layer needs 28\.6 GiB by forecast, and 20\.0 are free"):
        gpu_step.layers_that_fit(arguments, 20 * 2**30)  # type: ignore[arg-type]


@pytest.mark.parametrize(("layers", "fewer"), [(4, "3"), (1, None)])
def test_a_step_that_runs_out_of_memory_is_measured_with_fewer_layers(
    monkeypatch: pytest.MonkeyPatch, layers: int, fewer: str | None
) -> None:
    """In a process anew, until there are none; the figures say so."""
    begun = []

    def runs_out(arguments: Any) -> Any:
        arguments.layers = layers  # as many as fit by forecast
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.09 GiB")

    def begin(program: str, command: list[str]) -> None:
        begun.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(gpu_step, "measure", runs_out)
    monkeypatch.setattr(os, "execv", begin)
    with pytest.raises((SystemExit, torch.OutOfMemoryError)):
        gpu_step.main(["--model", "mixtral-8x7b", "--json", "m.json"])
    again = [sys.executable, "-m", "benchmarks.gpu_step", "--model", "mixtral-8x7b", "--json", "m.json"]
    assert begun == ([] if fewer is None else [[*again, "--layers", fewer, "--too-large", str(layers)]])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_the_steps_of_full_width_fit_a_card_of_80_gb(model: str) -> None:
    """By our own forecast, of which a card reports 79.1 GiB at the least and has a part given away."""
    command = [sys.executable, "-m", "benchmarks.gpu_step", "--model", model, "--free", "78"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    layers, needed = said.split(": ")[1].split(" layers need ")
    assert int(layers) >= 2
    assert float(needed.split()[0]) <= 78


@pytest.mark.parametrize("name", preflight.CHECKS)
def test_what_the_preflight_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a check raises is one line, and its process ends with 1."""

    def fail(device: str) -> None:
        raise RuntimeError("CUDA error:\n  no kernel image")

    checks: dict[str, Callable[[str], None]] = {name: fail}
    monkeypatch.setattr(preflight, "CHECKS", checks)
    assert preflight.check(name, "cuda") == 1
    assert capsys.readouterr().out == "RuntimeError: CUDA error: no kernel image\n"


def test_the_preflight_imports_what_runs_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pyproject.toml. A package may be there without what it needs itself, or of another version; of GPUs more is
    expected."""
    (tmp_path / "half_there.py").write_text("import no_such_package_either")
    of_half = tmp_path / "half_there-1.0.dist-info"
    of_half.mkdir()
    (of_half / "METADATA").write_text("Metadata-Version: 2.1\nName: half-there\nVersion: 1.0\n")
    (of_half / "top_level.txt").write_text("half_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    needed._packages_of_modules.cache_clear()
    file = tmp_path / "pyproject.toml"
    wanted = ["jinja2", "no-such-package>=3", "half_there", "half-there>=2", "elsewhere; sys_platform == 'win32'"]
    file.write_text(PROJECT.format(dependencies=wanted, gpu=["of-gpus"]))
    monkeypatch.setattr(preflight, "asked", partial(needed.asked, file=file))
    of_both = (
        r"missing: no-such-package, half_there \(No module named 'no_such_package_either'\), "
        r"half-there>=2 \(here is 1\.0\)"
    )
    for device, more in (("cpu", "$"), ("cuda", ", of-gpus")):
        with pytest.raises(preflight.Missing, match=of_both + more):
            preflight._packages(device)
    needed._packages_of_modules.cache_clear()


PROJECT = """
[project]
dependencies = {dependencies}
[project.optional-dependencies]
gpu = {gpu}
images = []
test = []
lint = ["never"]
"""


def test_all_that_the_project_needs_is_asked_for_and_carried(tmp_path: Path) -> None:
    """A dependency that is added to pyproject.toml is in the preflight and among the wheels, with what it needs; of
    torch nothing is. A machine's own packages stay there, unless they are too old."""
    names = {canonicalize_name(requirement.name) for requirement in needed.asked()}
    assert names >= {"torch", "transformers", "plotly", "datasets", "liger-kernel", "pillow", "pytest-xdist", "trl"}
    bare = needed.carried(needed.asked(), {}, "3.12")
    assert names - bare.keys() == {"torch", "triton"}
    assert bare.keys() >= {"narwhals", "dill", "execnet"}, "of plotly, datasets and pytest-xdist"
    assert not [name for name in bare if name.startswith(("nvidia", "torch"))]
    assert needed.carried(needed.asked(), bare, "3.12") == {}
    file = tmp_path / "pyproject.toml"
    file.write_text(PROJECT.format(dependencies=["torch", "plotly>=6"], gpu=["narwhals", "old; python_version < '3'"]))
    added = needed.asked(file=file)
    assert needed.carried(added, {"narwhals": "", "packaging": "", "plotly": "5.24"}, "3.12") == {
        "plotly": bare["plotly"]
    }
    assert needed.carried(added, {"plotly": "6.1"}, "3.12") == {"narwhals": bare["narwhals"]}
    with pytest.raises(ValueError, match="no-such-package>=1 is not installed here"):
        needed.carried([Requirement("no-such-package>=1")], {}, "3.12")


def test_a_machines_packages_as_pip_lists_them(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("Package Version\n------- ---\nPyYAML  6.0\nhuggingface_hub==1.33\n\ntorch\n")
    found = needed.listed(tmp_path / "list")
    assert (found["pyyaml"], found["huggingface-hub"], found["torch"]) == ("6.0", "1.33", "")


def test_more_wheels_than_may_be_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest is named, and what to do; else the exit code is that of the downloads."""
    commands: list[list[str]] = []

    def run(command: list[str], **more: Any) -> Any:
        commands.append(command)
        (tmp_path / "wheels" / f"{command[-1].partition('==')[0].rpartition('/')[2]}.whl").write_bytes(b"0" * 100)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(first_gpu, "asked", lambda: [Requirement("plotly")])
    arguments = ["--prepare", str(tmp_path / "wheels"), "--has", str(tmp_path / "list")]
    (tmp_path / "list").write_text("narwhals 2.0\n")
    assert first_gpu.main(arguments) == 0
    assert commands[0][-1].startswith("plotly==")
    assert "--no-deps" in commands[0]
    assert not [command for command in commands if "narwhals" in command[-1]]
    monkeypatch.setattr(first_gpu, "MOST_CARRIED", 150)
    assert first_gpu.main(arguments) == 1
    assert "has --has all of that machine?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        first_gpu.main(arguments[:2])


@pytest.mark.slow
def test_the_preflight_says_why_ranks_do_not_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one that has failed, for which the other would wait."""
    monkeypatch.setenv("PYTHONPATH", f"{CHECKOUT}{os.pathsep}{CHECKOUT / '.package'}")
    with pytest.raises(preflight.Missing, match=r"two ranks do not exchange over gloo: .*device string: nowhere"):
        preflight._two_ranks("nowhere")


def test_the_preflight_tells_a_wrong_kernel_from_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    preflight._grouped_mm("cpu")
    right = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *given, **more: right(*given, **more) * 1.05)
    with pytest.raises(preflight.Missing, match=r"forward is 0\.05 off"):
        preflight._grouped_mm("cpu")
