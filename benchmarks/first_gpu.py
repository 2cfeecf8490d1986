"""All that no CPU can show, on one GPU, in calls of nine minutes: `python -m benchmarks.first_gpu`.

    python -m benchmarks.first_gpu --prepare WHEELS --has LIST    # beforehand, where there is a network
    python -m pip install --no-index --no-deps --target site WHEELS/*.whl    # on a machine that has none
    PYTHONPATH=.package:site python -m benchmarks.first_gpu   # from the checkout, until it ends with 0 or 1

Steps, what matters most first; each is made of parts, a command with a time limit of its own. --minutes is what one
call may take, from the start of its process. The next call reads what earlier ones have left in --out, and goes on:
with the parts that had no time, and in the midst of a run of tests, each of whose results is kept as it ends. (On a
machine that has lost --out, give the file that it left, `--earlier first_gpu.tar`.) A part that fails or is stopped
ends no other.

After each part --out/first_gpu.md, a page to be kept, first_gpu.json and first_gpu.tar, with both, all logs and all
figures, are written anew: commit, card, driver, versions and date, and of each step what was expected beside what was
found. These three are all that need be copied from a machine that is given back; --results DIR puts them there, alone.
Where there is no .git, the commit is taken from the environment's COMMIT.

Exit code 0: every step met its expectation; 1: one did not; 75: parts are left, for the same command again. With
--use-cpu the same steps run at tiny size on a CPU over gloo, to know before a card is at hand that they do; with --as
nvidia-h200 besides, steps of full width are forecast for that card and judged as its own would be.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks import kept_tests
from benchmarks.ended import BEGUN, GRACE, in_time, seconds_until
from benchmarks.first_gpu_verdicts import (
    MOST_MEMORY_ERROR,
    OF_ALL_EXPERTS,
    OF_FORECAST_SPEED,
    OF_ONE_EXPERT,
    Read,
    Verdict,
    judged,
    kernels_found,
    no_errors,
    nothing_missing,
    passed,
    steps_found,
    whole_steps,
)
from benchmarks.needed import asked, carried, listed
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.moe.util.versions import installed_version
from expertmesh.sharding.runtime.allocator import VARIABLES
from expertmesh.training.environment import CHECKOUT, commit_of, cpu_model

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
MOST_CARRIED = 64 * 2**20
"""Bytes of wheels, where a machine is lent with a limit of what may be brought there."""
NAMED = ("torch", "triton", "transformers", "megablocks", "stanford-stk", "liger-kernel", "accelerate", "datasets")
"""Packages whose versions the page states."""
MAY_DIFFER = ("date", "driver")
"""What of a machine may be another in the next call: machines that are lent have the drivers that they have."""
RESULTS = ("first_gpu.md", "first_gpu.json", "first_gpu.tar")
CALL_AGAIN = 75
LEAST_SECONDS = 20.0
"""With less left of a call, no part is begun."""
LARGEST_LOG = 2**18
"""Bytes of a log's end that go into the tar."""


@dataclass(frozen=True)
class Part:
    """A command of a step.

    Attributes:
        name: for files, unlike any other part's.
        minutes: that it may take. A command that a call's end cuts off begins anew in the next one, if this much is
            left of that; a run of tests goes on, and has this much over all calls.
        keeps_tests: whether it is one.
        needs: a check of the preflight, without which there is no use in it.
    """

    name: str
    command: list[str]
    minutes: float
    keeps_tests: bool = False
    needs: str = ""


@dataclass(frozen=True)
class Step:
    """One thing to be shown. title: for people. expected: in words. read: what its parts have found."""

    name: str
    title: str
    expected: str
    parts: list[Part]
    read: Read


@dataclass
class Ran:
    """What became of a part so far. code: None until it has ended by itself."""

    code: int | None = None
    seconds: float = 0.0
    stopped: bool = False

    @property
    def is_over(self) -> bool:
        return self.code is not None or self.stopped


@dataclass
class State:
    """What all calls so far have left."""

    machine: dict[str, str]
    parts: dict[str, Ran] = field(default_factory=dict)
    calls: int = 0


@dataclass
class Call:
    """ends: by `time.monotonic`. out, results: directories of all that is written, and of the three files alone.
    has_begun: whether a part has run in it."""

    ends: float
    out: Path
    steps: Sequence[Step]
    use_cpu: bool = False
    results: Path | None = None
    has_begun: bool = False

    def write(self, state: State) -> list[Verdict]:
        """The page, the figures and the tar; what became of each step."""
        verdicts = [verdict_of(step, state.parts, self.out) for step in self.steps]
        content = asdict(state) | {
            "steps": [
                {"name": step.name, "expected": step.expected, "verdict": verdict, "found": found}
                for step, (verdict, found) in zip(self.steps, verdicts, strict=True)
            ]
        }
        with whole(self.out / "first_gpu.json") as partial:
            partial.write_text(json.dumps(content, indent=1))
        with whole(self.out / "first_gpu.md") as partial:
            partial.write_text(page(state, self.steps, verdicts))
        with whole(self.out / "first_gpu.tar") as partial:
            pack(self.out, partial)
        if self.results is not None:
            self.results.mkdir(parents=True, exist_ok=True)
            for name in RESULTS:
                with whole(self.results / name) as partial:
                    shutil.copyfile(self.out / name, partial)
        return [verdict for verdict, _ in verdicts]


@ends_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="that this call may take (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("first-gpu"), metavar="DIR", help="(default: first-gpu)")
    parser.add_argument("--earlier", type=Path, metavar="TAR", help="first_gpu.tar of earlier calls, if --out is lost")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="only these, by number")
    parser.add_argument("--use-cpu", action="store_true", help="the same steps at tiny size, on the CPU")
    parser.add_argument(
        "--as", dest="gpu", default="", metavar="GPU", help="with --use-cpu: forecast, say, nvidia-h200"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="also put the three files here after each part")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="download what a bare machine lacks, and end")
    parser.add_argument("--python-version", default="3.12", help="of that machine, for --prepare (default: 3.12)")
    parser.add_argument("--has", type=Path, metavar="FILE", help="what `pip list` prints on that machine")
    arguments = parser.parse_args(argv)
    if arguments.prepare is not None:
        if arguments.has is None:
            parser.error("--prepare needs --has, what `pip list` prints on that machine")
        try:
            return prepare(arguments.prepare, arguments.python_version, listed(arguments.has))
        except (OSError, ValueError) as error:
            parser.error(f"--has: {error}")
    if arguments.gpu and not arguments.use_cpu:
        parser.error("--as needs --use-cpu: nothing is measured of that card")
    out = arguments.out.absolute()
    steps = steps_of(out, arguments.use_cpu, arguments.gpu)
    call = Call(BEGUN + 60 * arguments.minutes, out, steps, arguments.use_cpu, arguments.results)
    numbers = arguments.steps or range(1, len(steps) + 1)
    if not {*numbers} <= {*range(1, len(steps) + 1)}:
        parser.error(f"--steps: there are the steps 1 to {len(steps)}")
    try:
        state = open_state(out, arguments.earlier, describe_machine(arguments.use_cpu, arguments.gpu))
    except ValueError as error:
        parser.error(str(error))
    state.calls += 1
    for number, step in enumerate(steps, 1):
        if number in numbers:
            go_on(number, step, state, call)
    verdicts = call.write(state)
    print(f"written: {', '.join(str((arguments.results or out) / name) for name in RESULTS)}")
    of_chosen = [verdicts[number - 1] for number in numbers]
    if "not finished" in of_chosen:
        print(f"parts are left after {state.calls} calls: give the same command again")
        return CALL_AGAIN
    return int(any(verdict != "as expected" for verdict in of_chosen))


def open_state(out: Path, earlier: Path | None, machine: dict[str, str]) -> State:
    """What earlier calls have left, or the beginning.

    Raises:
        ValueError: it is of another commit, card or software, or cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "first_gpu.json"
    if earlier is not None and not file.exists():
        if not earlier.is_file():
            raise ValueError(f"--earlier {earlier}: no such file")
        with tarfile.open(earlier) as archive:
            archive.extractall(out, filter="data")
    if not file.exists():
        return State(machine)
    try:
        left = json.loads(file.read_text())
        parts = {name: Ran(**ran) for name, ran in left["parts"].items()}
        state = State(left["machine"], parts, left["calls"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--out {out}: first_gpu.json cannot be read ({error}); give another --out") from None
    differs = [name for name in machine if name not in MAY_DIFFER and machine[name] != state.machine.get(name)]
    if differs:
        what = ", ".join(f"{name} {state.machine.get(name)}, now {machine[name]}" for name in differs)
        raise ValueError(f"--out {out}: has results of another run ({what}); give another --out")
    return state


def go_on(number: int, step: Step, state: State, call: Call) -> None:
    """Run those parts of a step that are not over, as far as the call's time goes."""
    out = call.out
    for part in step.parts:
        ran = state.parts.setdefault(part.name, Ran())
        left = seconds_until(call.ends) - GRACE
        own = 60 * part.minutes - (ran.seconds if part.keeps_tests else 0.0)
        # a later call has no more time than the whole of one
        has_all = left >= own or not call.has_begun
        if ran.is_over or left < LEAST_SECONDS or not (has_all or part.keeps_tests):
            continue
        if said := lacking(out).get(part.needs):
            (out / f"{part.name}.log").write_text(f"left out, as the preflight found of {part.needs}: {said}\n")
            ran.code = 1
            continue
        call.has_begun = True
        print(f"{number}. {step.title}: {part.name} ...", flush=True)
        begun = time.monotonic()
        with (out / f"{part.name}.log").open("a") as log:
            print("$", *part.command, file=log, flush=True)
            ran.code = in_time(part.command, log, environment(out, part, call.use_cpu), CHECKOUT, min(own, left))
        seconds = time.monotonic() - begun
        ran.seconds += seconds
        ran.stopped = ran.code is None and (own <= left or (has_all and not part.keeps_tests))
        became = "goes on in the next call" if not ran.is_over else "stopped at its limit" if ran.stopped else "ended"
        print(f"   {became} after {seconds:.0f} s", flush=True)
        call.write(state)
    verdict, found = verdict_of(step, state.parts, out)
    print(f"{number}. {step.title}: {verdict}: {found}", flush=True)


def environment(out: Path, part: Part, use_cpu: bool) -> dict[str, str]:
    """Of a part's process: it finds this package and the tests as this one does. Where expandable segments do not work,
    it goes without them."""
    path = [str(CHECKOUT / ".package"), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    found = dict(os.environ, PYTHONPATH=os.pathsep.join(path), PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
    found[kept_tests.VARIABLE] = str(out / f"{part.name}.jsonl")
    if use_cpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    if lacking(out).get("expandable segments"):
        found[VARIABLES[0]] = "expandable_segments:False"
    return found


def lacking(out: Path) -> dict[str, str]:
    """What the preflight has found of each check; empty of one that works."""
    file = out / "preflight.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def verdict_of(step: Step, parts: dict[str, Ran], out: Path) -> tuple[Verdict, str]:
    """What became of a step, and what it found, in words."""
    ran = [parts.get(part.name, Ran()) for part in step.parts]
    logs = [out / f"{part.name}.log" for part in step.parts]
    if not any(each.seconds or each.is_over for each in ran):
        return "not finished", "not begun"
    output = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
    verdict, found = judged(step.read, out, output, [each.code for each in ran])
    if any(each.stopped for each in ran):
        verdict = "stopped at its limit"
    elif not all(each.is_over for each in ran):
        verdict = "not finished"
    return verdict, f"{found} [{', '.join(log.name for log in logs)}]"


# ---- the steps ----


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def tests(name: str, minutes: float, workers: int, *arguments: str) -> Part:
    """A run of tests, by case over so many workers."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "benchmarks.kept_tests", "-n", str(workers), "--dist", "worksteal")
    return Part(name, python("-m", "pytest", *options, *arguments), minutes, keeps_tests=True)


def steps_of(out: Path, use_cpu: bool = False, gpu: str = "") -> list[Step]:
    """On a card: what it lacks, then what is likeliest to be wrong; all but the tables within a quarter of an hour.

    Args:
        use_cpu: the same at tiny size, of each file of tests some.
        gpu: on which steps of full width are then forecast, in the place of tiny ones.
    """
    workers = 2 if use_cpu else 8

    def limit(minutes: float) -> float:
        return ON_CPU if use_cpu else minutes

    def on_cpu(*words: str) -> tuple[str, ...]:
        return words if use_cpu else ()

    def width(name: str, model: str) -> Step:
        if gpu:
            # the forecasts are made here for that card, not there
            return full_width(name, model, out, "--use-cpu", "--as", gpu, minutes=2 * ON_CPU)
        if not use_cpu:
            return full_width(name, model, out)
        command = ("-m", "benchmarks.gpu_step", "--use-cpu", "--tiny", "--rows", "1", "--seq-length", "32", "--steps")
        more = ("2", "--model", RECIPES[name][1], "--layers", "2", "--json", str(out / f"{name}.json"))
        part = Part(name, python(*command, *more), ON_CPU)
        return Step(name, f"Steps of {model}'s layers, tiny", "finite losses", [part], steps_found(name))

    files = ["tests/gpu/test_kernels.py", "tests/gpu/test_attention.py", "tests/gpu/test_streams.py"]
    experts = experts_of(out, use_cpu)
    least = dict.fromkeys(experts, (0.0, 0.0) if use_cpu else OF_ALL_EXPERTS)
    least |= dict.fromkeys(least.keys() & {"experts-one"}, OF_ONE_EXPERT)
    rates = python("-m", "benchmarks.rates", "--write", str(out / "card.json"), *on_cpu("--device", "cpu"))
    ranks = tests("ranks", limit(2), 1, "tests/gpu/test_ranks.py", *on_cpu("-k", "test_two_ranks_train_as_one"))
    return [
        Step(
            "preflight",
            "What this machine lacks",
            "nothing",
            [preflight(out, limit(1.5), *on_cpu("--use-cpu"))],
            nothing_missing,
        ),
        width("mixtral", "Mixtral 8x7B"),
        Step(
            "kernels",
            "Kernels, attention and streams against fp64",
            ALL_PASS,
            [tests("kernels", limit(2), workers, *(files[:2] if use_cpu else files))],
            passed("kernels"),
        ),
        Step(
            "runs",
            "train_ep.py on the card against the CPU: features, tasks, families, memory, the same bits twice",
            ALL_PASS,
            [tests("runs", limit(3), workers, "tests/gpu/test_runs.py", *on_cpu("-k", "test_as_on_a_cpu"))],
            passed("runs"),
        ),
        Step(
            "ranks",
            "Two ranks over NCCL on the one card: layouts, resumes, a rank that is killed",
            ALL_PASS,
            [replace(ranks, needs="two ranks")],
            passed("ranks"),
        ),
        width("qwen3", "Qwen3 30B-A3B"),
        Step(
            "experts",
            "Expert kernels against transformers'; one expert of Mixtral, as of ep 8; rates for forecasts",
            "; ".join(f"{name}: {share} of the ceiling, {gain} x grouped_mm" for name, (share, gain) in least.items()),
            [Part("rates", rates, limit(1.5))] + [Part(name, words, limit(1)) for name, words in experts.items()],
            kernels_found(least),
        ),
        Step(
            "throughput",
            "Whole steps against transformers on one rank",
            f"losses agree{'' if use_cpu else '; ours is not slower'}",
            [Part("throughput", throughput(out, use_cpu), limit(3))],
            whole_steps(judges_speed=not use_cpu),
        ),
        Step(
            "sanitizer",
            "Memory errors of permutation and fp8 kernels",
            "0 errors, where there is the tool",
            [
                Part("sanitized-permutations", sanitized("test_permutations"), limit(2)),
                Part("sanitized-fp8", sanitized("test_contract_of_fp8"), limit(2)),
            ],
            no_errors,
        ),
    ]


def experts_of(out: Path, use_cpu: bool) -> dict[str, list[str]]:
    """Commands of `benchmarks.experts`, by the names of their files: of what recipes train, and of one expert."""
    named = {
        f"experts-{model}-{routing}": f"--model {model} --routing {routing} --tokens 16384"
        for _, model in RECIPES.values()
        for routing in ("balanced", "natural")
    }
    named["experts-one"] = "--model mixtral-8x7b-one-expert --routing balanced --tokens 32768"
    options = "--rounds 3 --repetitions 2 --variants torch-grouped megablocks-sparse"
    if use_cpu:
        named = {"experts": "--model small --routing balanced --tokens 64 --device cpu"}
        options = "--rounds 1 --variants torch-grouped"
    return {
        name: python(
            *("-m", "benchmarks.experts", *sizes.split(), *options.split()),
            *("HF grouped_mm", "--json", str(out / f"{name}.json")),
        )
        for name, sizes in named.items()
    }


def throughput(out: Path, use_cpu: bool) -> list[str]:
    common = ("-m", "benchmarks.throughput", "--ranks", "1", "--dtype", "pure-bf16", "--variants", "hf-fsdp")
    sizes = "--hidden-size 2048 --intermediate-size 7168 --layers 4 --rows 2 --seq-length 4096 --rounds 2"
    rate = "1e-4"
    if use_cpu:
        sizes = "--use-cpu --hidden-size 128 --intermediate-size 128 --layers 2 --vocabulary 256 --seq-length 32"
        sizes, rate = f"{sizes} --rounds 1 --steps 1", "3e-3"
    more = ("--learning-rate", rate, "--json", str(out / "throughput.json"))
    return python(*common, "ours-ep=1", *sizes.split(), *more)


def full_width(name: str, model: str, out: Path, *more: str, minutes: float = 2.0) -> Step:
    """Steps of a published model's layers by its recipe, judged by the forecast of the same step on that card.

    Args:
        more: further flags of `benchmarks.gpu_step`.
    """
    recipe, published = RECIPES[name]
    command = ("-m", "benchmarks.gpu_step", "--model", published, "--recipe", str(CHECKOUT / "configs" / recipe))
    least, most = OF_FORECAST_SPEED
    return Step(
        name,
        f"Steps of full width: as many of {model}'s layers as fit, 8 micro-batches, its recipe's optimizer",
        f"{least} to {most} of the forecast speed; peak memory within {MOST_MEMORY_ERROR:.0%} of the forecast; the "
        "host waits once a step, and at most once a micro-batch and MoE layer",
        [Part(name, python(*command, "--steps", "3", "--json", str(out / f"{name}.json"), *more), minutes)],
        steps_found(name),
    )


RECIPES = {
    "mixtral": ("mixtral_8x7b.yaml", "mixtral-8x7b"),
    "qwen3": ("qwen3_30b_a3b.yaml", "qwen3-30b-a3b"),
}
"""In configs/, and the published config.json."""


ALL_PASS = "all tests pass"
ON_CPU = 4.0
"""Minutes of each part there: seconds, unless the machine has much else to do."""


def preflight(out: Path, minutes: float, *more: str) -> Part:
    seconds = ("--seconds", str(60 * minutes - 20))
    command = ("-m", "benchmarks.preflight", *seconds, "--json", str(out / "preflight.json"))
    return Part("preflight", python(*command, *more), minutes)


def sanitized(test: str) -> list[str]:
    """A test under compute-sanitizer or, where there is none, nothing."""
    if shutil.which("compute-sanitizer") is None:
        return python("-c", "print('compute-sanitizer is not here')")
    checked = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py", "-k", test)
    return ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", *python(*checked)]


# ---- what is written ----


def describe_machine(use_cpu: bool, forecast_of: str = "") -> dict[str, str]:
    """Commit, card, driver and versions; which card's steps are forecast, not run."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=CHECKOUT).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    def asked(*of_card: str) -> str:
        return "" if use_cpu else said("nvidia-smi", f"--query-gpu={','.join(of_card)}", "--format=csv,noheader")

    found = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit_of(CHECKOUT) or os.environ.get("COMMIT") or "unknown",
        "device": asked("name", "memory.total") or f"{cpu_model()}, {os.cpu_count()} cores",
        "driver": asked("driver_version") or "none",
        "Python": platform.python_version(),
    }
    if forecast_of:
        found["device"] += f" (steps of full width are forecasts of {forecast_of})"
    return found | {name: installed_version(name) or "not installed" for name in NAMED}


def page(state: State, steps: Sequence[Step], verdicts: Sequence[tuple[Verdict, str]]) -> str:
    def row(number: int, step: Step, verdict: Verdict, found: str) -> str:
        took = sum(state.parts.get(part.name, Ran()).seconds for part in step.parts)
        return (
            f"| {number} | {step.title} | {step.expected} | **{verdict}**: {found.replace('|', '/')} | {took:.0f} s |"
        )

    rows = [row(number, step, *verdicts[number - 1]) for number, step in enumerate(steps, 1)]
    head = ["| step | what | expected | found | took |", "| --- | --- | --- | --- | --- |"]
    machine = "; ".join(f"{name} {value}" for name, value in state.machine.items())
    return "\n".join(["# What a GPU showed", "", machine, "", *head, *rows, ""])


def pack(out: Path, file: Path) -> None:
    """All that `open_state` needs, and all that was found."""
    with tarfile.open(file, "w") as archive:
        for path in sorted(out.iterdir()):
            if path.suffix == ".log" and path.stat().st_size > LARGEST_LOG:
                info = tarfile.TarInfo(path.name)
                info.size = LARGEST_LOG
                with path.open("rb") as log:
                    log.seek(-LARGEST_LOG, os.SEEK_END)
                    archive.addfile(info, log)
            elif path.suffix in (".md", ".json", ".jsonl", ".log"):
                archive.add(path, path.name)


def prepare(directory: Path, python_version: str, has: Mapping[str, str]) -> int:
    """Download wheels that a machine without a network lacks, in the versions that are installed here, and build
    stanford-stk's and MegaBlocks' Python part. They are to be installed without what they need, which is among them:
    another torch would come with it.

    Args:
        has: the packages of that machine, with their versions.

    Raises:
        ValueError: a package that is to be carried is not installed here.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = [f"--platform={name}" for name in PLATFORMS] + [f"--python-version={python_version}"]
    codes = []
    for name, version in carried(asked(), has, python_version).items():
        options = ["--no-deps", "--only-binary=:all:", "--implementation=cp", *target, "--dest", str(directory)]
        download = python("-m", "pip", "download", "--quiet", *options, f"{name}=={version}")
        codes.append(subprocess.run(download).returncode)
    built = python("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(directory))
    codes.append(subprocess.run([*built, "stanford-stk"]).returncode)
    source = CHECKOUT / ".venv" / "megablocks"
    if source.is_dir():
        codes.append(subprocess.run([*built, str(source)]).returncode)
    else:
        print(
            f"{source} is not here: without MegaBlocks' wheel its kernels are skipped (make install)", file=sys.stderr
        )
    sizes = {file.name: file.stat().st_size for file in directory.glob("*.whl")}
    print(f"{len(sizes)} wheels, {sum(sizes.values()) / 2**20:.1f} MiB, in {directory}")
    if sum(sizes.values()) > MOST_CARRIED:
        largest = max(sizes, key=sizes.__getitem__)
        print(
            f"more than {MOST_CARRIED / 2**20:.0f} MiB, the largest is {largest}; has --has all of that machine?",
            file=sys.stderr,
        )
        return 1
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
