"""The page of all commands has them all, with their flags."""

import argparse
import re

import pytest

from tests.commands_page import COMMANDS, page, parser_of
from tests.test_flags_of_commands import LINES, MODULES


def test_every_command_has_a_section() -> None:
    assert {line.split()[1] for name, line in LINES.items() if line.split()[0] != "report"} | {"report"} == set(
        COMMANDS
    )
    assert {f"expertmesh.{module}" for module, _ in COMMANDS.values()} == set(MODULES.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_row(command: str) -> None:
    (section,) = re.findall(rf"^## {command}\n(.*?)(?=^## |\Z)", page(), re.MULTILINE | re.DOTALL)
    actions = [action for action in parser_of(command)._actions if action.dest != "help"]
    names = [name for action in actions for name in action.option_strings or [str(action.metavar)]]
    assert all(re.search(rf"[` ]{name}\b", section) for name in names)
    assert not any(isinstance(action, argparse._SubParsersAction) for action in actions)
