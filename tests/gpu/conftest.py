"""Where there is no CUDA device, what is here is skipped; but of a test that takes `device` the first case runs on the
CPU, in a moment, so that the code of the tests is known to work before a card is at hand."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NO_CARD = pytest.mark.skip(reason="needs a CUDA device")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == HERE and not runs_on_a_cpu(item):
            item.add_marker(NO_CARD)


def runs_on_a_cpu(item: pytest.Item) -> bool:
    """By its own place among the cases of its test, whatever else is collected."""
    callspec = getattr(item, "callspec", None)
    is_first = callspec is None or not any(callspec.indices.values())
    return is_first and "device" in getattr(item, "fixturenames", [])
