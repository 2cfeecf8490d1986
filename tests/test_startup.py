"""Help, mistakes and looks at a checkpoint's heads import neither torch nor transformers, which take seconds to; help
not even numpy."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from expertmesh import train_ep
from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.training.start.process import TRACKERS

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe", "sharding", "checkpoints", "training")
HEAVY = {"torch", "transformers", "datasets", "accelerate", "huggingface_hub", "pyarrow", "pandas"}
HEAVY_FOR_HELP = HEAVY | {"numpy", "rich", "safetensors"}
CONSOLE_SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
IN_A_PROCESS = """
import contextlib, importlib, io, json, os, runpy, sys

def end(code):
    raise SystemExit(code)

os._exit, said, before = end, [], set(sys.modules)
for line in sys.stdin.read().splitlines():
    program, *arguments = line.removeprefix("-m ").split()
    sys.argv = [program, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            if line.startswith("-m "):
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            elif program.endswith(".py"):
                runpy.run_path(program, run_name="__main__")
            else:
                module, _, function = program.partition(":")
                getattr(importlib.import_module(module), function)()
        except SystemExit as error:
            said.append((error.code, out.getvalue(), sorted(set(sys.modules) - before)))
print(json.dumps(said))
"""
"""Commands one after the other, each of which ends as in a process of its own."""


def run(*lines: str) -> list[tuple[int, str, set[str]]]:
    """(exit code, all that was said, which modules are imported by now) of each `python LINE`, in one process."""
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(
        command, input="\n".join(lines), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = [(code, said, set(modules)) for code, said, modules in json.loads(done.stdout)]
    assert len(found) == len(lines)
    assert all("argparse" in modules for _, _, modules in found)
    return found


def programs() -> list[str]:
    """Every module of ours that runs as a command, and every console script; the launcher's help is torch's own."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for file in files
        if '\nif __name__ == "__main__"' in file.read_text(encoding="utf-8")
    ]
    return [
        "train_ep.py",
        *(f"-m expertmesh.{module}" for module in modules),
        *(script for name, script in CONSOLE_SCRIPTS.items() if name != "expertmesh-launch"),
    ]


def test_help() -> None:
    """Also that of each command in it, as its own help lists them."""
    of_programs = run(*(f"{program} --help" for program in programs()))
    inner = []
    for program, (_, said, _) in zip(programs(), of_programs, strict=True):
        names = re.findall(r"^    (\w+)(?: |$)", said.partition("COMMAND\n")[2], flags=re.MULTILINE)
        assert bool(names) == ("COMMAND" in said)
        inner += [(program, name) for name in names]
    of_commands = run(*(f"{program} {name} --help" for program, name in inner))
    for (_, name), (_, said, _) in zip(inner, of_commands, strict=True):
        assert f" {name} " in said.partition("\n")[0]
    for code, said, modules in of_programs + of_commands:
        assert code == 0, said
        assert said.startswith("usage:")
        assert max(map(len, said.splitlines())) <= 80
        assert "_" not in "".join(re.findall(r"--[\w-]+", said))
        assert not modules & HEAVY_FOR_HELP


@pytest.mark.parametrize("given", [None, "active"])
def test_idle_threads_sleep_unless_told_otherwise(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before torch is imported, which brings the library that reads it."""
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert train_ep.main(["--no-such-flag"]) == 2
    assert os.environ["OMP_WAIT_POLICY"] == (given or "passive")


def test_trackers_are_known_without_accelerate() -> None:
    """Which there are, and which are installed."""
    assert {"all", *TRACKERS} == {str(kind) for kind in LoggerType}
    installed = {name for name, packages in TRACKERS.items() if any(map(find_spec, packages))}
    assert installed == {str(kind) for kind in get_available_trackers()}


def test_what_is_of_the_hub_is_looked_for_before_torch_is_imported(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = f"train_ep.py --model {tiny_model} --output-dir {tmp_path / 'run'} --dataset"
    fetched = "no such directory, and not available from the hub"
    expected = (
        ("train_ep.py --model no/where --dataset README.md", f"--model no/where: {fetched}"),
        (f"{good} docs --tokenizer no/where", f"--tokenizer no/where: {fetched}"),
        (f"{good} no/where:0.5", "--dataset no/where: no such file or directory, nor a data set of that name in"),
        (f"{good} docs --eval-dataset no/where", "--eval-dataset no/where: no such file or directory, nor a data"),
    )
    found = run(*(line for line, _ in expected))
    for (line, text), (code, said, modules) in zip(expected, found, strict=True):
        assert (code, text in said) == (2, True), (line, said)
        assert not modules & {"torch", "transformers", "datasets", "accelerate"}, line


def test_what_needs_no_torch(tiny_model: Path, tmp_path: Path) -> None:
    """Mistakes, a picture of a mesh, and heads of checkpoints; by the folders' names, as in a checkout."""
    shards, data = str(tmp_path / "ep4"), tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    (tmp_path / "no").mkdir()
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(tiny_model / "config.json", bare)
    good = f"train_ep.py --model {tiny_model} --dataset {data} --output-dir {tmp_path / 'run'}"
    gone = next(name for name, packages in TRACKERS.items() if not any(map(find_spec, packages)))
    assert checkpoints_main(["convert", str(tiny_model), shards, "--ep-size", "4"]) == 0
    expected = (
        ("train_ep.py --model m --learning-rat 1", 2, "unknown flag --learning-rat"),
        ("train_ep.py --model m", 2, "--dataset is missing"),
        ("train_ep.py --model /no --dataset d", 2, "--model /no: no such directory"),
        (f"train_ep.py --model {tiny_model} --dataset d", 2, "--dataset d: no such file or directory"),
        (f"train_ep.py --model {tiny_model} --dataset README.md", 2, "README.md: unknown file type '.md'; known"),
        (f"train_ep.py --model {tiny_model} --dataset docs --eval-dataset e", 2, "--eval-dataset e: no such file or"),
        (f"train_ep.py --model {tiny_model} --dataset d --resume /no", 2, "--resume /no: no such directory"),
        (
            f"train_ep.py --model {tiny_model} --dataset d --resume tests",
            2,
            "tests: has no checkpoint.json: not a complete",
        ),
        ("train_ep.py --model configs --dataset README.md", 2, "configs/config.json: no such file"),
        (f"{good} --report-to no", 2, "--report-to no: unknown tracker; use one of all"),
        (f"{good} --report-to {gone}", 2, f"--report-to {gone}: not installed; pip install it first"),
        (f"{good} --teacher /no", 2, "--teacher /no: no such directory"),
        (f"{good} --tokenizer /no", 2, "--tokenizer /no: no such directory"),
        (f"{good} --tokenizer {tmp_path / 'no'}", 2, "no: has no tokenizer; give one with --tokenizer"),
        (good.replace(str(tiny_model), str(bare)), 2, "bare: has no tokenizer; give one with --tokenizer"),
        (good.replace(str(tmp_path / "run"), str(data)), 2, f"--output-dir {data}: is not a directory"),
        (f"{good} --chat-template no", 2, "--chat-template no: neither a built-in template"),
        ("-m checkpoints convert /no OUT --ep-size 2", 2, "/no: no such directory"),
        ("-m checkpoints export /no OUT", 2, "/no: no such directory"),
        ("-m checkpoints verify /no /no", 2, "/no: no such directory"),
        ("-m checkpoints inspect /no", 2, "/no: no such directory"),
        (f"-m checkpoints inspect {tiny_model} --tensors", 0, "Hugging Face directory"),
        (f"-m checkpoints inspect {shards} --tensors", 0, "EP shards, ep 4"),
        ("-m sharding plan --model /no", 2, "--model /no: no such file"),
        ("-m sharding mesh --world-size 8 --ep-size 3", 2, "--ep-size 3 does not divide"),
        ("-m sharding mesh --world-size 16 --ep-size 8", 0, "ep: 2 groups of 8"),
        ("-m sharding rehearse --model m --gpus 8 --ep-size 3", 2, "--ep-size 3 does not divide"),
        ("-m sharding rehearse --model m --gpu Z80", 2, "--gpu Z80 is unknown"),
        ("-m sharding rehearse --model /no", 2, "--model /no: no such file"),
        ("-m moe famlies", 2, "'famlies'"),
        ("-m training.report /no", 2, "/no"),
    )
    found = run(*(line for line, _, _ in expected))
    for (line, code, text), (ended, said, modules) in zip(expected, found, strict=True):
        assert (ended, text in said) == (code, True), (line, said)
        assert not modules & HEAVY, line


@pytest.mark.release
def test_a_plan_of_what_was_measured_before(tiny_model: Path) -> None:
    """Only what is not in the cache directory is measured."""
    layout = "--gpus 2 --ep-size 2 --tp-size 1 --pp-size 1 --gradient-checkpointing none --dense-shard full"
    line = f"-m sharding plan --model {tiny_model} {layout} --micro-batch 1 --seq-length 64 --rope-scaling"
    (first,), (again,), (another,) = run(f"{line} yarn:2"), run(f"{line} yarn:2"), run(f"{line} yarn:4")
    assert (first[0], again[0], another[0]) == (0, 0, 0), (first[1], again[1], another[1])
    assert "recommended" in again[1]
    assert again[1] == first[1]
    assert not again[2] & HEAVY
    assert {"torch", "transformers"} <= first[2] & another[2], "figures may depend on how positions are stretched"
