"""The page of all flags; `python -m tests.pages` writes it."""

import re
import textwrap
from argparse import Action
from typing import Any

from expertmesh.moe.util.parser import PlainHelp, Switch
from expertmesh.training.config.optimizers import OUR_OPTIMIZERS
from expertmesh.training.config.train_config import SETTINGS, make_parser

EVERY_OPTIMIZER = f"--optim {' or '.join(entry.name for entry in OUR_OPTIMIZERS)}"
"""What a flag needs that any optimizer of ours heeds: nothing to tell."""

HEAD = """# Flags of train_ep.py

A flag may also be a key of `--config`'s YAML file (with underscores) and an argument of `expertmesh.load`. Names are
those of `transformers.TrainingArguments`, with `-` or `_`. Defaults are in parentheses. A switch is off unless it says
on, and takes no value, or `true` or `false`; a list takes its values after one flag: `--dataset a b`.

- Flags win over the file, but one that contradicts these keys is refused: FIRM.
- A flag or key of another tool is refused, with [what to give instead](../how-to/migrate.md).
- A flag that has no effect with the others is no error; a note names it.

`python -m tests.pages` makes this page.
"""


def page() -> str:
    """All flags by group, as Markdown."""
    firm = [f"`{name}`" for name, setting in SETTINGS.items() if setting.metadata.get("is_firm")]
    parts = [HEAD.replace("FIRM", ", ".join(firm))]
    for group in make_parser()._action_groups:
        rows = [_row(action) for action in group._group_actions if action.dest != "help"]
        if rows:
            title = "General" if group.title == "options" else group.title
            parts.append("\n".join([f"## {title}\n", *rows, ""]))
    return "\n".join(parts)


def _row(action: Action) -> str:
    names = [flag for flag in action.option_strings if not flag.startswith("--no-")]
    shown = "" if isinstance(action, Switch) and not action.words else f" {PlainHelp('').value_of(action)}"
    flags = ", ".join([f"`{names[0]}{shown}`", *(f"`{flag}`" for flag in names[1:])])
    told = in_line(action.help or "").rstrip(".") + "."
    needs = SETTINGS[action.dest].metadata["needs"] if action.dest in SETTINGS else ()
    words = " and ".join(in_line(each.in_words) for each in needs if each.in_words)
    if words and not told.startswith(f"With {words}") and words != EVERY_OPTIMIZER:
        told += f" Needs {re.sub(' [0-9] or more', '', words)}."
    return item(flags, default_of(action), told)


def item(names: str, default: str, told: str) -> str:
    """A flag, its default and what it does, as an item of a list."""
    return textwrap.fill(
        f"- {names}{f' ({default})' if default else ''}: {told}",
        120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def default_of(action: Action) -> str:
    """As pages show it."""
    default: Any = action.default
    if isinstance(default, bool):
        return f"on; `--no-{action.option_strings[0][2:]}`" if default else ""
    if default is None or default in ("", []):
        return ""
    return f"`{' '.join(map(str, default)) if isinstance(default, list) else default}`"


def in_line(text: str) -> str:
    """A help text, argparse's escapes undone, in one line."""
    return " ".join(text.replace("%%", "%").split())
