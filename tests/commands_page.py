"""The page of all commands; `python -m tests.pages` writes it."""

import argparse
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from unittest import mock

from expertmesh.moe.util.parser import PlainHelp, Switch
from expertmesh.training.config.train_config import SETTINGS
from tests.training.flags_page import default_of, in_line, item

HEAD = """# Commands

The flags of `train_ep.py` have [their own page](flags.md). A checkpoint is a directory in any form, or a hub id.
`python -m tests.pages` makes this page.

| to | run | installed as |
| --- | --- | --- |
| train | `torchrun train_ep.py`, or `python -m expertmesh.train_ep` | `expertmesh-train` |
| write another tool's config as one of ours | [`python -m expertmesh.train_ep migrate`](#migrate) | |
| start ranks [like torchrun](output-directory.md#exit-codes) | `python -m expertmesh.launch` | `expertmesh-launch` |
| find a parallel layout that fits | [`python -m expertmesh.sharding plan`](#plan) | `expertmesh-plan` |
| dry-run one rank without GPUs | [`python -m expertmesh.sharding rehearse`](#rehearse) | |
| see or test the process groups | [`python -m expertmesh.sharding mesh`](#mesh) | |
| convert, compare and inspect checkpoints | [`python -m expertmesh.checkpoints`](#convert) | `expertmesh-checkpoints` |
| list the supported models | [`python -m expertmesh.moe families`](#families) | |
| make a run's report again, compare runs | [`python -m expertmesh.report`](#report) | |

| exit code | meaning |
| --- | --- |
| 0 | it worked |
| 1 | `verify` found a difference, `inspect` found a fault, or nothing fits (`plan`, `rehearse`) |
| 2 | a mistake in the input, or a group of `mesh --check` does not answer |
"""
TAKES_A_RUN = "Takes every flag of [`train_ep.py`](flags.md) too. [Plan a run](../how-to/choose-a-layout.md)."
TRY = "[Try the groups](../how-to/choose-a-layout.md#try-the-groups)."
CONVERT = "[Convert and verify](../how-to/convert-and-verify.md)."
COMMANDS = {
    "migrate": ("train_ep", "[Migrate](../how-to/migrate.md)."),
    "plan": ("training.cluster.commands", TAKES_A_RUN),
    "rehearse": ("training.cluster.commands", TAKES_A_RUN),
    "mesh": (
        "training.cluster.commands",
        f"With `--check` it runs under torchrun. {TRY}",
    ),
    "convert": ("checkpoints.__main__", CONVERT),
    "export": ("checkpoints.__main__", CONVERT),
    "merge": ("checkpoints.__main__", CONVERT),
    "upcycle": ("checkpoints.__main__", "[Upcycle](../how-to/upcycle.md)."),
    "verify": ("checkpoints.__main__", CONVERT),
    "inspect": ("checkpoints.__main__", CONVERT),
    "families": ("training.cluster.families_command", "[Models](models.md) has all of them."),
    "report": ("training.report.__main__", "[Watch a run](../how-to/watch-a-run.md)."),
}
"""By command: the module with its `main`, and what its parser does not say."""
ALIKE = {"plan": ("rehearse",), "convert": ("export", "merge")}
"""Commands that share flags: the first has their rows."""
A_CHECKPOINT = ("directory, or hub id", "directory to write", "model: directory in any form, or hub id")
"""What arguments are that need no row."""


class _ParserFound(Exception):
    """Has the parser that a command reads its flags with."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """The command's own."""
    parser = parser_within(f"expertmesh.{COMMANDS[command][0]}", command)
    of_commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return of_commands[0].choices[command] if of_commands else parser


def parser_within(module: str, *words: str) -> argparse.ArgumentParser:
    """That with which a module's `main` reads its flags."""

    def found(parser: argparse.ArgumentParser, *given: object) -> None:
        raise _ParserFound(parser)

    main: Callable[[list[str]], int] = import_module(module).main
    try:
        with mock.patch.object(argparse.ArgumentParser, "parse_known_args", found):
            main([*words])
    except _ParserFound as stopped:
        return stopped.parser
    raise AssertionError(f"{module} reads no flags")


def page() -> str:
    return "\n".join([HEAD, *map(section, COMMANDS)])


def section(command: str) -> str:
    """A command: what it does, how it is called, its arguments and flags."""
    parser = parser_of(command)
    usage = " ".join(parser.format_usage().removeprefix("usage: ").replace(" [-h]", "").split())
    says = [" ".join((parser.description or "").split()).rstrip(".") + ".", COMMANDS[command][1]]
    rows = [row for row in rows_of(command) if row[2].rstrip(".").lower() not in A_CHECKPOINT]
    first = next((first for first, others in ALIKE.items() if command in others), None)
    if first is not None:
        told = rows_of(first)
        says.append(f"As for [{first}](#{first}): {names_of(row for row in rows if row in told)}.")
        rows = [row for row in rows if row not in told]
    if COMMANDS[command][1] != TAKES_A_RUN:
        of_a_run = [row for row in rows if re.split(r"[` ]", row[0])[1][2:].replace("-", "_") in SETTINGS]
        rows = [row for row in rows if row not in of_a_run]
        if of_a_run:
            says.append(f"As in [`train_ep.py`](flags.md): {names_of(of_a_run)}.")
    told_of = [item(*row) for row in rows]
    return "\n".join([f"## {command}\n", f"```text\n{usage}\n```\n", " ".join(filter(None, says)), "", *told_of, ""])


def names_of(rows: Iterable[tuple[str, str, str]]) -> str:
    """Those of flags that are told of elsewhere, without their values."""
    return ", ".join(re.sub(r" [^`]+`", "`", row[0]) for row in rows)


def rows_of(command: str) -> list[tuple[str, str, str]]:
    """Its arguments and flags: names, default, what it does."""
    actions = sorted(parser_of(command)._actions, key=lambda action: bool(action.option_strings))
    return [_row(action) for action in actions if action.dest != "help"]


def _row(action: argparse.Action) -> tuple[str, str, str]:
    is_switch = isinstance(action, Switch) or action.nargs == 0
    value = "" if is_switch or not action.option_strings else f" {PlainHelp('').value_of(action)}"
    names = action.option_strings or [str(action.metavar)]
    text, default = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", in_line(action.help or ""), re.DOTALL).groups()  # type: ignore[union-attr]
    if default is None:
        default = "required" if action.required and action.option_strings else default_of(action)
    is_word = re.match(r"\w+:", text)
    told = (text if is_word else text[:1].upper() + text[1:]).rstrip(".") + "."
    return ", ".join(f"`{in_line(name + value)}`" for name in names), default, told
