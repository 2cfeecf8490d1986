"""What commands of this folder have in common: flags, the line that says what was measured where, tables, files."""

import argparse
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, get_args

import torch

from expertmesh.moe.util.atomic_write import whole
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.terminal import ends_with_reader
from expertmesh.moe.util.versions import installed_version
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.training.environment import cpu_model
from expertmesh.training.planning.columns import Column, open_console, print_table

P = ParamSpec("P")
PACKAGES = ("torch", "transformers", "peft", "trl", "triton", "megablocks", "stanford-stk", "quack-kernels")
"""Whose versions are said, where they are installed."""


def new_file(name: str) -> Path:
    """A file to be written, whose directory is there."""
    file = Path(name).absolute()
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {file.parent}")
    return file


FLAGS: dict[str, tuple[Callable[[str], Any] | tuple[str, ...], str]] = {
    "ranks": (int, "processes, each of one thread"),
    "ep_size": (int, "ranks over which experts are sharded"),
    "tp_size": (int, "ranks that divide heads (tensor parallelism)"),
    "pp_size": (int, "parts that the layers are in (pipelines)"),
    "hidden_size": (int, "of the model"),
    "intermediate_size": (int, "of an expert"),
    "layers": (int, "of the model"),
    "vocabulary": (int, "tokens of the model's"),
    "experts": (int, "of each layer"),
    "top_k": (int, "experts of a token"),
    "rows": (int, "sequences per rank and micro-batch"),
    "micro_batch": (int, "sequences per micro-batch"),
    "sequences": (int, "of a global batch"),
    "seq_length": (int, "tokens of a sequence"),
    "max_seq_length": (int, "tokens of a sequence, at most"),
    "gradient_checkpointing": (get_args(Checkpointing), "as train_ep.py's"),
    "steps": (int, "timed in each turn, after one that is not"),
    "rounds": (int, "turns of each variant"),
    "repetitions": (int, "in each turn"),
    "seed": (int, "of the data, the model and the order of training"),
    "json": (new_file, "also write all figures here"),
}
"""Those of several commands: what a value is, or which there are, and the help."""


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The parser of a command.

    Args:
        doc: of its module.
        defaults: of those flags of `FLAGS` that it has; a list: the flag takes several values.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind, meaning = FLAGS[name]
        values: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        number = "+" if isinstance(default, list) else None
        parser.add_argument(f"--{name.replace('_', '-')}", **values, nargs=number, default=default, help=meaning)
    return parser


def command(main: Callable[P, int]) -> Callable[P, int]:
    """A `main` that ends where nobody reads on, and with one line and exit code 2 at an error of a user's."""

    @ends_with_reader
    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except ExpertMeshError as error:
            name = Path(inspect.getfile(main)).stem
            print(f"benchmarks.{name}: error: {error}", file=sys.stderr, flush=True)
            return 2

    return run


def machine(device: str = "cpu") -> str:
    place = f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"
    if device != "cpu":
        place = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    versions = [f"{name} {version}" for name in PACKAGES if (version := installed_version(name))]
    return ", ".join([place, f"Python {platform.python_version()}", *versions])


def settings_line(arguments: argparse.Namespace, *more: str, device: str = "cpu") -> str:
    """What was measured where: the machine, all flags that say something, and more."""
    said = []
    for name, value in vars(arguments).items():
        if name in ("json", "worker") or value is None or value is False or value in ("", []):
            continue
        words = "" if value is True else " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        said.append(f"{name.replace('_', ' ')} {words}".rstrip())
    return "; ".join([machine(device), ", ".join(said), *more])


def print_rows(rows: Sequence[Mapping[str, object]], text: Sequence[str] = ()) -> None:
    """A table of rows that all have the same columns. The first of these, and those named in `text`, are of words."""
    if not rows:
        return
    first = next(iter(rows[0]))
    cells = {name: [str(row[name]) for row in rows] for name in rows[0]}
    columns = [Column(name, of_column, is_text=name == first or name in text) for name, of_column in cells.items()]
    print_table(open_console(), columns)


def write_json(file: Path | None, figures: object) -> None:
    """Where a file is given."""
    if file is not None:
        with whole(file) as partial:
            partial.write_text(json.dumps(figures, indent=1, default=str))


def write_lines(records: Sequence[Mapping[str, Any]], file: Path) -> Path:
    """One JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
