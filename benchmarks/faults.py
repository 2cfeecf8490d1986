"""Injects the faults that long runs meet, and compares the outcome with an undisturbed run.

    python -m benchmarks.faults                         # everything, three times each
    python -m benchmarks.faults --faults raise flip     # some
    python -m benchmarks.faults --short                 # once each, two ranks: for CI
    python -m benchmarks.faults --faults die-again --kills 30 --steps 200 --times 1 --flags="--adapter lora --merge"

Each fault is put into a run of a small model, at a random rank, step or moment. The run must end as it should: with the
right words, not with 0, and without hanging; then the same command resumes with `--resume auto`, and the weights at the
end must be those of the undisturbed run, bitwise where the parallel layout is the same. Prints a table. Exits with 1 if
anything was otherwise. Cutting and slowing a link takes two network namespaces, and a full disk a mount of its own: as
root, on Linux; elsewhere these are left out and named.

Ranks that are killed again and again, at moments that a seed has drawn, while the run saves every step, must leave a
metrics.jsonl that tells of every step once, with the undisturbed run's figures, and nothing half-written.
"""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks import runs
from benchmarks.commands import command, parser_of, read_lines, settings_line, write_lines
from benchmarks.demo import make_inputs
from benchmarks.network import Network, can_make_networks
from benchmarks.runs import Process, Run, largest_difference

ROWS = 2_000
"""Of data. To tokenise as many as the demo has would take longer than a run."""
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

    given: flags of train_ep.py, of every run.
    timeout: seconds after which a run counts as hung.
    run_whole: makes a run without a fault, on so many ranks with these flags; None: torchrun does.
    undisturbed: for each set of flags, where the weights lie of a run that had nothing but them.
    """

    directory: Path
    ranks: int
    steps: int
    rng: random.Random
    ep_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    given: tuple[str, ...] = ()
    kills: int = 5
    timeout: float = 300
    run_whole: Callable[[int, list[str]], Run] | None = None
    undisturbed: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def some_rank(self) -> int:
        return self.rng.randrange(self.ranks)

    def some_step(self) -> int:
        """A random step, mostly, but not always, after the first checkpoint is complete."""
        return self.rng.randint(3, self.steps - 1)

    def new_output(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.directory)) / "out"

    def flags(self, out: Path, *more: str, save_steps: int = 2) -> list[str]:
        sizes = {f"--{axis}-size": getattr(self, f"{axis}_size") for axis in ("ep", "cp", "tp", "pp")}
        flags = ["--use-cpu", "--dataset", str(self.directory / "data.jsonl"), "--output-dir", str(out)]
        flags += [word for name, size in sizes.items() for word in (name, str(size))]
        flags += ["--gradient-accumulation-steps", str(self.pp_size), "--max-steps", str(self.steps)]
        flags += ["--per-device-train-batch-size", "4", "--learning-rate", "1e-3", "--save-steps", str(save_steps)]
        flags += [] if "--model" in self.given else ["--model", str(self.directory / "model")]
        return [*flags, "--resume", "auto", *self.given, *more]

    def start(
        self,
        out: Path,
        *flags: str,
        fault: tuple[str, int, int] | None = None,
        launch: tuple[str, ...] = ("--standalone",),
    ) -> Process:
        """train_ep.py under torchrun, with a fault (its name, a rank, a step) put into it where one is given."""
        program = () if fault is None else ("-m", "benchmarks.inject", *map(str, fault))
        launch = ("--monitor-interval", "0.1", *launch)
        return runs.start(runs.words_of(self.ranks, self.flags(out, *flags), launch, *program))

    def run(self, out: Path, *flags: str, fault: tuple[str, int, int] | None = None) -> Run:
        if fault is None and self.run_whole is not None:
            return self.run_whole(self.ranks, self.flags(out, *flags))
        return self.finish(self.start(out, *flags, fault=fault))

    def finish(self, process: Process) -> Run:
        try:
            text, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired as error:
            runs.kill(process)
            raise Unexpected(f"a run hangs: {process.args!r}") from error
        return Run(process.returncode, text, time.time())

    def wait_for_step(self, out: Path, step: int, process: Process) -> None:
        deadline = time.monotonic() + self.timeout
        while runs.last_step(out) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                runs.kill(process)
                raise Unexpected(f"no step {step}: {self.finish(process).text[-4000:]}")
            time.sleep(0.02)

    def alone(self, *flags: str) -> Path:
        """The output of the undisturbed run with these flags."""
        if flags not in self.undisturbed:
            self.undisturbed[flags] = self.new_output()
            expect(self.run(self.undisturbed[flags], *flags), 0)
        return self.undisturbed[flags]

    def difference(self, out: Path, *flags: str) -> float:
        """Difference of the weights in `out` from those of the undisturbed run with these flags."""
        return largest_difference(self.alone(*flags) / "hf", out / "hf")

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


@dataclass(frozen=True)
class Fault:
    """exact: whether it resumes on the same parallel layout, and must give the same bits. of_pipelines: with --pp-size
    alone. is_possible: here."""

    what: str
    inject: Callable[[Bench], Outcome]
    exact: bool = True
    in_short: bool = False
    of_pipelines: bool = False
    is_possible: Callable[[], bool] = lambda: True


# Faults in a step


@dataclass(frozen=True)
class InStep:
    """A fault of `benchmarks.inject`, which ends the run.

    Attributes:
        happened: then, in words.
        says: patterns of what is printed; {rank}, {step}, {stage} and {stages} are those of the fault.
        stuck: a pattern of the file in which the rank reports where it hangs, as every rank says that it does.
        is_alone: whether no other rank prints an error.
        flags: of that run; kept: of these, those with which it resumes.
    """

    name: str
    happened: str
    says: tuple[str, ...] = ()
    stuck: str = ""
    is_alone: bool = False
    flags: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __call__(self, bench: Bench) -> Outcome:
        out, rank, step = bench.new_output(), bench.some_rank(), bench.some_step()
        stage = rank // (bench.ranks // bench.pp_size) + 1
        run = expect(bench.run(out, *self.flags, fault=(self.name, rank, step)), None)
        says = [*self.says, *(rf"rank {r} has made no progress" for r in range(bench.ranks) if self.stuck)]
        for pattern in says:
            pattern = pattern.format(rank=rank, step=step, stage=stage, stages=bench.pp_size)
            if not re.search(pattern, run.text, re.MULTILINE):
                raise Unexpected(f"{pattern!r} is not among what was printed:\n{run.text[-6000:]}")
        if self.is_alone and re.findall(r"^rank (\d+) ", run.text, re.MULTILINE) != [str(rank)]:
            raise Unexpected(f"not rank {rank}'s error alone:\n{run.text[-6000:]}")
        if self.stuck:
            told = (out / "stuck" / f"rank-{rank:05d}.txt").read_text()
            where = self.stuck.format(rank=rank, step=step, stage=stage, stages=bench.pp_size)
            if not re.match(where, told) or "in sleep" not in told:
                raise Unexpected(f"rank {rank} did not report where it hangs:\n{told}")
        return Outcome(self.happened, seconds_since_fault(run), bench.go_on(out, *self.kept))


HANGS = ("--ddp-timeout", str(DDP_TIMEOUT))
CHECKED = ("--dense-shard", "hybrid", "--check-replicas", "1")
LOST = "no other rank printed an error above"


# Faults at some moment


def dies_again_and_again(bench: Bench) -> Outcome:
    bench = replace(bench, steps=max(bench.steps, 12 * bench.kills), timeout=4 * bench.timeout, undisturbed={})
    out = bench.new_output()
    undisturbed, kills = bench.alone(), run_and_kill(bench, out)
    if kills != bench.kills:
        raise Unexpected(f"{kills} kills, not {bench.kills}")
    if not runs.is_complete(out / "metrics.jsonl", undisturbed / "metrics.jsonl"):
        raise Unexpected("metrics.jsonl does not tell of every step once, as the undisturbed run's does")
    if left := runs.left_behind(out):
        raise Unexpected(f"left behind: {', '.join(left)}")
    return Outcome(f"{kills} kills, it resumes by itself each time", None, bench.difference(out))


def run_and_kill(bench: Bench, out: Path) -> int:
    """How many kills were made of a run that saves every step."""
    launch = ("--standalone", "--max-restarts", str(bench.kills + 1), "--monitor-interval", "0.1")
    words = runs.words_of(bench.ranks, bench.flags(out, save_steps=1), launch)
    log, rng, made = out.with_name("log"), bench.rng, 0
    deadline = time.monotonic() + bench.timeout
    with log.open("w") as stream:
        process = runs.start(words, stream)
        try:
            while made < bench.kills:
                # each life lasts until some steps are made, or is cut short in its first moments
                runs.wait_for_progress(out, rng.randint(0, 4), process, deadline)
                time.sleep(rng.random() * 0.5)
                ranks = runs.worker_pids(process.pid)
                if process.poll() is not None or not ranks:
                    break
                rank = rng.randrange(len(ranks))
                is_saving = any((out / "checkpoints").glob(".step-*"))
                try:
                    os.kill(ranks[rank], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                made += 1
                when = f"after step {runs.last_step(out)}{', saving' if is_saving else ''}"
                print(f"kill {made}: rank {rank} {when}", file=sys.stderr, flush=True)
                runs.wait_until_gone(ranks, deadline)
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
        finally:
            runs.kill(process)
    expect(Run(process.returncode, log.read_text(), time.time()), 0)
    return made


def poisons_one_step(bench: Bench) -> Outcome:
    """The undisturbed run has it too: it must skip the same step, to the same end."""
    step = bench.some_step()
    weights = []
    for rank in (bench.some_rank(), bench.some_rank()):
        weights.append(bench.new_output())
        run = bench.run(weights[-1], "--on-nonfinite", "skip", fault=("poison", rank, step))
        expect(run, 0, f"step {step} is skipped")
        if [line["step"] for line in runs.lines_of(weights[-1]) if line.get("skipped_steps")] != [step]:
            raise Unexpected(f"not step {step} alone was skipped")
    return Outcome("the step is skipped, the run continues", None, largest_difference(*(w / "hf" for w in weights)))


def is_asked_to_stop(bench: Bench, in_evaluation: bool = False) -> Outcome:
    out, held_out, step = bench.new_output(), bench.directory / "held-out.jsonl", bench.rng.randint(1, bench.steps - 3)
    held_out.write_text(20 * (bench.directory / "data.jsonl").read_text())
    flags = ("--eval-dataset", str(held_out), "--per-device-eval-batch-size", "1", "--eval-steps", str(step))
    process = bench.start(out, *(flags if in_evaluation else ()))
    bench.wait_for_step(out, step, process)
    time.sleep(bench.rng.random() if in_evaluation else 0.0)
    asked = time.time()
    process.send_signal(signal.SIGTERM)
    run = expect(bench.finish(process), None, "stopped by a signal")
    if "eval_loss" in (out / "metrics.jsonl").read_text():
        raise Unexpected("the evaluation came to its end")
    happened = (
        "it is cut within a batch, a checkpoint saved" if in_evaluation else "it finishes the step, saves, and ends"
    )
    return Outcome(happened, run.ended - asked, bench.go_on(out))


def damages_a_checkpoint(bench: Bench) -> Outcome:
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
    out = bench.new_output()
    run = expect(bench.run(out, fault=("lose-output", 0, bench.some_step())), None, "--output-dir")
    # torch makes whatever directory it is to write to: that of a checkpoint which was under way just then
    if any(path.name != "checkpoints" for path in (out.iterdir() if out.exists() else ())):
        raise Unexpected(f"{out} was made anew: {sorted(out.iterdir())}")
    shutil.rmtree(out, ignore_errors=True)
    out.with_name("elsewhere").rename(out)
    return Outcome("one error names it", seconds_since_fault(run), bench.go_on(out))


def fills_the_disk(bench: Bench) -> Outcome:
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
    out = bench.new_output()
    # each has a half of the ranks, and the layout of all
    node = replace(bench, ranks=bench.ranks // 2)
    rendezvous = (
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29533", "--rdzv-id", str(bench.rng.random()),
        "--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1",
    )  # fmt: skip
    nodes = [node.start(out, "--elastic", launch=rendezvous)]
    time.sleep(2)  # the first to come holds the store, and is the one that stays
    nodes.append(node.start(out, "--elastic", launch=rendezvous))
    bench.wait_for_step(out, bench.rng.randint(5, bench.steps - 2), nodes[0])
    runs.kill(nodes[1])
    bench.finish(nodes[1])
    run = expect(bench.finish(nodes[0]), 0, "resumed from", f"elastic: {bench.ranks // 2} ranks")
    if f"{bench.ranks} ranks: {'dp' if bench.pp_size == 1 else 'pp'} " not in run.text:
        raise Unexpected("it did not begin on both nodes")
    # before and after on different parallel layouts
    return Outcome("it resumes on the remaining node, with the same global batch", None, bench.difference(out))


def cuts_the_link(bench: Bench) -> Outcome:
    out = bench.new_output()
    with Network() as network:
        nodes = network.start(bench.ranks, bench.flags(out, *HANGS))
        bench.wait_for_step(out, bench.rng.randint(3, bench.steps - 2), nodes[0])
        cut = time.time()
        network.cut()
        runs = [expect(bench.finish(node), None) for node in nodes]
    for run in runs:
        if not re.search(r"has made no progress|waiting for the checkpoint, lost rank \d+: no ", run.text):
            raise Unexpected(f"a rank does not tell where it hangs:\n{run.text[-6000:]}")
    return Outcome(
        SAYS_WHERE,
        max(run.ended for run in runs) - cut,
        bench.go_on(out),
    )


def slows_the_link(bench: Bench) -> Outcome:
    out = bench.new_output()
    with Network() as network:
        nodes = network.start(bench.ranks, bench.flags(out, "--ddp-timeout", "60"))
        bench.wait_for_step(out, 3, nodes[0])
        network.slow(megabits=4)
        for node in nodes:
            expect(bench.finish(node), 0)
    return Outcome("it continues, slower", None, bench.difference(out))


SAYS_WHERE = f"every rank reports where it hangs, --ddp-timeout {DDP_TIMEOUT}"
FAULTS = {
    "raise": Fault(
        "An error in the code of one rank",
        InStep("raise", "its error is shown first and alone",
               (r"rank {rank} failed in step {step}", r"Root Cause[\s\S]*made up by benchmarks\.inject"),
               is_alone=True),
        in_short=True,
    ),
    "die": Fault(
        "One rank is killed (SIGKILL), as when memory runs out",
        InStep("die", "the others say that they lost it, torchrun which one",
               (LOST, r"Root Cause[\s\S]*rank      : {rank} [\s\S]*SIGKILL")),
    ),
    "die-again": Fault(
        "Ranks are killed at random moments, during saves included, under --max-restarts", dies_again_and_again
    ),
    "stand-still": Fault(
        "One rank hangs in a layer's forward",
        InStep("stand-still", SAYS_WHERE, stuck=r"rank {rank}: step {step}, .*forward of layer \d", flags=HANGS),
        in_short=True,
    ),
    "die-sending": Fault(
        "One rank is killed as it begins to send to another stage",
        InStep("die-sending", "the others say in which stage they lost it",
               (LOST, r"^rank \d+ lost the connection .* step {step}, stage \d of \d, ")),
        in_short=True, of_pipelines=True,
    ),
    "hang-receiving": Fault(
        "One rank hangs while it waits for what another stage sends",
        InStep("hang-receiving", f"{SAYS_WHERE}, the stage included", flags=HANGS,
               stuck=r"rank {rank}: step {step}, stage {stage} of {stages}, \w+ of micro-batch \d+, (wait|send)ing"),
        in_short=True, of_pipelines=True,
    ),
    # torchrun takes another 30 s until it kills what does not react to being asked to end
    "freeze": Fault(
        "One rank's process is stopped (SIGSTOP), its connections stay open, --ddp-timeout 1800",
        InStep("freeze", "another rank misses it and ends the run", (r"lost rank {rank}: no heartbeat",)),
    ),
    "nan-stop": Fault(
        "A gradient becomes NaN, --on-nonfinite stop --detect-anomaly",
        InStep("poison", "all ranks stop before the optimizer step, the tensor is named",
               ("first non-finite tensor", r"on rank {rank}"), flags=("--detect-anomaly",)),
    ),
    "nan-skip": Fault("The same, --on-nonfinite skip", poisons_one_step),
    "bit-flip": Fault(
        "One bit of one weight flips on one rank, --dense-shard hybrid --check-replicas 1",
        InStep("flip", "all ranks stop, the parameter is named", (r"q_proj\.weight", "--check-replicas"),
               flags=CHECKED, kept=CHECKED),
    ),
    "sigterm": Fault("SIGTERM, as a cluster sends before it takes a node away", is_asked_to_stop),
    "sigterm-evaluation": Fault(
        "SIGTERM in an evaluation that would take minutes", partial(is_asked_to_stop, in_evaluation=True)
    ),
    "damage": Fault("A byte of the newest checkpoint changes on the disk, while the run is down", damages_a_checkpoint),
    "output-gone": Fault("The output directory is deleted while the run writes to it", loses_its_output, in_short=True),
    "disk-full": Fault("No room for another checkpoint", fills_the_disk, is_possible=can_make_networks),
    "node-lost": Fault(
        "One of two nodes is gone for good: torchrun --nnodes 1:2 --max-restarts 3, --elastic", loses_a_node,
        exact=False,
    ),
    "link-cut": Fault(
        "The link between two nodes goes down; no packet, no reset comes through", cuts_the_link,
        is_possible=can_make_networks,
    ),
    "link-slow": Fault("The link between two nodes falls to 4 Mbit/s", slows_the_link, is_possible=can_make_networks),
}  # fmt: skip

ROUNDING = 1e-4
"""How far a weight may be off where a part of the run was made on another arrangement, in fp32: the model's are about
0.02 to 1, and AdamW's first steps follow the sign of a gradient, however small."""


@command
def main(argv: list[str] | None = None, run_whole: Callable[[int, list[str]], Run] | None = None) -> int:
    parser = parser_of(__doc__, ranks=4, ep_size=None, tp_size=1, pp_size=1, seed=0)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=None, metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--cp-size", type=int, default=1, help="ranks per sequence (context parallelism)")
    parser.add_argument("--steps", type=int, default=10, help="die-again: 12 for each kill, if that is more")
    parser.add_argument("--kills", type=int, default=5, help="die-again: of ranks")
    parser.add_argument("--task", choices=("sft", "dpo", "kto"), default="sft", help="as train_ep.py's")
    parser.add_argument("--flags", default="", help="further flags of train_ep.py: --flags='--packing'")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a run counts as hung")
    parser.add_argument("--short", action="store_true", help="a selection of faults, once each, on two ranks")
    arguments = parser.parse_args(argv)
    possible = {name: fault for name, fault in FAULTS.items() if arguments.pp_size > 1 or not fault.of_pipelines}
    if arguments.faults and (without := [name for name in arguments.faults if name not in possible]):
        parser.error(f"--faults {' '.join(without)}: happen in pipelines alone; give --pp-size 2")
    names = arguments.faults or [name for name, fault in possible.items() if fault.in_short or not arguments.short]
    if arguments.short:
        arguments.times, arguments.ranks, arguments.steps = 1, 2, 6
    ep_size = arguments.ep_size or max(arguments.ranks // arguments.pp_size // 2, 1)
    layout = (ep_size, arguments.cp_size, arguments.tp_size, arguments.pp_size)
    given = ("--task", arguments.task, *shlex.split(arguments.flags))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        of_runs = (arguments.ranks, arguments.steps, random.Random(arguments.seed))
        bench = Bench(Path(directory), *of_runs, *layout, given, arguments.kills, arguments.timeout, run_whole)
        make_inputs(bench.directory / "model", bench.directory / "data.jsonl", num_rows=ROWS)
        if arguments.task != "sft":
            write_preferences(bench.directory / "data.jsonl", arguments.task)
        print(settings_line(arguments, f"ep {bench.ep_size}", "a checkpoint every 2 steps"))
        results = [inject_and_check(FAULTS[name], arguments.times, bench) for name in names]
    return 0 if all(results) else 1


def write_preferences(data: Path, task: str) -> None:
    """Put in the place of prompts and responses pairs, whose rejected answer is the response in reverse, or labelled
    answers, every second one in reverse."""
    rows = []
    for number, row in enumerate(read_lines(data)):
        answers = (row["response"], row["response"][::-1])
        said = {"chosen": answers[0], "rejected": answers[1]}
        if task == "kto":
            said = {"completion": answers[number % 2], "label": number % 2 == 0}
        rows.append({"prompt": f"{row['prompt']}\n", **said})
    write_lines(rows, data)


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
