"""Every flag of every command is heeded or refused by name: what is read is recorded while commands run."""

import argparse
import ast
import importlib
import io
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeGuard, get_args
from unittest import mock

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.parser import flag_of
from expertmesh.training.config.flags import FlagParser
from expertmesh.training.config.train_config import TrainConfig, parse_config
from tests.checkpoints.test_upcycle import dense_model
from tests.commands_page import parser_within
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main

ROOT = Path(__file__).parents[1]
MODULES = {
    "sharding": "expertmesh.training.cluster.commands",
    "checkpoints": "expertmesh.checkpoints.__main__",
    "moe": "expertmesh.training.cluster.families_command",
    "report": "expertmesh.training.report.__main__",
    "train_ep": "expertmesh.train_ep",
}
LINES = {
    "mesh": "sharding mesh --world-size 4 --ep-size 2",
    "mesh with pipelines": "sharding mesh --world-size 4 --ep-size 2 --pp-size 2",
    "mesh --check": "sharding mesh --ep-size 1 --check --use-cpu",
    "plan": "sharding plan --model MODEL --gpus 2 --max-seq-length 32 --tp-size 1 --gradient-checkpointing none",
    "rehearse": "sharding rehearse --model MODEL --gpus 2 --max-seq-length 32",
    "rehearse all": "sharding rehearse --model MODEL --gpus 2 --max-seq-length 32 --ranks all --packing",
    "convert": "checkpoints convert MODEL OUT --ep-size 2",
    "export": "checkpoints export SHARDS OUT",
    "export a checkpoint": "checkpoints export TRAINED OUT",
    "merge": "checkpoints merge MODEL ADAPTER OUT",
    "upcycle": "checkpoints upcycle DENSE OUT --experts 4 --top-k 2",
    "verify": "checkpoints verify MODEL SHARDS",
    "verify adapters": "checkpoints verify ADAPTER ADAPTER",
    "inspect": "checkpoints inspect MODEL",
    "inspect a checkpoint": "checkpoints inspect TRAINED --check",
    "inspect an adapter": "checkpoints inspect ADAPTER",
    "families": "moe families mixtral",
    "report": "report RUN",
    "migrate": "train_ep migrate SETTINGS",
}
VALUES = {"base": "MODEL", "json": "FILE", "calibrate": "FILE", "imbalance": "2"}
"""Of flags that take a file, or text."""
BENCHMARKS = [file for file in sorted((ROOT / "benchmarks").glob("*.py")) if "parse_args(" in file.read_text()]
DECLARES = "benchmarks.commands"
"""Has the names of flags of several."""
PERMISSIONS = {"overwrite"}
"""They allow what does not come to pass."""


@contextmanager
def recording() -> Iterator[tuple[set[str], dict[str, argparse.Action]]]:
    """The names that a command's code reads of its arguments, and all of its flags but train_ep.py's."""
    read: set[str] = set()
    flags: dict[str, argparse.Action] = {}
    parse = argparse.ArgumentParser.parse_known_args

    def get(namespace: argparse.Namespace, name: str) -> Any:
        if not name.startswith("_") and Path(sys._getframe(1).f_code.co_filename).name != "argparse.py":
            read.add(name)
        return object.__getattribute__(namespace, name)

    def parsed(parser: argparse.ArgumentParser, *given: Any) -> Any:
        if not isinstance(parser, FlagParser):
            of_command = (action for action in parser._actions if action.option_strings and action.dest != "help")
            flags.update({action.dest: action for action in of_command})
        return parse(parser, *given)

    with (
        mock.patch.object(argparse.Namespace, "__getattribute__", get, create=True),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", parsed),
    ):
        yield read, flags


def run(line: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = importlib.import_module(MODULES[line[0]]).main(line[1:])
    return code, said.getvalue()


def with_value(action: argparse.Action) -> list[str]:
    """The flag with another value than its default."""
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag]
    if action.choices is not None:
        return [flag, next(str(choice) for choice in action.choices if choice != action.default)]
    if action.type is int:
        return [flag, str((action.default or 0) + 1)]
    return [flag, VALUES[action.dest]]


@pytest.fixture(scope="module")
def places(
    ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """A directory of each kind."""
    path = tmp_path_factory.mktemp("places")
    for name, more in (("RUN", ["--save-steps", "1"]), ("LORA", ["--adapter", "lora"])):
        argv = ["--model", str(tiny_model), "--dataset", str(tiny_data), "--max-steps", "1", "--use-cpu", *more]
        ((code, errors),) = ranks.run(run_main, 1, [*argv, "--output-dir", str(path / name)], join_group=False)
        assert code == 0, errors
    assert run(["checkpoints", "convert", str(tiny_model), str(path / "SHARDS"), "--ep-size", "2"])[0] == 0
    dense_model("llama").save_pretrained(path / "DENSE")
    trained, of_adapters = (str(path / name / "checkpoints" / "step-00000001") for name in ("RUN", "LORA"))
    return {
        "MODEL": str(tiny_model), "SHARDS": str(path / "SHARDS"), "RUN": str(path / "RUN"), "TRAINED": trained,
        "ADAPTER": str(path / "LORA" / "adapter"), "ADAPTERS": of_adapters, "DENSE": str(path / "DENSE"),
        "SETTINGS": str(ROOT / "configs" / "mixtral_8x7b.yaml"),
    }  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LINES)
def test_flags_are_heeded_or_refused(name: str, places: dict[str, str], tmp_path: Path) -> None:
    """What a command has not read is refused, or it is told that it has no effect."""
    places = {**places, "OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "file.json")}
    line = [places.get(word, word) for word in LINES[name].split()]
    with recording() as (read, flags):
        code, said = run(line)
    assert code == 0, said
    dropped = []
    for dest, action in flags.items():
        if dest not in read | PERMISSIONS and not action.required:
            flag, *value = with_value(action)
            _, said = run([*line, flag, *(places.get(word, word) for word in value)])
            if not re.search(rf"{flag}\b.*( has no effect|: )", said):
                dropped.append(flag)
    assert not dropped


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """
    Raises:
        TimeoutError: what is inside takes longer.
    """

    def late(*given: object) -> None:
        raise TimeoutError(f"not back after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * bool(re.search("check|rehearse", name))) for name in LINES]
)
def test_numbers_are_heeded_or_refused(name: str, places: dict[str, str], tmp_path: Path) -> None:
    """Also zero, which is no missing value, and what no computer has, in time."""
    places = {**places, "OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "file.json")}
    line = [places.get(word, word) for word in LINES[name].split()]
    with recording() as (_, flags):
        code, said = run(line)
        assert code == 0
    by_default = untimed(said)
    taken = []
    for action in flags.values():
        if action.type not in (int, float):
            continue
        flag = action.option_strings[0]
        at = line.index(flag) if flag in line else len(line)
        for value in ("0", "-1", str(10**9), "nan"):
            shutil.rmtree(places["OUT"], ignore_errors=True)
            with within(60):
                code, said = run([*line[:at], *line[at + 2 :], flag, value])
            is_refused = code == 2 and said.count("\n") == 1 and any(word in said for word in action.option_strings)
            is_told = f"{flag} has no effect" in said
            is_default = action.default == float(value)
            # in place of zero no default is taken
            is_other = value == str(10**9) or (value == "0" and untimed(said) != by_default)
            if not (is_refused or is_told or is_default or (is_other and code in (0, 1))):
                taken.append((flag, value, code, said))
    assert not taken, "\n".join(map(str, taken))


def untimed(said: str) -> str:
    return re.sub(r"[\d.,]+ s\b", "", said)


@pytest.mark.parametrize("value", ["0", "-1", str(10**9), "nan"])
def test_numbers_of_a_run(value: str) -> None:
    """Of what is given nothing else is taken, and no number is none."""
    for setting in fields(TrainConfig):
        if not {int, float} & {setting.type, *get_args(setting.type)}:
            continue
        flag = flag_of(setting.name)
        said = ""
        try:
            config = parse_config(["--model", "m", "--dataset", "d", flag, value])
        except ExpertMeshError as error:
            said = str(error)
        if said or value == "nan":
            assert flag in said
        else:
            assert getattr(config, setting.name) in (float(value), [float(value)]), flag


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("mesh --world-size 4 --ep-size 2 --num-layers 3", 0, "--num-layers has no effect at --pp-size 1"),
        ("mesh --world-size 4 --ep-size 2 --timeout 3", 0, "--timeout has no effect without --check"),
        ("mesh --world-size 4 --ep-size 2 --json FILE", 2, "--json FILE: needs the rates that --check measures"),
        (
            "rehearse --model MODEL --max-seq-length 32 --samples-per-row 2",
            0,
            "--samples-per-row has no effect without --packing",
        ),
        ("export SHARDS OUT --base MODEL", 2, "--base MODEL: SHARDS is not a training checkpoint"),
        ("inspect ADAPTER --check", 2, "--check: ADAPTER is an adapter"),
        ("inspect ADAPTERS --check", 0, "checksums   match; no model to compare the adapters with"),
    ],
)
def test_what_is_told(line: str, code: int, told: str, places: dict[str, str], tmp_path: Path) -> None:
    places = {**places, "OUT": str(tmp_path / "out"), "FILE": str(tmp_path / "file.json")}
    command = "sharding" if line.startswith(("mesh", "rehearse")) else "checkpoints"
    found, said = run([command, *(places.get(word, word) for word in line.split())])
    for word, place in places.items():
        said = said.replace(place, word)
    assert (found, told in said) == (code, True), said


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_flags_of_benchmarks_are_read(file: Path) -> None:
    """As attributes, or as keys and parameters of these names where they are handed on; in the file or in what it takes
    from others."""
    flags = {action.dest for action in parser_within(f"benchmarks.{file.stem}")._actions} - {"help"}
    words, imported = set(), []
    for node in nodes(file):
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("benchmarks.") and module != DECLARES:
                imported += nodes(ROOT / f"{module.replace('.', '/')}.py")
    of_all = [*nodes(file), *imported]
    # what is only said to be a flag
    declared = {id(said) for node in of_all if is_declaration(node) for said in node.keywords}
    for node in of_all:
        match node:
            case ast.keyword(arg=str(word)) if id(node) not in declared:
                words.add(word)
            case ast.Attribute(attr=word) | ast.arg(arg=word) | ast.Constant(str(word)):
                words.add(word)
    assert flags
    assert flags <= words


def is_declaration(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it says what flags there are, or gathers what such a call is given."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("parser_of", "dict")


def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
