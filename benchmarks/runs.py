"""Runs of train_ep.py that a command starts: to their end, or to be watched and killed; and what they leave."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.commands import read_lines

ROOT = Path(__file__).parents[1]
FIGURES = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "target_tokens", "expert_tokens")
"""Of a step, in metrics.jsonl: those that are the same however often the run was killed."""
OF_PREFERENCES = ("rewards/chosen", "rewards/margins", "logps/rejected", "kl")
"""The same, of a run with pairs or labelled answers."""
OUTPUTS = {
    *("adapter", "checkpoints", "config.yaml", "environment.json", "finished.json", "hf"),
    *("metrics.jsonl", "reference.json", "reference.safetensors", "report.html"),
}
CHECKPOINTS = re.compile(r"best|step-\d+")
Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Run:
    """One that has ended: exit code, what it printed, and when it ended, in seconds since the epoch."""

    code: int
    text: str
    ended: float


def words_of(ranks: int, flags: Sequence[str], launch: Sequence[str] = ("--standalone",), *program: str) -> list[str]:
    """The command of a run under torchrun.

    Args:
        launch: more flags of torchrun. program: in the place of train_ep.py.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "--nproc-per-node", str(ranks)]
    return [*command, *(program or ("train_ep.py",)), *flags]


def environment(**more: str) -> dict[str, str]:
    """Of a run's process: as it is here, on one thread unless the user says otherwise."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **offline, **more}


def start(words: Sequence[str], output: Any = subprocess.PIPE, **variables: str) -> Process:
    return subprocess.Popen(
        words, cwd=ROOT, env=environment(**variables), text=True, stdout=output, stderr=subprocess.STDOUT
    )


def trained(ranks: int, flags: Sequence[str], timeout: float = 1800, **variables: str) -> str:
    """What a run printed that ended well; of one rank, without torchrun.

    Raises:
        RuntimeError: it did not; with its last lines.
    """
    words = words_of(ranks, flags) if ranks > 1 else [sys.executable, "train_ep.py", *flags]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=timeout
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-6000:]}")
    return done.stdout


def lines_of(out: Path, key: str = "step") -> list[dict[str, Any]]:
    """Lines of its metrics.jsonl that have this key."""
    lines = read_lines(out / "metrics.jsonl")
    return [line for line in lines if key in line and "warning" not in line]


def last_step(out: Path) -> int:
    """The step logged last; 0 before the first."""
    try:
        return int(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def worker_pids(launcher: int) -> list[int]:
    """The ranks' processes, in order of birth: children of torchrun that run train_ep.py, or it with a fault put in."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    pids = []
    for pid in children.read_text().split() if children.exists() else []:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if "train_ep.py" in command or "benchmarks.inject" in command:
                pids.append(int(pid))
        except OSError:
            continue
    return sorted(pids)


def kill(launcher: Process) -> None:
    """Kill torchrun and its ranks, which would outlive it."""
    for pid in worker_pids(launcher.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.kill()


def wait_for_progress(out: Path, steps: int, process: Process, deadline: float) -> None:
    """Until workers run, have resumed, and have logged so many steps more; or until the run has ended."""
    while process.poll() is None and not worker_pids(process.pid):
        _pause(deadline)
    start = last_step(out)
    while process.poll() is None and last_step(out) < start + steps:
        _pause(deadline)


def wait_until_gone(pids: list[int], deadline: float) -> None:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        _pause(deadline)


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the run makes no progress")
    time.sleep(0.02)


def largest_difference(a: Path, b: Path) -> float:
    """Between any weights of two exported models."""
    tensors_a, tensors_b = (load_file(path / "model.safetensors") for path in (a, b))
    assert tensors_a.keys() == tensors_b.keys()
    return max(float((tensors_a[name] - tensors_b[name]).abs().max()) for name in tensors_a)


def is_complete(metrics: Path, undisturbed: Path) -> bool:
    """Whether one metrics.jsonl has each step of another's once, in order and with the same figures.

    Lines of events are left out: the watch on the routers begins anew when a run resumes, and so may warn at another
    step, or once more.
    """
    steps, expected = (
        [
            {name: record[name] for name in FIGURES} | {name: record.get(name) for name in OF_PREFERENCES}
            for record in read_lines(file)
            if "loss" in record
        ]
        for file in (metrics, undisturbed)
    )
    return steps == expected


def left_behind(out: Path) -> list[str]:
    """What a finished run does not consist of."""
    left = [path.name for path in out.iterdir() if path.name not in OUTPUTS]
    return left + [path.name for path in (out / "checkpoints").iterdir() if not CHECKPOINTS.fullmatch(path.name)]
