"""The page of all flags, and the module of keyword arguments."""

import re
from dataclasses import fields
from pathlib import Path

from expertmesh.moe.util.parser import flag_of
from expertmesh.training.config.train_config import TrainConfig
from tests.training.flags_page import page
from tests.training.load_settings_file import module

ROOT = Path(__file__).parents[2]


def test_they_are_what_the_commands_print() -> None:
    for name, made in (("docs/reference/flags.md", page()), ("training/config/load_settings.py", module())):
        assert (ROOT / name).read_text(encoding="utf-8") == made, "make it anew: its first lines say how"


def test_every_setting_has_a_row_of_three_cells() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z0-9-]+)", row.split(" | ")[0])}
    assert named >= {flag_of(setting.name) for setting in fields(TrainConfig)}
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
