"""Pages that are made of the code are as it makes them now."""

import pytest

from tests.families.configs import skip_if_older
from tests.pages import MADE, ROOT


@pytest.mark.parametrize("name", MADE)
def test_it_is_made_anew(name: str) -> None:
    if name.endswith("migrate.md"):
        skip_if_older("has fewer arguments for training")
    assert (ROOT / name).read_text(encoding="utf-8") == MADE[name](), "run python -m tests.pages"
