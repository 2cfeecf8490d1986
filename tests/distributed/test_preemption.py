"""SIGTERM and SIGUSR1 in every phase of a run: it ends with 75 in a moment, and goes on as if nothing had happened."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from expertmesh.sharding.torchrun import STOPPED
from tests.distributed.whole_runs import (
    ROOT,
    Ended,
    Runs,
    Told,
    assert_same_bits,
    batch_of_12,
    tell,
    tell_with_forecast,
)
from tests.processes import free_ports
from tests.tiers import tiered

PLACES = {
    "loading": "checkpoints.load._all_finite",
    "tokenizing": "training.data.tokenizing.cut_to_length",
    "reference": "training.steps.evaluate.token_loss_sum",
    "teacher": "training.steps.evaluate.token_loss_sum",
    "forecast": "training.planning.rank_memory._asked",
    "evaluation": "training.steps.evaluate.token_loss_sum",
    "generations": "training.steps.generate.boundary",
    "save": "checkpoints.training_state.saving.file_entry",
    "export": "checkpoints.hf.export.brought",
}
"""What each phase calls for each of its parts."""


@contextlib.contextmanager
def watched(phase: str, seen: Callable[[int], object]) -> Iterator[None]:
    """Within it `seen` is called, with how often it was before, before each part of a phase."""
    module, _, name = PLACES[phase].rpartition(".")
    owner = importlib.import_module(f"expertmesh.{module}")
    real, calls = getattr(owner, name), [0]

    def part(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        seen(calls[0] - 1)
        return real(*arguments, **more)

    with mock.patch.object(owner, name, part):
        yield


def tell_stopped_in(argv: list[str], phase: str, part: int, number: int) -> tuple[int, str, str, int]:
    """train_ep.py on this rank, and how many parts of a phase it made; the last rank gets a signal in one of them."""
    made = 0

    def seen(before: int) -> None:
        nonlocal made
        made = before + 1
        if before == part and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), number)

    with watched(phase, seen):
        told = (tell_with_forecast if phase == "forecast" else tell)(argv)
    if dist.is_initialized():  # which the end of a process would have seen to
        dist.destroy_process_group()
    return *told, made


EVALUATING = (
    f"{batch_of_12(2)} --ep-size 2 --max-steps 6 --learning-rate 1e-2 --eval-ratio 0.3 --eval-steps 2 "
    "--per-device-eval-batch-size 2 --generate-steps 2 --generate-max-new-tokens 12 --lr-scheduler-type "
    'reduce_lr_on_plateau --lr-scheduler-kwargs \'{"patience": 0, "threshold": 10}\''
)
"""Each evaluation but the first halves the learning rate at once, or more: it decides what comes next."""


def tell_cut_in(argv: list[str], phase: str, part: int) -> Told:
    """`tell_stopped_in`, which must have stopped this rank behind that very part."""
    code, printed, errors, made = tell_stopped_in(argv, phase, part, signal.SIGTERM)
    assert made == part + 1, f"{made} parts, after a signal in part {part}"
    return code, printed, errors


@pytest.mark.parametrize(
    ("phase", "part", "owed"),
    tiered(
        slow=[
            ("evaluation", 1, ["eval_loss", "generations"]),
            ("evaluation", 0, ["eval_loss", "generations"]),
            ("generations", 3, ["generations"]),
        ],
    ),
)
def test_what_is_cut_between_two_steps_is_made_up(phase: str, part: int, owed: list[str], runs: Runs) -> None:
    """By all ranks at once, nothing of it is told or counted; the run that resumes makes it first, and is to the last
    bit the run that was never cut."""
    whole = runs(2, EVALUATING, "whole")
    ended = runs(2, EVALUATING, code=STOPPED, call=tell_cut_in, given=[phase, part])
    assert ended.saved == [2]
    marker = json.loads((ended.checkpoint(2) / "checkpoint.json").read_text())
    assert marker["owed"] == owed
    assert marker["best"].get("step", 0) == (0 if "eval_loss" in owed else 2)
    assert [key for key in ("eval_loss", "generations") if ended.lines(key)] == [
        key for key in ("eval_loss", "generations") if key not in owed
    ]
    resumed = runs(2, f"{EVALUATING} --resume auto")
    for key in ("eval_loss", "learning_rate", "loss", "generations"):
        assert resumed.values(key) == whole.values(key), key
    assert len(set(resumed.values("learning_rate"))) > 2
    assert_same_bits(resumed.weights, whole.weights)
    assert [run.checkpoint("best").resolve().name for run in (resumed, whole)] == [f"step-{best_of(whole):08d}"] * 2


def best_of(ended: Ended) -> int:
    """The step of the lowest evaluation."""
    return int(min(ended.lines("eval_loss"), key=lambda line: line["eval_loss"])["step"])


def tell_stopped(argv: list[str], phase: str, number: int, cache: Path) -> Told:
    """`tell_stopped_in`, in the second part of a phase, with a cache of samples of its own."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        return tell_stopped_in(argv, phase, 1 if phase != "forecast" else 0, number)[:3]


def tell_in_a_thread(argv: list[str]) -> Told:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(tell, argv).result()


def test_outside_the_main_thread(runs: Runs) -> None:
    """As Ray Train runs it: where there are no signals."""
    assert runs(1, "--max-steps 1", call=tell_in_a_thread).values("step") == [1]


BEFORE = {
    "tokenizing": "--task dpo --per-device-eval-batch-size 100",
    "forecast": "",
    "teacher": "--teacher {model} --per-device-eval-batch-size 4",
    "loading": "",
    "reference": "--task dpo --per-device-eval-batch-size 4",
}


@pytest.mark.parametrize("number", tiered([signal.SIGTERM], slow=[signal.SIGUSR1]))
@pytest.mark.parametrize("phase", BEFORE)
def test_before_the_first_step(phase: str, number: int, runs: Runs, tmp_path: Path) -> None:
    """Nothing is saved, nothing half-made is left to be taken for whole, and the same command then runs to its end."""
    cache = tmp_path / "cache"
    flags = f"{batch_of_12(1)} --max-steps 2 --resume auto {BEFORE[phase].format(model=runs.model)}"
    if phase in ("reference", "tokenizing"):
        pairs = tmp_path / "pairs.jsonl"
        rows = [{"prompt": f"say {i}", "chosen": " yes" * (i % 3 + 1), "rejected": " no"} for i in range(1200)]
        rows = rows if phase == "tokenizing" else rows[:12]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs = replace(runs, data=pairs)
    stopped = runs(1, flags, code=STOPPED, call=tell_stopped, given=[phase, number, cache])
    names = [path.name for path in cache.rglob("*") if path.suffix != ".lock"]
    assert not [name for name in names if "incomplete" in name or name.startswith("tmp")]
    assert "nothing was saved, so it begins anew (exit code 75)" in stopped.printed
    assert not (stopped.out / "checkpoints").exists()
    assert not list(stopped.out.glob("*.safetensors"))
    assert runs(1, flags).codes == [0]


@pytest.mark.parametrize("saves", [True, False])
def test_in_the_export(saves: bool, runs: Runs) -> None:
    """What a checkpoint has too is exported by the next start; what it alone would have is finished."""
    flags = f"{batch_of_12(1)} --max-steps 2 --resume auto" + " --save-steps 0" * (not saves)
    given = ["export", signal.SIGTERM, runs.directory / "cache"]
    ended = runs(1, flags, code=STOPPED if saves else 0, call=tell_stopped, given=given)
    if saves:
        assert "in step 2, the export; --resume auto resumes from step 2 (exit code 75)" in ended.printed
        assert not [path for path in ended.out.iterdir() if "hf" in path.name]
        ended = runs(1, flags)
    assert "already finished at step 2" in runs(1, flags).printed
    assert_same_bits(ended.weights, runs(1, flags, "whole").weights)


IN_A_PROCESS = """
import sys
from expertmesh import train_ep

real, (phase, mark) = train_ep._main, sys.argv[1:3]

def work(argv):
    from tests.distributed.test_preemption import slowed

    with slowed(phase, mark):
        return real(sys.argv[3:])

train_ep._main = work
train_ep.script()
"""


@contextlib.contextmanager
def slowed(phase: str, mark: str) -> Iterator[None]:
    """Within it each part of a phase takes half a second, after a file says that it begins."""

    def seen(before: int) -> None:
        Path(f"{mark}.{os.environ.get('RANK', '0')}").touch()
        time.sleep(0.5)

    with watched(phase, seen):
        yield


def ended(
    processes: Sequence[subprocess.Popen[str]], begun: Path, asked: Callable[[], object]
) -> tuple[list[int], float, str]:
    """Exit codes of processes of which some are asked to stop once a file is there; seconds that took; standard output
    and error of the first."""
    try:
        deadline = time.monotonic() + 200
        while not begun.exists() and time.monotonic() < deadline and all(each.poll() is None for each in processes):
            time.sleep(0.05)
        assert begun.exists(), processes[0].communicate(timeout=5)
        since = time.monotonic()
        asked()
        said = processes[0].communicate(timeout=100)[0]
        codes = [each.wait(100) for each in processes]
        return codes, time.monotonic() - since, said
    finally:
        for each in processes:
            each.kill()


def command_of(phase: str, mark: Path, runs: Runs, more: str) -> list[str]:
    argv = ["--model", runs.model, "--dataset", runs.data, "--output-dir", runs.directory / "run", "--use-cpu"]
    flags = ["--max-steps", "4", *more.split()]
    return ["-c", IN_A_PROCESS, phase, str(mark), *map(str, argv), *flags]


def begin(command: list[str], tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    own = {
        "PYTHONPATH": f"{ROOT / '.package'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "c"),
    }
    variables = {**os.environ, **own, **environment}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=variables
    )


EVALUATES = "--eval-ratio 0.4 --eval-steps 2 --per-device-eval-batch-size 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "number", "saved"), [("evaluation", signal.SIGTERM, [2]), ("loading", signal.SIGUSR1, [])]
)
def test_the_launcher_ends_with_75(phase: str, number: int, saved: list[int], runs: Runs, tmp_path: Path) -> None:
    """Its ranks do so at once, not at the end of an evaluation; torchrun itself passes on no SIGUSR1."""
    launcher = [sys.executable, "-m", "expertmesh.launch", "--standalone", "--nproc-per-node", "2", "--no-python"]
    script = [sys.executable, *command_of(phase, tmp_path / "mark", runs, f"--ep-size 2 {EVALUATES}")]
    process = begin([*launcher, *script], tmp_path)
    codes, seconds, said = ended([process], tmp_path / "mark.0", lambda: process.send_signal(number))
    assert codes == [STOPPED], said
    assert seconds < 8, said
    assert [path.name for path in (tmp_path / "run").glob("checkpoints/step-*")] == [f"step-{n:08d}" for n in saved]
    assert said.count("stopped by a signal") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "asked", "saved"),
    [("tokenizing", 1, []), ("loading", 0, []), ("evaluation", 1, [2])],
)
def test_one_rank_of_several_is_asked(phase: str, asked: int, saved: list[int], runs: Runs, tmp_path: Path) -> None:
    """As srun starts them, without torchrun: whoever is not asked learns of it, be it from the rank with the store."""
    command = [sys.executable, *command_of(phase, tmp_path / "mark", runs, f"--ep-size 2 {EVALUATES}")]
    (port,) = map(str, free_ports(1))
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [begin(command, tmp_path, RANK=rank, LOCAL_RANK=rank, **common) for rank in ("0", "1")]
    codes, seconds, said = ended(ranks, tmp_path / "mark.0", lambda: ranks[asked].send_signal(signal.SIGUSR1))
    assert codes == [STOPPED] * 2, said
    assert seconds < 15, said
    assert [path.name for path in (tmp_path / "run").glob("checkpoints/step-*")] == [f"step-{n:08d}" for n in saved]
    assert said.count("stopped by a signal") == 1


@pytest.mark.slow
def test_processes_that_tokenize_end_with_the_run(runs: Runs, tmp_path: Path) -> None:
    """A signal to all of a job's processes, as clusters send it, ends them too; none is left at work."""
    command = [sys.executable, *command_of("tokenizing", tmp_path / "mark", runs, "--dataset-num-proc 2")]
    process = begin(command, tmp_path, TOKENIZERS_PARALLELISM="false")
    children: list[int] = []

    def ask() -> None:
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        children.extend(map(int, found.split()))
        process.send_signal(signal.SIGTERM)

    codes, seconds, said = ended([process], tmp_path / "mark.0", ask)
    assert codes == [STOPPED], said
    assert seconds < 8
    assert len(children) >= 2
    assert not [child for child in children if is_at_work(child)]


def is_at_work(process: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
