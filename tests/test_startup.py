"""Help, mistakes and looks at a checkpoint's heads import neither torch nor transformers, which take seconds to; help
not even numpy."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from tests.distributed.test_train_ep import ROOT

FOLDERS = ("moe", "sharding", "checkpoints", "training")
HEAVY = {"torch", "transformers", "datasets", "accelerate", "huggingface_hub", "pyarrow", "pandas"}
HEAVY_FOR_HELP = HEAVY | {"numpy", "rich", "safetensors"}
CONSOLE_SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def imported(*command: str) -> tuple[int, str, set[str]]:
    """(exit code, all that was said, which modules were imported) of `python COMMAND`."""
    python, environment = [sys.executable, "-X", "importtime"], {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([*python, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "argparse" in modules, done.stderr
    return done.returncode, done.stdout + "\n".join(told), modules


def commands() -> list[list[str]]:
    """Every module of ours that runs as a command, and every console script."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for file in files
        if '\nif __name__ == "__main__"' in file.read_text(encoding="utf-8")
    ]
    scripts = [entry.partition(":")[::2] for entry in CONSOLE_SCRIPTS.values()]
    return [
        ["train_ep.py"],
        *(["-m", f"expertmesh.{module}"] for module in modules),
        *(["-c", f"from {module} import {function}; {function}()"] for module, function in scripts),
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help(command: list[str]) -> None:
    """Also that of each command in it, as its own help lists them."""
    told = _help(*command)
    inner = re.findall(r"^    (\w+)(?: |$)", told.partition("COMMAND\n")[2], flags=re.MULTILINE)
    assert bool(inner) == ("COMMAND" in told)
    for name in inner:
        assert f" {name} " in _help(*command, name).partition("\n")[0]


def _help(*command: str) -> str:
    code, told, modules = imported(*command, "--help")
    assert code == 0, told
    assert told.startswith("usage:")
    assert max(map(len, told.splitlines())) <= 80
    assert "_" not in "".join(re.findall(r"--[\w-]+", told))
    assert not modules & HEAVY_FOR_HELP
    return told


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train_ep.py", "--model", "m", "--learning-rat", "1"], "unknown flag --learning-rat"),
        (["train_ep.py", "--model", "m"], "--dataset is missing"),
        (["train_ep.py", "--model", "/nonexistent", "--dataset", "d"], "--model /nonexistent: no such directory"),
        (
            ["train_ep.py", "--model", "configs", "--dataset", "d", "--resume", "/nonexistent"],
            "--resume /nonexistent: no such directory",
        ),
        (
            ["train_ep.py", "--model", "configs", "--dataset", "d", "--resume", "tests"],
            "--resume tests: has no checkpoint.json: not a complete training checkpoint",
        ),
        (["-m", "checkpoints", "convert", "/nonexistent", "OUT", "--ep-size", "2"], "/nonexistent: no such directory"),
        (["-m", "checkpoints", "export", "/nonexistent", "OUT"], "/nonexistent: no such directory"),
        (["-m", "checkpoints", "verify", "/nonexistent", "/nonexistent"], "/nonexistent: no such directory"),
        (["-m", "checkpoints", "inspect", "/nonexistent"], "/nonexistent: no such directory"),
        (["-m", "sharding", "plan", "--model", "/nonexistent"], "--model /nonexistent: no such file"),
        (["-m", "sharding", "mesh", "--world-size", "8", "--ep-size", "3"], "--ep-size 3 does not divide"),
        (
            ["-m", "sharding", "rehearse", "--model", "m", "--gpus", "8", "--ep-size", "3"],
            "--ep-size 3 does not divide",
        ),
        (["-m", "sharding", "rehearse", "--model", "m", "--gpu", "Z80"], "--gpu Z80 is unknown"),
        (["-m", "sharding", "rehearse", "--model", "/nonexistent"], "--model /nonexistent: no such file"),
        (["-m", "training.report", "/nonexistent"], "/nonexistent"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(command: list[str], said: str) -> None:
    code, told, modules = imported(*command)
    assert code == 2
    assert said in told
    assert not modules & HEAVY


def test_mesh() -> None:
    code, told, modules = imported("-m", "sharding", "mesh", "--world-size", "16", "--ep-size", "8")
    assert code == 0
    assert "ep: 2 groups of 8" in told
    assert not modules & HEAVY


@pytest.mark.release
def test_a_plan_of_what_was_measured_before(tiny_model: Path) -> None:
    """Only what is not in the cache directory is measured."""
    command = ["-m", "sharding", "plan", "--model", str(tiny_model), "--gpus", "2", "--micro-batch", "1"]
    command += ["--seq-length", "64", "--rope-scaling", "yarn:2"]
    first, again, another = imported(*command), imported(*command), imported(*command[:-1], "yarn:4")
    assert (first[0], again[0], another[0]) == (0, 0, 0), (first[1], again[1], another[1])
    assert _untimed(again[1]) == _untimed(first[1])
    assert "recommended" in again[1]
    assert not again[2] & HEAVY
    assert {"torch", "transformers"} <= first[2] & another[2], "figures may depend on how positions are stretched"


def _untimed(said: str) -> str:
    """A plan without what it took to find it."""
    untimed, times = re.subn(r"found in [\d.]+ s", "found", said)
    assert times == 1
    return untimed


def test_heads_of_checkpoints(tiny_model: Path, tmp_path: Path) -> None:
    assert checkpoints_main(["convert", str(tiny_model), str(tmp_path / "ep4"), "--ep-size", "4"]) == 0
    for path, said in ((tiny_model, "Hugging Face directory"), (tmp_path / "ep4", "EP shards, ep 4")):
        code, told, modules = imported("-m", "checkpoints", "inspect", str(path), "--tensors")
        assert code == 0, told
        assert said in told
        assert not modules & HEAVY
