"""All that no CPU can show, in one run on one GPU: `python -m benchmarks.first_gpu --minutes 25 --out DIR`.

    python -m benchmarks.first_gpu --prepare WHEELS           # beforehand, where there is a network
    python -m pip install --no-index --no-deps --target site WHEELS/*.whl    # on a machine that has none
    PYTHONPATH=.package:site python -m benchmarks.first_gpu   # from the checkout

Eight steps, the likeliest to fail first. Each is a process of its own with a time limit of its own; one that fails or
is stopped ends no other. --minutes is what all may take: what does not fit any more is left out, from the end, and
named. After each step DIR/first_gpu.md, a page to be kept, and DIR/first_gpu.json are written anew: commit, card,
driver and versions, and of each step what was expected beside what was found. DIR/N-NAME.log has what a step printed.

Exit code 0: every step ran and met its expectation; 1: one did not, or was left out. With --use-cpu the same steps run
at tiny size on a CPU over gloo, in a few minutes: to know before a card is at hand that they do.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.experts import BOTH, CEILING, EXPERTS, LAYER
from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.moe.util.versions import installed_version
from expertmesh.training.environment import CHECKOUT, commit_of, cpu_model

CARRIED = (
    "datasets", "dill", "multiprocess", "xxhash", "filelock", "accelerate", "psutil", "rich",
    "markdown-it-py", "mdurl", "liger-kernel",
    "pytest", "iniconfig", "pluggy", "pygments", "pytest-xdist", "execnet", "hypothesis", "sortedcontainers",
)  # fmt: skip
"""Packages that a machine with torch and transformers may lack, and what these need: they are installed without
dependencies, as another torch would come with these. MegaBlocks and stanford-stk are built from their sources
besides."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)] + ["manylinux2014_x86_64"]
NAMED = ("torch", "triton", "transformers", "megablocks", "stanford-stk", "liger-kernel", "accelerate", "datasets")
"""Packages whose versions the page states."""

Read = Callable[[Path, str], tuple[bool, str]]
"""Of what a step's commands left, a directory and their output: whether it is as expected, and what it is, in words."""
Verdict = Literal["as expected", "not as expected", "failed", "stopped at its limit", "left out"]


@dataclass(frozen=True)
class Step:
    """One thing to be shown.

    name: for files. title: for people. minutes: that it may take. expected: in words. commands: one after the other,
    all of them whatever becomes of one.
    """

    name: str
    title: str
    minutes: float
    expected: str
    commands: list[list[str]]
    read: Read


@dataclass
class Outcome:
    """What became of a step."""

    name: str
    title: str
    expected: str
    verdict: Verdict
    found: str
    seconds: float


@ends_with_reader
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="that all steps may take together (default: 25)")
    parser.add_argument("--out", type=Path, default=Path("first-gpu"), metavar="DIR", help="(default: first-gpu)")
    parser.add_argument("--steps", default="", metavar="1,3", help="only these, by number")
    parser.add_argument("--use-cpu", action="store_true", help="the same steps at tiny size, on the CPU")
    parser.add_argument(
        "--prepare", type=Path, metavar="DIR", help="download wheels that a bare machine lacks, and end"
    )
    parser.add_argument("--python-version", default="3.12", help="of that machine, for --prepare (default: 3.12)")
    arguments = parser.parse_args()
    if arguments.prepare is not None:
        return prepare(arguments.prepare, arguments.python_version)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    steps = [*enumerate(cpu_steps(out) if arguments.use_cpu else gpu_steps(out), 1)]
    if arguments.steps:
        chosen = {int(number) for number in arguments.steps.split(",")}
        if unknown := chosen - dict(steps).keys():
            parser.error(f"--steps: there is no step {min(unknown)}; there are 1 to {len(steps)}")
        steps = [(number, step) for number, step in steps if number in chosen]
    machine, outcomes = describe_machine(arguments.use_cpu), list[Outcome]()
    ends = time.monotonic() + 60 * arguments.minutes
    for number, step in steps:
        left = ends - time.monotonic()
        if left < 20:
            outcomes.append(Outcome(step.name, step.title, step.expected, "left out", "no time was left", 0.0))
        else:
            print(f"{number}. {step.title} ...", flush=True)
            outcomes.append(run(number, step, out, min(60 * step.minutes, left), arguments.use_cpu))
            print(f"   {outcomes[-1].verdict}: {outcomes[-1].found} ({outcomes[-1].seconds:.0f} s)", flush=True)
        write(out, machine, outcomes)
    print(f"written: {out / 'first_gpu.md'}, {out / 'first_gpu.json'}")
    return int(any(outcome.verdict != "as expected" for outcome in outcomes))


# ---- the steps ----


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def tests(out: Path, name: str, *arguments: str) -> list[str]:
    """A run of tests, whose results go to out/name.xml."""
    options = ("-q", "-p", "no:cacheprovider", "--maxfail", "100", "--junitxml", str(out / f"{name}.xml"))
    return python("-m", "pytest", *options, *arguments)


def gpu_steps(out: Path) -> list[Step]:
    """On a card, in the order of what is likeliest to fail and to matter."""
    several = ("-n", "8", "--dist", "loadfile")
    step, experts = ("-m", "benchmarks.gpu_step"), ("-m", "benchmarks.experts", "--tokens", "16384")
    full = [
        python(*step, "--model", "mixtral-8x7b", "--layers", "4", "--json", str(out / "mixtral.json")),
        python(*step, "--model", "qwen3-30b-a3b", "--layers", "10", "--json", str(out / "qwen3.json")),
    ]
    settings = [(m, routing) for m in ("mixtral-8x7b", "qwen3-30b-a3b") for routing in ("balanced", "natural")]
    kernels = [
        python(*experts, "--model", model, "--routing", routing, "--json", str(out / f"experts-{model}-{routing}.json"))
        for model, routing in settings
    ]
    files = ("tests/gpu/test_kernels.py", "tests/gpu/test_attention.py", "tests/gpu/test_streams.py")
    return [
        Step("kernels", "Kernels, attention and streams against fp64", 4, ALL_PASS,
             [tests(out, "kernels", *several, *files)], passed("kernels")),
        Step("runs", "train_ep.py on the card against the CPU: features, families, memory, the same bits twice", 4,
             ALL_PASS, [tests(out, "runs", *several, "tests/gpu/test_runs.py")], passed("runs")),
        Step("step", "Steps of full width: Mixtral 8x7B's layers, then Qwen3 30B-A3B's", 4,
             "MFU 33 % or more (Mixtral), 20 % or more (Qwen3); peak memory within 3 % of the forecast; the host waits "
             "once a step and once a MoE layer", full, steps_found({"mixtral": 0.33, "qwen3": 0.20})),
        Step("ranks", "Two ranks over NCCL on the one card: layouts, resumes, a rank that is killed", 5, ALL_PASS,
             [tests(out, "ranks", "-n", "2", "tests/gpu/test_ranks.py")], passed("ranks")),
        Step("experts", "Expert kernels against transformers' and MegaBlocks'", 4,
             "what auto takes: 0.66 of the dense ceiling or more, 1.1 x transformers' grouped_mm or more",
             kernels, kernels_found([f"experts-{model}-{routing}" for model, routing in settings], 0.66, 1.1)),
        Step("rates", "Rates that this card attains, for forecasts", 2, "measured",
             [python("-m", "benchmarks.rates", "--write", str(out / "card.json"))], printed),
        Step("sanitizer", "Memory errors of permutation and fp8 kernels", 2, "0 errors, where there is the tool",
             [sanitized("test_permutations"), sanitized("test_contract_of_fp8")], no_errors),
        Step("throughput", "Whole steps against transformers on one rank, four narrow layers", 3,
             "losses agree; ours is not slower",
             [python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m",
                     "benchmarks.throughput", "--dtype", "pure-bf16", "--hidden-size", "2048",
                     "--intermediate-size", "7168", "--layers", "4", "--rows", "2", "--seq-length", "4096", "--rounds",
                     "2", "--variants", "hf-fsdp", "ours-ep=1", "--learning-rate", "1e-4", "--json",
                     str(out / "throughput.json"))], is_not_slower),
    ]  # fmt: skip


def cpu_steps(out: Path) -> list[Step]:
    """The same, tiny."""
    step = ("-m", "benchmarks.gpu_step", "--use-cpu", "--tiny", "--rows", "1", "--seq-length", "32", "--steps", "2")
    experts = (
        *("-m", "benchmarks.experts", "--model", "small", "--tokens", "64", "--rounds", "1", "--device", "cpu"),
        *("--routing", "balanced", "--variants", "torch-grouped", "HF grouped_mm"),
    )
    return [
        Step("kernels", "Kernels against fp64: the first case of each", 2, ALL_PASS,
             [tests(out, "kernels", "tests/gpu/test_kernels.py", "tests/gpu/test_attention.py")],
             passed("kernels")),
        Step("runs", "train_ep.py: one feature", 2, ALL_PASS,
             [tests(out, "runs", "tests/gpu/test_runs.py", "-k", "test_as_on_a_cpu")], passed("runs")),
        Step("step", "Steps of Mixtral's and Qwen3's layers, tiny", 2, "finite losses",
             [python(*step, "--model", "mixtral-8x7b", "--layers", "2", "--json", str(out / "mixtral.json"))],
             steps_found({"mixtral": 0.0})),
        Step("ranks", "Two ranks over gloo: one layout", 2, ALL_PASS,
             [tests(out, "ranks", "tests/gpu/test_ranks.py", "-k", "test_two_ranks_train_as_one")],
             passed("ranks")),
        Step("experts", "Expert kernels, small", 2, "outputs agree", [python(*experts)], printed),
        Step("rates", "Rates that this CPU attains", 2, "measured",
             [python("-m", "benchmarks.rates", "--device", "cpu", "--write", str(out / "card.json"))], printed),
        Step("sanitizer", "Memory errors", 1, "0 errors, where there is the tool",
             [sanitized("test_permutations")], no_errors),
        Step("throughput", "Whole steps against transformers, tiny", 2, "losses agree",
             [python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m",
                     "benchmarks.throughput", "--use-cpu", "--dtype", "pure-bf16", "--hidden-size", "128",
                     "--intermediate-size", "128", "--layers", "2", "--vocabulary", "256", "--seq-length", "32",
                     "--rounds", "1", "--steps", "1", "--learning-rate", "3e-3", "--variants", "hf-fsdp", "ours-ep=1")],
             printed),
    ]  # fmt: skip


def sanitized(test: str) -> list[str]:
    """A test under compute-sanitizer or, where there is none, nothing."""
    if shutil.which("compute-sanitizer") is None:
        return python("-c", "print('compute-sanitizer is not here')")
    checked = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py", "-k", test)
    return ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", *python(*checked)]


# ---- what they found ----

ALL_PASS = "all tests pass"


def passed(name: str) -> Read:
    def read(directory: Path, printed: str) -> tuple[bool, str]:
        suites = ElementTree.parse(directory / f"{name}.xml").getroot().iter("testsuite")
        counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        failed = []
        for suite in suites:
            for key in counts:
                counts[key] += int(suite.get(key, "0"))
            failed += [case.get("name", "") for case in suite.iter("testcase") if case.find("failure") is not None]
        bad = counts["failures"] + counts["errors"]
        good = counts["tests"] - bad - counts["skipped"]
        which = f": {', '.join(failed[:8])}{' ...' * (len(failed) > 8)}" if failed else ""
        return bad == 0 and good > 0, f"{good} passed, {bad} failed, {counts['skipped']} skipped{which}"

    return read


def steps_found(least_mfu: dict[str, float]) -> Read:
    def read(directory: Path, printed: str) -> tuple[bool, str]:
        is_right, lines = True, []
        for name, least in least_mfu.items():
            found = json.loads((directory / f"{name}.json").read_text())
            memory = found["peak_bytes"] / found["forecast_bytes"]
            line = f"{name}: {found['tokens_per_second']:,.0f} tokens/s"
            if found["mfu"] is not None:
                waits = sum(found["waits"].values())
                is_right &= found["mfu"] >= least and abs(memory - 1) <= 0.03 and waits <= 1 + found["moe_layers"]
                line += f", MFU {found['mfu']:.1%}, idle {found['idle_share']:.1%}, {waits} waits"
            is_right &= all(map(math.isfinite, found["losses"]))
            lines.append(f"{line}, peak memory {memory:.3f} of the forecast")
        return is_right, "; ".join(lines)

    return read


def kernels_found(files: Sequence[str], least_share: float, least_gain: float) -> Read:
    """Of the kernel that `auto` takes, forward and backward: its share of the dense ceiling, as experts alone, and its
    speed against transformers' grouped_mm, as a layer."""

    def read(directory: Path, printed: str) -> tuple[bool, str]:
        is_right, lines = True, []
        for name in files:
            found = json.loads((directory / f"{name}.json").read_text())
            ms = {
                (result["part"], result["variant"]): result["median_ms"]
                for result in found["results"]
                if result["passes"] == BOTH
            }
            (auto,) = found["auto"].values()
            share = ms[EXPERTS, CEILING] / ms[EXPERTS, auto]
            gain = ms[LAYER, "HF grouped_mm"] / ms[LAYER, auto]
            is_right &= share >= least_share and gain >= least_gain
            lines.append(f"{name}: {auto} {share:.2f} of the ceiling, {gain:.2f} x grouped_mm")
        return is_right, "; ".join(lines)

    return read


def is_not_slower(directory: Path, output: str) -> tuple[bool, str]:
    """Of the variants' seconds a step."""
    found = json.loads((directory / "throughput.json").read_text())
    theirs, ours = (
        statistics.median(seconds for figures in result["rounds"] for seconds in figures["seconds"])
        for result in found["results"]
    )
    return ours <= theirs, f"{theirs / ours:.2f} x the speed of transformers; aborted: {found['aborted'] or 'no'}"


def printed(directory: Path, output: str) -> tuple[bool, str]:
    """The last lines of a command whose exit code says whether results are right."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return True, " / ".join(lines[-3:])[:600]


def no_errors(directory: Path, output: str) -> tuple[bool, str]:
    summaries = re.findall(r"ERROR SUMMARY: (\d+) error", output)
    if not summaries:
        return "not here" in output, "compute-sanitizer is not here" if "not here" in output else "no summary"
    return not any(map(int, summaries)), f"{', '.join(summaries)} errors"


# ---- running them ----


def run(number: int, step: Step, out: Path, limit: float, use_cpu: bool) -> Outcome:
    """Run a step's commands within `limit` seconds together."""
    log, begun = out / f"{number}-{step.name}.log", time.monotonic()
    environment = dict(os.environ, PYTHONPATH=search_path(), PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if use_cpu else {}
    codes: list[int | None] = []
    with log.open("w") as file:
        for command in step.commands:
            print("$", *command, file=file, flush=True)
            codes.append(in_time(command, file, environment, begun + limit - time.monotonic()))
    seconds = time.monotonic() - begun
    output = log.read_text(errors="replace")
    try:
        is_right, found = step.read(out, output)
    except (OSError, ValueError, KeyError, TypeError, ElementTree.ParseError) as error:
        is_right, found = False, f"nothing to read ({type(error).__name__}: {error})"
    verdict: Verdict = "as expected" if is_right else "not as expected"
    if None in codes:
        verdict = "stopped at its limit"
    elif any(codes) and is_right:
        verdict, found = "failed", f"exit codes {codes}; {found}"
    return Outcome(step.name, step.title, step.expected, verdict, f"{found} [{log.name}]", seconds)


def search_path() -> str:
    """For processes that find this package and the tests as this one does."""
    return os.pathsep.join(
        [str(CHECKOUT / ".package"), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    )


def in_time(command: list[str], file: Any, environment: dict[str, str], seconds: float) -> int | None:
    """Run a command; its exit code, or None where it and all that it started were ended at the limit."""
    if seconds <= 0:
        return None
    process = subprocess.Popen(
        command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=CHECKOUT, start_new_session=True
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"ended at the limit, after {seconds:.0f} s", file=file, flush=True)
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- what is written ----


def describe_machine(use_cpu: bool) -> dict[str, str]:
    """Commit, card, driver and versions."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=CHECKOUT).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    card = (
        "" if use_cpu else said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    )
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit_of(CHECKOUT) or "unknown",
        "device": card or f"{cpu_model()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
    }
    return found | {name: installed_version(name) or "not installed" for name in NAMED}


def write(out: Path, machine: dict[str, str], outcomes: list[Outcome]) -> None:
    """The page and the figures, of the steps so far."""
    rows = [
        f"| {number} | {each.title} | {each.expected} | **{each.verdict}**: {each.found.replace('|', '/')} | "
        f"{each.seconds:.0f} s |"
        for number, each in enumerate(outcomes, 1)
    ]
    page = [
        "# What a GPU showed",
        "",
        "; ".join(f"{name} {value}" for name, value in machine.items()),
        "",
        "| step | what | expected | found | took |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]
    with whole(out / "first_gpu.md") as partial:
        partial.write_text("\n".join(page))
    with whole(out / "first_gpu.json") as partial:
        partial.write_text(json.dumps({"machine": machine, "steps": list(map(asdict, outcomes))}, indent=1))


def prepare(directory: Path, python_version: str) -> int:
    """Download wheels for a machine without a network, and build stanford-stk's and MegaBlocks' Python part."""
    directory.mkdir(parents=True, exist_ok=True)
    target = [f"--platform={name}" for name in PLATFORMS] + [f"--python-version={python_version}"]
    codes = []
    for package in CARRIED:
        options = ["--no-deps", "--only-binary=:all:", "--implementation=cp", *target, "--dest", str(directory)]
        codes.append(subprocess.run(python("-m", "pip", "download", "--quiet", *options, package)).returncode)
    built = python("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(directory))
    codes.append(subprocess.run([*built, "stanford-stk"]).returncode)
    source = CHECKOUT / ".venv" / "megablocks"
    if source.is_dir():
        codes.append(subprocess.run([*built, str(source)]).returncode)
    else:
        print(
            f"{source} is not here: without MegaBlocks' wheel its kernels are skipped (make install)", file=sys.stderr
        )
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{len(list(directory.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB, in {directory}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
