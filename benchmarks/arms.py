"""Arms, which are what a benchmark compares: how they are made, take turns, are timed and are shown.

Arms take turns, round after round, so that other load on the machine affects all of them; a ratio between two is the
median over rounds of the ratio within a round. Their losses must agree, or a benchmark aborts.

    Benchmark       a command whose arms each train on ranks of their own, in every round anew
    take_turns      the loop, over whatever makes a turn
    timed           what a turn takes
"""

import argparse
import ctypes
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import expertmesh
from benchmarks import runs
from benchmarks.commands import write_json
from expertmesh.sharding.runtime.process import end_process_group
from expertmesh.training.data.batch import Batch, collate
from expertmesh.training.data.samples import Sample
from expertmesh.training.data.sequences import DataOrder
from expertmesh.training.engine.engine import Engine
from expertmesh.training.planning.rehearsal.live_memory import LiveTensors

MB = 10**6
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables by which glibc gives back to the system at once what is freed, so that a peak is that of tensors."""
FEW = 8
"""Tokens of a sequence that is short, which ranks can divide."""
K = TypeVar("K")
V = TypeVar("V")


# ---- what is compared ----


@dataclass(frozen=True)
class Made:
    """What an arm has made on a rank.

    Attributes:
        step: trains on this rank's micro-batches; the global mean loss before the update.
        engine: of our own arms.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    step: Callable[[Sequence[Batch]], float]
    engine: Any = None


def load(model: Path, **settings: Any) -> Engine:
    """`expertmesh.load` for steps that are compared: on the CPU unless told otherwise, without a balancing loss."""
    common: dict[str, Any] = dict(use_cpu=True, router_aux_loss_coef=0.0, cross_entropy="chunked", learning_rate=1e-5)
    engine = expertmesh.load(model, **(common | settings))
    engine.model.train()
    return engine


def load_ours(model: Path, **settings: Any) -> Made:
    engine = load(model, **settings)
    return Made(engine.model, engine.optimizer, lambda batches: engine.train_step(batches).loss, engine)


@dataclass(frozen=True)
class Arm:
    """A variant that is timed or counted.

    Attributes:
        name: by which it is chosen and shown.
        ranks: on which it trains.
        settings: of `expertmesh.load`, or of what makes it instead.
        make: makes it on each rank, of the directory of a model.
    """

    name: str
    ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., Made] = load_ours

    def made(self, model: Path) -> Made:
        return self.make(model, **self.settings)


class ArmFailed(Exception):
    """An arm gave no figures; why, in words."""


@dataclass
class Figures:
    """One arm in one round.

    Attributes:
        losses: of all its steps, those of the warm-up too.
        seconds: of each timed step.
        cpu, system, faults: of each, rank by rank: CPU seconds, those of them in the OS kernel, minor page faults.
        more: what else was counted.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    system: list[list[float]] = field(default_factory=list)
    faults: list[list[float]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu_seconds(self) -> list[float]:
        """Of each timed step, of all ranks together."""
        return [sum(step) for step in self.cpu]


Rounds = dict[str, list[Figures]]
"""By arm."""


# ---- turns ----


@dataclass
class Taken(Generic[K, V]):
    """What turns gave, round by round, and why an arm was left out."""

    found: dict[K, list[V]]
    failed: dict[K, str]


def take_turns(
    turns: Mapping[K, Callable[[int], V]],
    rounds: int,
    warm_up: int = 0,
    may_fail: type[Exception] | tuple[type[Exception], ...] = (),
) -> Taken[K, V]:
    """Have every arm take a turn in every round.

    Args:
        turns: are given the number of the round, below 0 in those that only warm up.
        may_fail: what a turn may raise: its arm is then left out from there on, and no other.
    """
    taken: Taken[K, V] = Taken({arm: [] for arm in turns}, {})
    for number in range(-warm_up, rounds):
        for arm, turn in turns.items():
            if arm in taken.failed:
                continue
            try:
                gave = turn(number)
            except may_fail as error:
                taken.failed[arm] = str(error) if isinstance(error, ArmFailed) else in_a_line(error)
                continue
            if number >= 0:
                taken.found[arm].append(gave)
    for arm in taken.failed:
        del taken.found[arm]
    return taken


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10))[0]}"


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Of two arms' figures, round by round: the median of the ratio within a round, in which the two ran close by."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def largest_difference(rounds: Rounds) -> tuple[float, str]:
    """Between the losses of any step of any arm and round and those of the first one's first round, relative, and where
    it is; infinite where a loss is not finite."""
    (first, (expected, *_)), *_ = rounds.items()
    found = [(0.0, "")]
    for arm, figures in rounds.items():
        for number, one in enumerate(figures, 1):
            for step, (a, b) in enumerate(zip(one.losses, expected.losses, strict=True), 1):
                difference = abs(a / b - 1) if math.isfinite(a) and math.isfinite(b) else math.inf
                found.append((difference, f"{arm}, round {number}, step {step}: loss {a:.7g}, of {first} {b:.7g}"))
    return max(found)


def disagreement(rounds: Rounds, tolerance: float) -> str | None:
    """Where losses differ most, if it is too much."""
    difference, where = largest_difference(rounds)
    return f"{where}: they differ by {difference:.1e}, allowed are {tolerance:.0e}" if difference > tolerance else None


# ---- what a turn takes ----


@dataclass(frozen=True)
class Took(Generic[V]):
    """seconds: by the clock; on a GPU, of the device. cpu, system: seconds of this process's CPU time, and of the OS
    kernel's part of it. faults: minor page faults."""

    seconds: float
    cpu: float
    system: float
    faults: float
    gave: V


def timed(run: Callable[[], V], device: torch.device, repetitions: int = 1) -> list[Took[V]]:
    """What each repetition takes. Ranks begin and end each together; a GPU is waited for after the last one alone."""
    settle(device)
    marks = [_mark(device)]
    uses, gave = [_use()], []
    for _ in range(repetitions):
        gave.append(run())
        if device.type == "cpu":
            settle(device)
        marks.append(_mark(device))
        uses.append(_use())
    settle(device)
    lasted = [begin.elapsed_time(end) / 1e3 if device.type == "cuda" else end - begin for begin, end in pairwise(marks)]
    spent = [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in pairwise(uses)]
    return [Took(seconds, *used, one) for seconds, used, one in zip(lasted, spent, gave, strict=True)]


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def _use() -> tuple[float, float, float]:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime, use.ru_stime, float(use.ru_minflt)


def settle(device: torch.device) -> None:
    """Wait for the device, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def steps_of(
    step: Callable[[], float],
    steps: int,
    device: torch.device,
    warm_up: int = 1,
    first_within: Sequence[AbstractContextManager[object]] = (),
) -> Figures:
    """Of so many timed steps after others that are not.

    Args:
        first_within: what counts the very first one, which is then not timed.
    """
    losses = []
    if first_within:
        with ExitStack() as counting:
            for each in first_within:
                counting.enter_context(each)
            losses.append(step())
        warm_up -= 1
    took = [one for _ in range(warm_up + steps) for one in timed(step, device)]
    kept = took[warm_up:]
    by_rank = gathered([(one.cpu, one.system, one.faults) for one in kept])
    cpu, system, faults = ([[rank[n][which] for rank in by_rank] for n in range(steps)] for which in range(3))
    return Figures(losses + [one.gave for one in took], [one.seconds for one in kept], cpu, system, faults)


def gathered(value: V) -> list[V]:
    """What each rank has."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- memory ----


def resident(field: str) -> int:
    """Bytes of a memory field in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def restart_peak() -> None:
    """Have VmHWM, the most that this process ever held, start again from what it holds now."""
    # free memory that the C library keeps would hide what is taken from it
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def held_now(device: torch.device) -> int:
    """Bytes: on a GPU of torch's allocator, else of this process."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else resident("VmRSS")


def most_held(device: torch.device) -> int:
    """The most bytes since `begin_peak`, or the process began."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")


def begin_peak(device: torch.device) -> int:
    """Have `most_held` begin here; bytes that are held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        restart_peak()
    return held_now(device)


def peak_of(made: Made, run: Callable[[], object]) -> int:
    """Most bytes of tensors at once while something runs, with parameters and optimizer state."""
    state = [value for of_one in made.optimizer.state.values() for value in of_one.values()]
    tensors = [each for each in (*made.model.parameters(), *made.model.buffers(), *state) if isinstance(each, Tensor)]
    with LiveTensors([each for each in tensors if not each.is_meta]) as live:
        run()
    return live.peak


# ---- models and data ----


def random_sequences(number: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(0, vocabulary, (number, length), generator=generator).tolist()
    return found


def batch_of(*sequences: list[int]) -> Batch:
    """All of whose tokens are trained on."""
    return collate([[Sample(sequence, [True] * len(sequence))] for sequence in sequences])


def batches_of(engine: Engine, sequences: Sequence[list[int]], micro_batch: int) -> list[Batch]:
    """This rank's part of a global batch of all sequences, in micro-batches of so many, as a run divides it."""
    order = DataOrder(len(sequences), engine.data_size, micro_batch, 1, 0, None, len(sequences))
    forwards = order.micro_batches(0, engine.data_rank)
    return [
        collate([[Sample.of_prompt(sequences[number], 0)] for number in forward], engine.mesh.cp_group)
        for forward in forwards
    ]


def activations_of(made: Made, sequences: Sequence[list[int]], micro_batch: int) -> int:
    """Most bytes of tensors at once in forward and backward, less those with few tokens per sequence: gathered
    parameters and gradients do not depend on the length. Of the rank with most."""
    peaks = []
    for length in (len(sequences[0]), FEW):
        batches = batches_of(made.engine, [sequence[:length] for sequence in sequences], micro_batch)
        peaks.append(peak_of(made, lambda batches=batches: made.engine.forward_backward(batches)))  # type: ignore[misc]
        made.optimizer.zero_grad()
    return max(gathered(peaks[0] - peaks[1]))


# ---- commands ----

LEFT = "figures.json"
"""What the main rank leaves in its directory."""
TIMEOUT = 3000
"""Seconds that an arm may take in a round."""
WORKER = "BENCHMARK_WORKER"
"""Environment variable of a process that is a rank of an arm: its directory and the arm, in JSON."""
Start = Callable[[str, Sequence[str], int, Path, str], Any]
"""As `on_ranks`."""


def on_ranks(module: str, argv: Sequence[str], ranks: int, directory: Path, arm: str, **variables: str) -> Any:
    """What the ranks of a command leave, which have its own flags.

    Raises:
        ArmFailed: they ended with an error, or took too long.
    """
    words = runs.words_of(ranks, argv, ("--standalone",), "-m", module)
    environment = runs.environment(**as_worker(directory, arm), **variables)
    try:
        done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ArmFailed(f"took more than {TIMEOUT} s") from None
    if done.returncode != 0:
        raised = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]+Error: .*)$", done.stderr, re.MULTILINE)
        raise ArmFailed(raised[0] if raised else f"exit code {done.returncode}: {done.stderr[-4000:]}")
    return left_in(directory)


def as_worker(directory: Path, arm: str) -> dict[str, str]:
    return {WORKER: json.dumps([str(directory), arm])}


def worker() -> tuple[Path, str] | None:
    """The directory and the arm of which this process is a rank, if it is one."""
    said = os.environ.get(WORKER)
    if said is None:
        return None
    directory, arm = json.loads(said)
    return Path(directory), arm


def left_in(directory: Path) -> Any:
    return json.loads((directory / LEFT).read_text())


def as_rank(directory: Path, figures: object) -> int:
    """Leave what this rank, or the ranks together, found."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        (directory / LEFT).write_text(json.dumps(figures))
    if dist.is_initialized():
        end_process_group()
    return 0


@dataclass(frozen=True)
class Benchmark:
    """A command whose arms take turns, each on ranks of its own, which load the model anew.

    Attributes:
        module: of the command.
        arms: of the flags, among which are rounds and json.
        save_model: puts the model that all arms load into a directory.
        measure: a turn, on each rank; is given the model's directory.
        report: prints.
        fault: why no figure means anything, if so.
        start: has the ranks of an arm run.
    """

    module: str
    arms: Callable[[argparse.Namespace], Sequence[Arm]]
    save_model: Callable[[argparse.Namespace, Path], object]
    measure: Callable[[argparse.Namespace, Arm, Path], Figures]
    report: Callable[[argparse.Namespace, Rounds], object]
    fault: Callable[[argparse.Namespace, Rounds], str | None] = lambda arguments, rounds: None
    start: Start = on_ranks

    def main(self, arguments: argparse.Namespace, argv: Sequence[str] | None) -> int:
        """What a rank of an arm does, or the command.

        Args:
            argv: of which the arguments were parsed.

        Returns:
            The exit code: 1 where losses differ, or an arm gave no figures.
        """
        if (rank := worker()) is not None:
            directory, name = rank
            (arm,) = (arm for arm in self.arms(arguments) if arm.name == name)
            return as_rank(directory, asdict(self.measure(arguments, arm, directory / "model")))
        found = self.compare(arguments, sys.argv[1:] if argv is None else argv)
        write_json(arguments.json, found)
        return code_of(found)

    def compare(self, arguments: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
        """Have the arms take turns, and print what they took; for --json."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            self.save_model(arguments, directory / "model")

            def turn(arm: Arm) -> Callable[[int], Figures]:
                return lambda number: Figures(**self.start(self.module, argv, arm.ranks, directory, arm.name))

            turns = {arm.name: turn(arm) for arm in self.arms(arguments)}
            taken = take_turns(turns, arguments.rounds, may_fail=ArmFailed)
        for arm, why in taken.failed.items():
            print(f"{arm} gave no figures: {why}", flush=True)
        aborted = self.fault(arguments, taken.found) if taken.found else "no variant finished"
        if aborted is None:
            self.report(arguments, taken.found)
        else:
            print(f"aborted: {aborted}", file=sys.stderr, flush=True)
        results = {arm: [asdict(one) for one in rounds] for arm, rounds in taken.found.items()}
        return {"setting": vars(arguments), "aborted": aborted, "failed": taken.failed, "results": results}


def agree_to(tolerance: float) -> Callable[[argparse.Namespace, Rounds], str | None]:
    """A `fault` of arms whose losses must agree."""
    return lambda arguments, rounds: disagreement(rounds, tolerance)


def code_of(found: Mapping[str, Any]) -> int:
    return int(bool(found["aborted"] or found["failed"]))
