"""The page of all flags: `python -m tests.training.flags_page > docs/reference/flags.md`."""

from argparse import Action
from typing import Any

from expertmesh.moe.util.parser import PlainHelp, Switch
from expertmesh.training.config.train_config import SETTINGS, make_parser

HEAD = """# Flags of train_ep.py

After this page you know every flag. A flag may also be a key of the YAML file of `--config`, with underscores for
dashes, and an argument of `expertmesh.load`. Flags have the names of `transformers.TrainingArguments`, with `-` or `_`.
A switch takes no value, or `true` or `false`.

- Flags win over the file, also over a key that does not go together with them, such as `warmup_ratio` with
  `--warmup-steps`; a note names both. Only a key that says which kind of run it is stays, and the flag is refused:
  FIRM.
- A flag or key of another tool is refused; the error says [what to give instead](../how-to/migrate.md). One that asks
  for what is done anyway, such as `fp16: false`, is ignored.
- A flag or key that is given twice is refused. A list takes all its values after one flag: `--dataset a b`.
- A flag without effect beside the others, such as `--dispatch rank` without `--ep-size`, is no error; a note names it.

This page is made by a command:

```sh
python -m tests.training.flags_page > docs/reference/flags.md
```
"""


def page() -> str:
    """All flags by group, as Markdown."""
    firm = [f"`{name}`" for name, setting in SETTINGS.items() if setting.metadata.get("is_firm")]
    parts = [HEAD.replace("FIRM", ", ".join(firm))]
    for group in make_parser()._action_groups:
        rows = [_row(action) for action in group._group_actions if action.dest != "help"]
        if rows:
            title = "General" if group.title == "options" else group.title
            parts.append(
                "\n".join([f"## {title}\n", "| flag | default | what it does |", "| --- | --- | --- |", *rows, ""])
            )
    return "\n".join(parts)


def _row(action: Action) -> str:
    names = [flag for flag in action.option_strings if not flag.startswith("--no-")]
    shown = "" if isinstance(action, Switch) else f" {PlainHelp('').value_of(action)}"
    flags = ", ".join(f"`{flag}{shown}`" for flag in names)
    told = in_cell(action.help or "").rstrip(".") + "."
    needs = SETTINGS[action.dest].metadata["needs"] if action.dest in SETTINGS else ()
    if words := " and ".join(in_cell(each.in_words) for each in needs if each.in_words):
        told += f" Has an effect only with {words}."
    return f"| {flags} | {default_of(action)} | {told} |"


def default_of(action: Action) -> str:
    """In a cell of a table."""
    default: Any = action.default
    if isinstance(default, bool):
        return f"on; `--no-{action.option_strings[0][2:]}`" if default else "off"
    if default is None or default in ("", []):
        return ""
    return f"`{' '.join(map(str, default)) if isinstance(default, list) else default}`"


def in_cell(text: str) -> str:
    """A help text, argparse's escapes undone, in a cell of a table."""
    return " ".join(text.replace("%%", "%").replace("|", "\\|").split())


if __name__ == "__main__":
    print(page(), end="")
