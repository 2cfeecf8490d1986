"""Injects the faults that long runs meet, and compares the outcome with an undisturbed run.

    python -m benchmarks.faults                         # everything, three times each
    python -m benchmarks.faults --faults raise flip     # some
    python -m benchmarks.faults --short                 # once each, two ranks: for CI

Each fault is put into a run of a small model, at a random rank, step or moment. The run must end as it should: with the
right words, not with 0, and without hanging; then the same command resumes with `--resume auto`, and the weights at the
end must be those of the undisturbed run, bitwise where the parallel layout is the same. Prints a table. Exits with 1 if
anything was otherwise. Cutting and slowing a link takes two network namespaces, and a full disk a mount of its own: as
root, on Linux; elsewhere these are left out and named.
"""

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import ROOT, ROWS, Run, environment, kill, largest_difference, last_step, run_and_kill
from benchmarks.demo import make_inputs
from benchmarks.network import Network, can_make_networks
from expertmesh.moe.util.terminal import ends_with_reader

DDP_TIMEOUT = 30
"""Of runs that are to stand still, in seconds."""


class Unexpected(Exception):
    """A run did not end as it should."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one fault. happened: in words. seconds: from the fault to the end of the run; None if it did not end.
    difference: the largest between any weight and the undisturbed run's, after resuming."""

    happened: str
    seconds: float | None
    difference: float


@dataclass
class Bench:
    """What all faults share.

    timeout: seconds after which a run counts as hung.
    run_whole: makes a run without a fault, on so many ranks with these flags; None: torchrun does.
    undisturbed: for each set of flags, where the weights lie of a run that had nothing but them.
    """

    directory: Path
    ranks: int
    steps: int
    rng: random.Random
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    timeout: float = 300
    run_whole: Callable[[int, list[str]], Run] | None = None
    undisturbed: dict[tuple[str, ...], Path] = field(default_factory=dict)

    @property
    def layout(self) -> tuple[int, int, int]:
        return self.cp_size, self.tp_size, self.pp_size

    @property
    def ep_size(self) -> int:
        return max(self.ranks // self.pp_size // 2, 1)

    def some_rank(self) -> int:
        return self.rng.randrange(self.ranks)

    def some_step(self) -> int:
        """A random step, mostly, but not always, after the first checkpoint is complete."""
        return self.rng.randint(3, self.steps - 1)

    def new_output(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.directory)) / "out"

    def flags(self, out: Path, *more: str) -> list[str]:
        return [
            "--use-cpu", "--model", str(self.directory / "model"), "--dataset", str(self.directory / "data.jsonl"),
            "--output-dir", str(out), "--ep-size", str(self.ep_size), "--cp-size", str(self.cp_size),
            "--tp-size", str(self.tp_size), "--pp-size", str(self.pp_size),
            "--gradient-accumulation-steps", str(self.pp_size), "--max-steps", str(self.steps),
            "--per-device-train-batch-size", "4", "--learning-rate", "1e-3", "--save-steps", "2", "--resume", "auto",
            *more,
        ]  # fmt: skip

    def start(
        self, out: Path, *flags: str, fault: tuple[str, int, int] | None = None, launch: tuple[str, ...] = ()
    ) -> "subprocess.Popen[str]":
        """train_ep.py under torchrun, with a fault (its name, a rank, a step) put into it where one is given."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        command += ["--monitor-interval", "0.1", *(launch or ("--standalone",))]
        command += ["train_ep.py"] if fault is None else ["-m", "benchmarks.inject", *map(str, fault)]
        return subprocess.Popen(
            command + self.flags(out, *flags), cwd=ROOT, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, out: Path, *flags: str, fault: tuple[str, int, int] | None = None) -> Run:
        if fault is None and self.run_whole is not None:
            return self.run_whole(self.ranks, self.flags(out, *flags))
        return self.finish(self.start(out, *flags, fault=fault))

    def finish(self, process: "subprocess.Popen[str]") -> Run:
        try:
            text, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired as error:
            kill(process)
            raise Unexpected(f"a run hangs: {process.args!r}") from error
        return Run(process.returncode, text, time.time())

    def wait_for_step(self, out: Path, step: int, process: "subprocess.Popen[str]") -> None:
        deadline = time.monotonic() + self.timeout
        while last_step(out) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                kill(process)
                raise Unexpected(f"no step {step}: {self.finish(process).text[-4000:]}")
            time.sleep(0.02)

    def difference(self, out: Path, *flags: str) -> float:
        """Difference of the weights in `out` from those of the undisturbed run with these flags."""
        if flags not in self.undisturbed:
            self.undisturbed[flags] = self.new_output()
            expect(self.run(self.undisturbed[flags], *flags), 0)
        return largest_difference(self.undisturbed[flags] / "hf", out / "hf")

    def go_on(self, out: Path, *flags: str) -> float:
        """The same command again; the difference at its end."""
        expect(self.run(out, *flags), 0)
        return self.difference(out, *flags)


def expect(run: Run, code: int | None, *words: str) -> Run:
    """
    Raises:
        Unexpected: the exit code is another (None: is 0), or words are missing from what the run printed.
    """
    if (run.code == 0) if code is None else (run.code != code):
        raise Unexpected(f"exit code {run.code}, not {'another than 0' if code is None else code}:\n{run.text[-4000:]}")
    for word in words:
        if word not in run.text:
            raise Unexpected(f"{word!r} is not among what was printed:\n{run.text[-6000:]}")
    return run


def seconds_since_fault(run: Run) -> float:
    # of one write, but perhaps between those of another rank's line
    (when,) = re.findall(r"inject: \w+ on rank \d+ in step \d+ at (\d+\.\d{3})", run.text)
    return run.ended - float(when)


# The faults


def raises(bench: Bench) -> Outcome:
    """An error in the code of one rank."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = expect(bench.run(out, fault=("raise", rank, step)), None, f"rank {rank} failed in step {step}")
    errors = re.findall(r"^rank (\d+) ", run.text, re.MULTILINE)
    root = run.text.partition("Root Cause")[2]
    if errors != [str(rank)] or "made up by benchmarks.inject" not in root:
        raise Unexpected(f"not rank {rank}'s error alone and as root cause:\n{run.text[-6000:]}")
    return Outcome("its error is shown first and alone", seconds_since_fault(run), bench.go_on(out))


def dies(bench: Bench) -> Outcome:
    """One rank is killed (SIGKILL), as when memory runs out."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = expect(bench.run(out, fault=("die", rank, step)), None, "no other rank printed an error above")
    root = run.text.partition("Root Cause")[2]
    if f"rank      : {rank} " not in root or "SIGKILL" not in root:
        raise Unexpected(f"torchrun does not name rank {rank}:\n{run.text[-4000:]}")
    return Outcome("the others say that they lost it, torchrun which one", seconds_since_fault(run), bench.go_on(out))


def dies_again_and_again(bench: Bench) -> Outcome:
    """Ranks are killed at random moments, during saves included, under --max-restarts."""
    arguments = argparse.Namespace(
        ranks=bench.ranks, ep_size=bench.ep_size, cp_size=bench.cp_size, tp_size=bench.tp_size,
        pp_size=bench.pp_size, adapter="none", steps=60, seed=bench.rng.random(), kills=5, timeout=4 * bench.timeout,
    )  # fmt: skip
    out, whole = bench.new_output(), bench.new_output()
    kills, _ = run_and_kill(bench.directory, out, arguments)
    if len(kills) != arguments.kills:
        raise Unexpected(f"{len(kills)} kills, not {arguments.kills}")
    arguments.kills = 0
    run_and_kill(bench.directory, whole, arguments)
    return Outcome(
        f"{len(kills)} kills, it resumes by itself each time", None, largest_difference(whole / "hf", out / "hf")
    )


def stands_still(bench: Bench) -> Outcome:
    """One rank hangs in a layer's forward."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = bench.run(out, "--ddp-timeout", str(DDP_TIMEOUT), fault=("stand-still", rank, step))
    every_rank = [f"rank {r} has made no progress" for r in range(bench.ranks)]
    expect(run, None, *every_rank)
    told = (out / "stuck" / f"rank-{rank:05d}.txt").read_text()
    if not re.match(rf"rank {rank}: step {step}, .*forward of layer \d", told) or "in sleep" not in told:
        raise Unexpected(f"rank {rank} did not report where it hangs:\n{told}")
    return Outcome(
        f"every rank reports where it hangs, --ddp-timeout {DDP_TIMEOUT}", seconds_since_fault(run), bench.go_on(out)
    )


def dies_while_sending(bench: Bench) -> Outcome:
    """One rank is killed as it begins to send to another stage."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = expect(bench.run(out, fault=("die-sending", rank, step)), None, "no other rank printed an error above")
    if not re.search(rf"^rank \d+ lost the connection .* step {step}, stage \d of \d, ", run.text, re.MULTILINE):
        raise Unexpected(f"no other rank tells its stage:\n{run.text[-6000:]}")
    return Outcome("the others say in which stage they lost it", seconds_since_fault(run), bench.go_on(out))


def hangs_while_receiving(bench: Bench) -> Outcome:
    """One rank hangs while it waits for what another stage sends."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = bench.run(out, "--ddp-timeout", str(DDP_TIMEOUT), fault=("hang-receiving", rank, step))
    stage = rank // (bench.ranks // bench.pp_size) + 1
    expect(run, None, *(f"rank {r} has made no progress" for r in range(bench.ranks)))
    told = (out / "stuck" / f"rank-{rank:05d}.txt").read_text()
    where = rf"rank {rank}: step {step}, stage {stage} of {bench.pp_size}, \w+ of micro-batch \d+, (wait|send)ing"
    if not re.match(where, told) or "in sleep" not in told:
        raise Unexpected(f"rank {rank} did not report where it hangs:\n{told}")
    return Outcome(
        f"every rank reports where it hangs, the stage included, --ddp-timeout {DDP_TIMEOUT}",
        seconds_since_fault(run),
        bench.go_on(out),
    )


def freezes(bench: Bench) -> Outcome:
    """One rank's process is stopped (SIGSTOP), its connections stay open, --ddp-timeout 1800."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = expect(bench.run(out, fault=("freeze", rank, step)), None, f"lost rank {rank}: no heartbeat")
    # torchrun takes another 30 s until it kills what does not react to being asked to end
    return Outcome("another rank misses it and ends the run", seconds_since_fault(run), bench.go_on(out))


def poisons(bench: Bench) -> Outcome:
    """A gradient becomes NaN, --on-nonfinite stop --detect-anomaly."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = bench.run(out, "--detect-anomaly", fault=("poison", rank, step))
    expect(run, None, "first non-finite tensor", f"on rank {rank}")
    return Outcome(
        "all ranks stop before the optimizer step, the tensor is named", seconds_since_fault(run), bench.go_on(out)
    )


def poisons_one_step(bench: Bench) -> Outcome:
    """The same, --on-nonfinite skip. The undisturbed run has it too: it must skip the same step, to the same end."""
    step = bench.some_step()
    weights = []
    for rank in (bench.some_rank(), bench.some_rank()):
        weights.append(bench.new_output())
        run = bench.run(weights[-1], "--on-nonfinite", "skip", fault=("poison", rank, step))
        expect(run, 0, f"step {step} is skipped")
        lines = [json.loads(line) for line in (weights[-1] / "metrics.jsonl").read_text().splitlines()]
        if [line["step"] for line in lines if line.get("skipped_steps")] != [step]:
            raise Unexpected(f"not step {step} alone was skipped")
    return Outcome("the step is skipped, the run continues", None, largest_difference(*(w / "hf" for w in weights)))


def flips(bench: Bench) -> Outcome:
    """One bit of one weight flips on one rank, --dense-shard hybrid --check-replicas 1."""
    out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
    run = bench.run(out, "--dense-shard", "hybrid", "--check-replicas", "1", fault=("flip", rank, step))
    expect(run, None, "q_proj.weight", "--check-replicas")
    flags = ("--dense-shard", "hybrid", "--check-replicas", "1")
    return Outcome("all ranks stop, the parameter is named", seconds_since_fault(run), bench.go_on(out, *flags))


def is_asked_to_stop(bench: Bench) -> Outcome:
    """SIGTERM, as a cluster sends before it takes a node away."""
    out = bench.new_output()
    process = bench.start(out)
    bench.wait_for_step(out, bench.rng.randint(1, bench.steps - 3), process)
    asked = time.time()
    process.send_signal(signal.SIGTERM)
    run = expect(bench.finish(process), None, "stopped by a signal")
    return Outcome("it finishes the step, saves, and ends", run.ended - asked, bench.go_on(out))


def is_asked_to_stop_in_an_evaluation(bench: Bench) -> Outcome:
    """SIGTERM in an evaluation that would take minutes."""
    out, held_out, step = bench.new_output(), bench.directory / "held-out.jsonl", bench.rng.randint(1, bench.steps - 3)
    held_out.write_text(20 * (bench.directory / "data.jsonl").read_text())
    evaluates = ("--eval-dataset", str(held_out), "--per-device-eval-batch-size", "1", "--eval-steps", str(step))
    process = bench.start(out, *evaluates)
    bench.wait_for_step(out, step, process)
    time.sleep(bench.rng.random())
    asked = time.time()
    process.send_signal(signal.SIGTERM)
    run = expect(bench.finish(process), None, "stopped by a signal")
    if "eval_loss" in (out / "metrics.jsonl").read_text():
        raise Unexpected("the evaluation came to its end")
    return Outcome("it is cut within a batch, a checkpoint saved", run.ended - asked, bench.go_on(out))


def damages_a_checkpoint(bench: Bench) -> Outcome:
    """A byte of the newest checkpoint changes on the disk, while the run is down."""
    out = bench.new_output()
    expect(bench.run(out), 0)
    (newest,) = (out / "checkpoints").glob(f"step-*{bench.steps}")
    file = bench.rng.choice(sorted(path for path in (newest / "state").iterdir()))
    content = bytearray(file.read_bytes())
    content[bench.rng.randrange(len(content))] ^= 1 << bench.rng.randrange(8)
    file.write_bytes(content)
    expect(bench.run(out), 0, "is damaged", "it is skipped, and the one before it used", f"step {bench.steps - 2}\n")
    return Outcome("it is named, the one before it is taken", None, bench.difference(out))


def loses_its_output(bench: Bench) -> Outcome:
    """The output directory is deleted while the run writes to it."""
    out = bench.new_output()
    run = expect(bench.run(out, fault=("lose-output", 0, bench.some_step())), None, "--output-dir")
    # torch makes whatever directory it is to write to: that of a checkpoint which was under way just then
    if any(path.name != "checkpoints" for path in (out.iterdir() if out.exists() else ())):
        raise Unexpected(f"{out} was made anew: {sorted(out.iterdir())}")
    shutil.rmtree(out, ignore_errors=True)
    out.with_name("elsewhere").rename(out)
    return Outcome("one error names it", seconds_since_fault(run), bench.go_on(out))


def fills_the_disk(bench: Bench) -> Outcome:
    """No room for another checkpoint."""
    out = bench.new_output()
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(out)], check=True)
    try:
        expect(bench.run(out), None, "MB free", "--on-save-error continue")
        subprocess.run(["mount", "-o", "remount,size=500m", str(out)], check=True)
        return Outcome("it stops and says so; earlier checkpoints stay complete", None, bench.go_on(out))
    finally:
        subprocess.run(["umount", str(out)], check=True)


def loses_a_node(bench: Bench) -> Outcome:
    """One of two nodes is gone for good: torchrun --nnodes 1:2 --max-restarts 3, --elastic."""
    out = bench.new_output()
    node = Bench(bench.directory, bench.ranks // 2, bench.steps, bench.rng, *bench.layout)
    flags = ("--elastic", "--ep-size", str(bench.ep_size))
    rendezvous = (
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29533", "--rdzv-id", str(bench.rng.random()),
        "--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1",
    )  # fmt: skip
    nodes = [node.start(out, *flags, launch=rendezvous)]
    time.sleep(2)  # the first to come holds the store, and is the one that stays
    nodes.append(node.start(out, *flags, launch=rendezvous))
    bench.wait_for_step(out, bench.rng.randint(5, bench.steps - 2), nodes[0])
    kill(nodes[1])
    bench.finish(nodes[1])
    run = expect(bench.finish(nodes[0]), 0, "resumed from", f"elastic: {bench.ranks // 2} ranks")
    if f"{bench.ranks} ranks: {'dp' if bench.pp_size == 1 else 'pp'} " not in run.text:
        raise Unexpected("it did not begin on both nodes")
    # before and after on different parallel layouts
    return Outcome("it resumes on the remaining node, with the same global batch", None, bench.difference(out))


def cuts_the_link(bench: Bench) -> Outcome:
    """The link between two nodes goes down; no packet, no reset comes through."""
    out = bench.new_output()
    with Network() as network:
        nodes = start_nodes(bench, network, out, "--ddp-timeout", str(DDP_TIMEOUT))
        bench.wait_for_step(out, bench.rng.randint(3, bench.steps - 2), nodes[0])
        cut = time.time()
        network.cut()
        runs = [expect(bench.finish(node), None) for node in nodes]
    for run in runs:
        if not re.search(r"has made no progress|waiting for the checkpoint, lost rank \d+: no ", run.text):
            raise Unexpected(f"a rank does not tell where it hangs:\n{run.text[-6000:]}")
    return Outcome(
        f"every rank reports where it hangs, --ddp-timeout {DDP_TIMEOUT}",
        max(run.ended for run in runs) - cut,
        bench.go_on(out),
    )


def slows_the_link(bench: Bench) -> Outcome:
    """The link between two nodes falls to 4 Mbit/s."""
    out = bench.new_output()
    with Network() as network:
        nodes = start_nodes(bench, network, out, "--ddp-timeout", "60")
        bench.wait_for_step(out, 3, nodes[0])
        network.slow(megabits=4)
        for node in nodes:
            expect(bench.finish(node), 0)
    return Outcome("it continues, slower", None, bench.difference(out))


def start_nodes(bench: Bench, network: Network, out: Path, *flags: str) -> list["subprocess.Popen[str]"]:
    """Half of the ranks on each of two nodes."""
    command = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(bench.ranks // 2)]
    command += ["--master-addr", network.address, "--master-port", "29534", "--monitor-interval", "0.1"]
    nodes = []
    for number in range(2):
        rank = [sys.executable, "-m", *command, "--node-rank", str(number), "train_ep.py", *bench.flags(out, *flags)]
        variables = {**environment(), "GLOO_SOCKET_IFNAME": network.interface(number)}
        nodes.append(
            subprocess.Popen(
                network.inside(number, rank), cwd=ROOT, env=variables, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    return nodes


@dataclass(frozen=True)
class Fault:
    """exact: whether it resumes on the same parallel layout, and must give the same bits. of_pipelines: with --pp-size
    alone. is_possible: here."""

    inject: Callable[[Bench], Outcome]
    exact: bool = True
    in_short: bool = False
    of_pipelines: bool = False
    is_possible: Callable[[], bool] = lambda: True

    @property
    def what(self) -> str:
        return " ".join((self.inject.__doc__ or "").split()).partition(" The undisturbed")[0]


FAULTS = {
    "raise": Fault(raises, in_short=True),
    "die": Fault(dies),
    "die-again": Fault(dies_again_and_again),
    "stand-still": Fault(stands_still, in_short=True),
    "die-sending": Fault(dies_while_sending, in_short=True, of_pipelines=True),
    "hang-receiving": Fault(hangs_while_receiving, in_short=True, of_pipelines=True),
    "freeze": Fault(freezes),
    "nan-stop": Fault(poisons),
    "nan-skip": Fault(poisons_one_step),
    "bit-flip": Fault(flips),
    "sigterm": Fault(is_asked_to_stop),
    "sigterm-evaluation": Fault(is_asked_to_stop_in_an_evaluation),
    "damage": Fault(damages_a_checkpoint),
    "output-gone": Fault(loses_its_output, in_short=True),
    "disk-full": Fault(fills_the_disk, is_possible=can_make_networks),
    "node-lost": Fault(loses_a_node, exact=False),
    "link-cut": Fault(cuts_the_link, is_possible=can_make_networks),
    "link-slow": Fault(slows_the_link, is_possible=can_make_networks),
}

ROUNDING = 1e-4
"""How far a weight may be off where a part of the run was made on another arrangement, in fp32: the model's are about
0.02 to 1, and AdamW's first steps follow the sign of a gradient, however small."""


@ends_with_reader
def main(argv: list[str] | None = None, run_whole: Callable[[int, list[str]], Run] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=None, metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cp-size", type=int, default=1, help="ranks per sequence (context parallelism)")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that divide heads (tensor parallelism)")
    parser.add_argument("--pp-size", type=int, default=1, help="parts that the layers are in (pipelines)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a run counts as hung")
    parser.add_argument("--short", action="store_true", help="a selection of faults, once each, on two ranks")
    arguments = parser.parse_args(argv)
    possible = {name: fault for name, fault in FAULTS.items() if arguments.pp_size > 1 or not fault.of_pipelines}
    if arguments.faults and (without := [name for name in arguments.faults if name not in possible]):
        parser.error(f"--faults {' '.join(without)}: happen in pipelines alone; give --pp-size 2")
    names = arguments.faults or [name for name, fault in possible.items() if fault.in_short or not arguments.short]
    if arguments.short:
        arguments.times, arguments.ranks, arguments.steps = 1, 2, 6
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        rng = random.Random(arguments.seed)
        layout = (arguments.cp_size, arguments.tp_size, arguments.pp_size)
        bench = Bench(Path(directory), arguments.ranks, arguments.steps, rng, *layout, arguments.timeout, run_whole)
        make_inputs(bench.directory / "model", bench.directory / "data.jsonl", num_rows=ROWS)
        print(
            f"{bench.ranks} ranks, pp {bench.pp_size}, ep {bench.ep_size}, cp {bench.cp_size}, tp {bench.tp_size}, "
            f"{bench.steps} steps, a checkpoint every 2, seed {arguments.seed}"
        )
        results = [inject_and_check(FAULTS[name], arguments.times, bench) for name in names]
    return 0 if all(results) else 1


def inject_and_check(fault: Fault, times: int, bench: Bench) -> bool:
    """Inject a fault so many times and print its row of the table; whether all went as it should."""
    if not fault.is_possible():
        print(f"| {fault.what} | 0 | not possible here: needs root and network namespaces | | |", flush=True)
        return True
    outcomes = []
    for number in range(times):
        try:
            outcomes.append(fault.inject(bench))
        except (Unexpected, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"| {fault.what} | {number + 1} | NOT AS IT SHOULD: {error} | | |", flush=True)
            return False
    took = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    difference = max(outcome.difference for outcome in outcomes)
    ended = f"{min(took):.0f} to {max(took):.0f} s" if took else ""
    print(f"| {fault.what} | {times} | {outcomes[-1].happened} | {ended} | {difference:.1e} |", flush=True)
    return difference <= (0 if fault.exact else ROUNDING)


if __name__ == "__main__":
    sys.exit(main())
