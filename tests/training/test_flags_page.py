"""The page of all flags."""

import re
from dataclasses import fields

from expertmesh.moe.util.parser import flag_of
from expertmesh.training.config.train_config import TrainConfig
from tests.training.flags_page import page


def test_every_setting_has_a_row_of_three_cells() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z0-9-]+)", row.split(" | ")[0])}
    assert named >= {flag_of(setting.name) for setting in fields(TrainConfig)}
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
