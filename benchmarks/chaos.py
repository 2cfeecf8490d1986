"""Kills ranks at random moments and checks that nothing is lost: `python -m benchmarks.chaos --kills 30`.

First a run that nobody disturbs, for its weights. Then the same run, which saves every step, under
`torchrun --max-restarts` with `--resume auto`, while a random rank gets SIGKILL at random moments, during saves
included. After the last kill it is left to finish. Prints each kill (the rank, the step logged last, whether a
checkpoint was being written), the steps made twice, whether metrics.jsonl tells of every step once, with the other
run's figures, and the largest difference between the two runs' weights: 0 on one parallel layout. Exits with 1
where it is not, where the metrics are not complete, or where anything half-written was left behind.
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.demo import make_inputs
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.terminal import ends_with_reader

ROOT = Path(__file__).parents[1]
ROWS = 2_000
"""Of data. To tokenise as many as the demo has would take longer than a run."""
FIGURES = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "target_tokens", "expert_tokens")
"""Of a step, in metrics.jsonl: those that are the same however often the run was killed."""
OF_PREFERENCES = ("rewards/chosen", "rewards/margins", "logps/rejected", "kl")
"""The same, of a run with pairs or labelled answers."""
OUTPUTS = {
    *("adapter", "checkpoints", "config.yaml", "environment.json", "finished.json", "hf"),
    *("metrics.jsonl", "reference.json", "reference.safetensors", "report.html"),
}
CHECKPOINTS = re.compile(r"step-\d+")


@dataclass(frozen=True)
class Kill:
    """A SIGKILL: which rank, the last step it had logged, and whether a checkpoint was half-written at that moment."""

    rank: int
    step: int
    while_saving: bool


@dataclass(frozen=True)
class Run:
    """One that has ended: exit code, what it printed, and when it ended, in seconds since the epoch."""

    code: int
    text: str
    ended: float


@ends_with_reader
def main(argv: list[str] | None = None, run_whole: Callable[[int, list[str]], Run] | None = None) -> int:
    """`run_whole` makes the undisturbed run, on so many ranks with these flags; None: torchrun does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ep-size", type=int, default=2)
    parser.add_argument("--cp-size", type=int, default=1, help="ranks per sequence (context parallelism)")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that divide heads (tensor parallelism)")
    parser.add_argument("--pp-size", type=int, default=1, help="parts that the layers are in (pipelines)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps; a checkpoint is saved after each")
    parser.add_argument(
        "--adapter", choices=("none", "lora"), default="none", help="lora: train adapters, and merge them"
    )
    parser.add_argument("--task", choices=("sft", "dpo", "kto"), default="sft", help="as train_ep.py's")
    parser.add_argument("--model", type=Path, default=None, help="in place of a tiny Mixtral; with a tokenizer")
    parser.add_argument("--flags", default="", help="further flags of train_ep.py: --flags='--packing'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=int, default=3600, help="seconds after which the run counts as hung")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_inputs(directory / "model", directory / "data.jsonl", num_rows=ROWS)
        if arguments.task != "sft":
            write_preferences(directory / "data.jsonl", arguments.task)
        print(
            f"{arguments.ranks} ranks, pp {arguments.pp_size}, ep {arguments.ep_size}, cp {arguments.cp_size}, "
            f"tp {arguments.tp_size}, {arguments.steps} steps, a checkpoint after each, {arguments.kills} kills, "
            f"seed {arguments.seed}",
            flush=True,
        )
        undisturbed = directory / "undisturbed"
        flags = train_flags(directory, undisturbed, arguments, save_steps=0)
        if run_whole is None:
            run = run_by_torchrun(arguments.ranks, flags, arguments.timeout)
        else:
            run = run_whole(arguments.ranks, flags)
        if run.code != 0:
            raise RuntimeError(f"the undisturbed run ended with {run.code}:\n{run.text[-4000:]}")
        disturbed = directory / "disturbed"
        begin = time.perf_counter()
        kills, output = run_and_kill(directory, disturbed, arguments)
        seconds = time.perf_counter() - begin
        difference = largest_difference(undisturbed / "hf", disturbed / "hf")
        figures = report(kills, output, undisturbed, disturbed, difference, seconds)
    if arguments.json is not None:
        with whole(arguments.json) as partial:
            partial.write_text(json.dumps(figures, indent=2))
    is_well = difference == 0 and figures["metrics_complete"] and not figures["left_behind"]
    return 0 if is_well and len(kills) == arguments.kills else 1


def train_flags(directory: Path, out: Path, arguments: argparse.Namespace, save_steps: int) -> list[str]:
    return [
        "--use-cpu", "--model", str(arguments.model or directory / "model"), "--dataset", str(directory / "data.jsonl"),
        "--output-dir", str(out),
        "--pp-size", str(arguments.pp_size), "--ep-size", str(arguments.ep_size), "--cp-size", str(arguments.cp_size),
        "--tp-size", str(arguments.tp_size), "--max-steps", str(arguments.steps),
        "--per-device-train-batch-size", "8", "--gradient-accumulation-steps", "2", "--learning-rate", "1e-3",
        "--save-steps", str(save_steps), "--save-total-limit", "3", "--resume", "auto",
        *(("--adapter", "lora", "--merge") if arguments.adapter == "lora" else ()), "--task", arguments.task,
        *shlex.split(arguments.flags),
    ]  # fmt: skip


def write_preferences(data: Path, task: str) -> None:
    """Put in the place of prompts and responses pairs, whose rejected answer is the response in reverse, or labelled
    answers, every second one in reverse."""
    lines = []
    for number, row in enumerate(map(json.loads, data.read_text().splitlines())):
        answers = (row["response"], row["response"][::-1])
        said = {"chosen": answers[0], "rejected": answers[1]}
        if task == "kto":
            said = {"completion": answers[number % 2], "label": number % 2 == 0}
        lines.append(json.dumps({"prompt": f"{row['prompt']}\n", **said}) + "\n")
    data.write_text("".join(lines))


def launch(ranks: int, flags: list[str], restarts: int = 0) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", str(restarts)]
    return [*command, "--monitor-interval", "0.1", "--nproc-per-node", str(ranks), "train_ep.py", *flags]


def run_by_torchrun(ranks: int, flags: list[str], timeout: float) -> Run:
    done = subprocess.run(
        launch(ranks, flags), cwd=ROOT, timeout=timeout, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Run(done.returncode, done.stdout, time.time())


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run_and_kill(directory: Path, out: Path, arguments: argparse.Namespace) -> tuple[list[Kill], str]:
    """The kills that were made, and what the run printed."""
    rng = random.Random(arguments.seed)
    log = directory / "disturbed.log"
    flags = train_flags(directory, out, arguments, save_steps=1)
    command = launch(arguments.ranks, flags, restarts=arguments.kills + 1)
    kills: list[Kill] = []
    deadline = time.monotonic() + arguments.timeout
    with open(log, "w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=stream, stderr=subprocess.STDOUT)
        try:
            for number in range(arguments.kills):
                # each life lasts until some steps are made, or is cut short in its first moments
                wait_for_progress(out, steps=rng.randint(0, 4), process=process, deadline=deadline)
                time.sleep(rng.random() * 0.5)
                ranks = worker_pids(process.pid)
                if process.poll() is not None or not ranks:
                    break
                rank = rng.randrange(len(ranks))
                saving = any((out / "checkpoints").glob(".step-*"))
                try:
                    os.kill(ranks[rank], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                kills.append(Kill(rank, last_step(out), saving))
                print(
                    f"kill {number + 1}: rank {rank} after step {kills[-1].step}{', saving' if saving else ''}",
                    flush=True,
                )
                wait_until_gone(ranks, deadline)
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
        finally:
            kill(process)
    if process.returncode != 0:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise RuntimeError(f"the disturbed run ended with {process.returncode}")
    return kills, log.read_text()


def wait_for_progress(out: Path, steps: int, process: "subprocess.Popen[bytes]", deadline: float) -> None:
    """Until workers run, have resumed, and have logged so many steps more; or until the run has ended."""
    while process.poll() is None and not worker_pids(process.pid):
        _pause(deadline)
    start = last_step(out)
    while process.poll() is None and last_step(out) < start + steps:
        _pause(deadline)


def _pause(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the run makes no progress")
    time.sleep(0.02)


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


def kill(launcher: "subprocess.Popen[Any]") -> None:
    """Kill torchrun and its ranks, which would outlive it."""
    for pid in worker_pids(launcher.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.kill()


def wait_until_gone(pids: list[int], deadline: float) -> None:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} outlive their peer")
        time.sleep(0.05)


def last_step(out: Path) -> int:
    """The step logged last; 0 before the first."""
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def largest_difference(a: Path, b: Path) -> float:
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
            for record in map(json.loads, file.read_text().splitlines())
            if "loss" in record
        ]
        for file in (metrics, undisturbed)
    )
    return steps == expected


def left_behind(out: Path) -> list[str]:
    """What a finished run does not consist of."""
    left = [path.name for path in out.iterdir() if path.name not in OUTPUTS]
    return left + [path.name for path in (out / "checkpoints").iterdir() if not CHECKPOINTS.fullmatch(path.name)]


def report(
    kills: list[Kill], output: str, undisturbed: Path, out: Path, difference: float, seconds: float
) -> dict[str, object]:
    resumed = [int(step) for step in re.findall(r"resumed from .*, step (\d+)", output)]
    logged = [int(step) for step in re.findall(r"^[\d:]{8}  step (\d+)/", output, re.MULTILINE)]
    figures: dict[str, object] = {
        "kills": len(kills),
        "kills_while_saving": sum(kill.while_saving for kill in kills),
        "resumes": len(resumed),
        "steps_made_twice": len(logged) - len(set(logged)),
        "damaged_or_partial_skipped": output.count("is skipped"),
        "left_behind": left_behind(out),
        "metrics_complete": is_complete(out / "metrics.jsonl", undisturbed / "metrics.jsonl"),
        "largest_weight_difference": difference,
        "seconds": round(seconds, 1),
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):28} {value}")
    return figures


if __name__ == "__main__":
    sys.exit(main())
