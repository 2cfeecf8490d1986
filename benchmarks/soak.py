"""A long run, monitored: `python -m benchmarks.soak --minutes 120`.

Trains a small model on several ranks with a checkpoint about every minute, written in the background, and every ten
seconds looks at each rank's memory (what is its own, not shared: RssAnon of /proc), open files, threads and listening
ports. At the end it asks the run to stop, as a cluster does, and looks for what is left: processes, files, ports.
Prints the slope of each rank's memory over the time after the first quarter. Linux only.
"""

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import runs
from benchmarks.commands import command, parser_of, print_rows, settings_line, write_json
from benchmarks.demo import make_inputs

SAMPLE_SECONDS = 10.0


@dataclass(frozen=True)
class Sample:
    """One look at all ranks, in their order: seconds since the first look, and for each rank MB of its own memory, open
    files, threads and listening ports; and the files in the output directory."""

    seconds: float
    memory: list[float]
    files: list[int]
    threads: list[int]
    ports: list[int]
    outputs: int


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, ranks=4, ep_size=2, tp_size=1, pp_size=1, json=None)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--save-steps", type=int, default=100, help="choose it so that a save comes about every minute")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        out, temporary = directory / "out", directory / "tmp"
        temporary.mkdir()
        make_inputs(directory / "model", directory / "data.jsonl")
        with (directory / "log").open("w") as log:
            # torchrun leaves an empty directory for logs behind unless told where to put it
            launch = ("--standalone", "--log-dir", str(directory / "logs"))
            words = runs.words_of(arguments.ranks, flags_of(directory, out, arguments), launch)
            launcher = runs.start(words, log, TMPDIR=str(temporary))
            try:
                samples, pids = watch(launcher, out, arguments)
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(timeout=120)
            except (RuntimeError, OSError):  # a rank has ended
                print((directory / "log").read_text()[-3000:], file=sys.stderr)
                raise
            finally:
                runs.kill(launcher)
                launcher.wait()
        said = (directory / "log").read_text()
        left = left_behind(pids, out, temporary)
        saves = sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))
        steps = runs.last_step(out)
    write_json(arguments.json, [vars(sample) for sample in samples])
    if "stopped by a signal" not in said:
        print(said[-3000:], file=sys.stderr)
    report(samples, left, steps, saves, arguments)
    return 0 if not left and "stopped by a signal" in said else 1


def flags_of(directory: Path, out: Path, arguments: argparse.Namespace) -> list[str]:
    # with a pipeline two for each of its stages
    micro_batches = 1 if arguments.pp_size == 1 else 2 * arguments.pp_size
    flags = ["--use-cpu", "--model", str(directory / "model"), "--dataset", str(directory / "data.jsonl")]
    flags += ["--eval-ratio", "0.002", "--eval-steps", str(arguments.save_steps)]
    flags += ["--output-dir", str(out), "--max-steps", "10000000"]
    flags += ["--pp-size", str(arguments.pp_size), "--ep-size", str(arguments.ep_size)]
    flags += ["--tp-size", str(arguments.tp_size), "--gradient-accumulation-steps", str(micro_batches)]
    flags += ["--per-device-train-batch-size", "4", "--learning-rate", "1e-4", "--logging-steps", "10"]
    return [*flags, "--save-steps", str(arguments.save_steps), "--save-total-limit", "3"]


def watch(launcher: runs.Process, out: Path, arguments: argparse.Namespace) -> tuple[list[Sample], list[int]]:
    """Look at the ranks until the time is over; the samples, and the ranks' processes."""
    while runs.last_step(out) == 0:
        if launcher.poll() is not None:
            raise RuntimeError(f"the run ended with {launcher.returncode} before its first step")
        time.sleep(1)
    pids = runs.worker_pids(launcher.pid)
    begin, samples = time.monotonic(), []
    while time.monotonic() < begin + 60 * arguments.minutes:
        if launcher.poll() is not None:
            raise RuntimeError(f"the run ended with {launcher.returncode} after {time.monotonic() - begin:.0f} s")
        samples.append(look(pids, out, time.monotonic() - begin))
        if len(samples) % 60 == 0:
            print(f"{samples[-1].seconds / 60:.0f} min: step {runs.last_step(out)}, {samples[-1]}", flush=True)
        time.sleep(SAMPLE_SECONDS)
    return samples, pids


def look(pids: list[int], out: Path, seconds: float) -> Sample:
    listening = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    }
    memory: list[float] = []
    files, threads, ports = [], [], []
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        own = re.search(r"RssAnon:\s+(\d+)", status)
        if own is None:  # it has ended, and torchrun does not know yet
            raise RuntimeError(f"rank {len(memory)} ended after {seconds:.0f} s")
        memory.append(int(own[1]) / 1e3)
        threads.append(int(re.search(r"Threads:\s+(\d+)", status)[1]))  # type: ignore[index]
        targets = open_files(pid)
        files.append(len(targets))
        ports.append(sum(target[8:-1] in listening for target in targets if target.startswith("socket:")))
    return Sample(round(seconds, 1), memory, files, threads, ports, sum(1 for _ in out.rglob("*")))


def open_files(pid: int) -> list[str]:
    targets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            targets.append(os.readlink(entry))
    return targets


def left_behind(pids: list[int], out: Path, temporary: Path) -> list[str]:
    """What should be gone."""
    left = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    left += [str(path) for path in (out / "checkpoints").iterdir() if not runs.CHECKPOINTS.fullmatch(path.name)]
    return left + [str(path) for path in temporary.iterdir()]


def report(samples: list[Sample], left: list[str], steps: int, saves: list[int], arguments: argparse.Namespace) -> None:
    settled = samples[len(samples) // 4 :]
    seconds = [sample.seconds for sample in settled]
    minutes = samples[-1].seconds / 60
    interval = samples[-1].seconds * arguments.save_steps / steps
    print(
        f"{settings_line(arguments)}; {minutes:.1f} minutes, {steps} steps, "
        f"a save and an evaluation every {interval:.0f} s; checkpoints kept: {saves}"
    )
    rows = []
    for rank in range(arguments.ranks):
        memory = [sample.memory[rank] for sample in settled]
        tenth = max(len(memory) // 10, 1)
        rows.append(
            {
                "rank": rank,
                "own memory, MB:\nat first": f"{samples[0].memory[rank]:.1f}",
                "after a\nquarter": f"{statistics.median(memory[:tenth]):.1f}",
                "at the\nend": f"{statistics.median(memory[-tenth:]):.1f}",
                "MB an hour": f"{3600 * statistics.linear_regression(seconds, memory).slope:+.2f}",
            }
        )
        for name in ("files", "threads", "ports"):
            counts = [getattr(sample, name)[rank] for sample in settled]
            rows[-1][name] = f"{min(counts)}-{max(counts)}"
    print_rows(rows)
    outputs = [sample.outputs for sample in settled]
    print(
        f"files in the output directory: {min(outputs)} to {max(outputs)}; left behind: {', '.join(left) or 'nothing'}"
    )


if __name__ == "__main__":
    sys.exit(main())
