"""There are as many cases as tests/README.md says. That each campaign runs its own is held where it runs."""

import importlib
from pathlib import Path

from tests.hostile.cases import CASES


def test_total() -> None:
    assert sum(generated + made for generated, made in CASES.values()) >= 4_000


def test_every_campaign_is_run() -> None:
    modules = [
        importlib.import_module(f"tests.hostile.{file.stem}") for file in Path(__file__).parent.glob("test_*.py")
    ]
    for name in CASES:
        assert any(hasattr(module, name) for module in modules), name
