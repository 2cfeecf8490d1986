"""Pages that are made of the code are as it makes them now."""

import pytest

from tests.pages import MADE, ROOT


@pytest.mark.parametrize("name", MADE)
def test_it_is_made_anew(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == MADE[name](), "run python -m tests.pages"
