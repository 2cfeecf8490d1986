"""The page of all flags."""

import re
from dataclasses import fields

from expertmesh.moe.util.parser import flag_of
from expertmesh.training.config.train_config import TrainConfig
from tests.training.flags_page import page


def test_every_setting_has_an_item() -> None:
    items = re.findall(r"^- (`--.*?)(?:: | \()", page(), re.MULTILINE)
    named = {flag for item in items for flag in re.findall(r"`(--[a-z0-9-]+)", item)}
    assert named >= {flag_of(setting.name) for setting in fields(TrainConfig)}
