"""Every command, at a pipe that nobody reads any more: `... | head` is no error."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from expertmesh.moe.util.terminal import UNREAD

ROOT = Path(__file__).parents[1]
COMMANDS = [
    "expertmesh.train_ep",
    "expertmesh.checkpoints.__main__",
    "expertmesh.training.cluster.commands",
    "expertmesh.training.report.__main__",
]
# a tool of the tests of faults, which hands its flags on to train_ep
BENCHMARKS = [
    f"benchmarks.{file.stem}"
    for file in sorted((ROOT / "benchmarks").glob("*.py"))
    if 'if __name__ == "__main__"' in file.read_text() and file.stem != "inject"
]


def unread(main: Callable[[], int]) -> int:
    """The exit code of a command whose standard output is a pipe without a reader."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    with redirect_stdout(stream):
        code = main()
    with suppress(BrokenPipeError):
        stream.close()
    return code


@pytest.mark.parametrize("module", COMMANDS + BENCHMARKS)
def test_help(module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(module).main
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    assert unread(main) == UNREAD
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "line",
    [
        "checkpoints.__main__ inspect MODEL --tensors --check",
        "training.cluster.commands mesh --world-size 16 --ep-size 8",
        "training.cluster.commands rehearse --model MODEL --max-seq-length 32",
    ],
)
def test_work(line: str, tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module, *arguments = line.replace("MODEL", str(tiny_model)).split()
    main = importlib.import_module(f"expertmesh.{module}").main
    assert unread(lambda: main(arguments)) == UNREAD
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("verify a b --rtoll 2", "unknown flag --rtoll; did you mean --rtol?"),
        ("export a b --fsdp", "unknown flag --fsdp; --help lists all flags"),
        ("inspect a --rtol 1", "unknown flag --rtol; --help lists all flags"),
        ("convert a b --ep_siz 2", "unknown flag --ep-siz; did you mean --ep-size?"),
        ("verfy a b", "; did you mean verify?"),
        ("mesh --ep-siz 2", "unknown flag --ep-siz; did you mean --ep-size?"),
        ("mesh --nonsense", "unknown flag --nonsense; --help lists all flags"),
        ("mesh --tensor-model-parallel-size 2", "unknown flag --tensor-model-parallel-size: give --tp-size"),
        ("plan --gpu-per-node 2", "unknown flag --gpu-per-node; did you mean --gpus-per-node?"),
        ("rehearse --smaples-per-row 2", "unknown flag --smaples-per-row; did you mean --samples-per-row?"),
        ("rehearse --num-gpus 2", "unknown flag --num-gpus: give --gpus and --gpus-per-node"),
    ],
)
def test_unknown_flags(line: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    of_clusters = line.split()[0] in ("mesh", "plan", "rehearse")
    module = "training.cluster.commands" if of_clusters else "checkpoints.__main__"
    assert importlib.import_module(f"expertmesh.{module}").main(line.split()) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"{'sharding' if of_clusters else 'checkpoints'}: error: ")
    assert told.endswith(f"{said}\n")
    assert told.count("\n") == 1


def test_as_a_process() -> None:
    """To its very end, at which the interpreter itself would flush what is left, and complain."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "sharding", "mesh", "--world-size", "16", "--ep-size", "8"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, cwd=ROOT, text=True, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (UNREAD, "")


def test_as_a_process_without_streams() -> None:
    """As under `>&- 2>&-`: what nobody can read is no error."""
    command = f"exec {sys.executable} -m expertmesh.sharding mesh --world-size 16 --ep-size 8 >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=120).returncode == 0
