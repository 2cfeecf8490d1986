"""Where there is no CUDA device, what is here is skipped; but of a test that takes `device` the first case runs on the
CPU, in a moment, so that the code of the tests is known to work before a card is at hand. ALL_ON_CPU=1: every case."""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs
from tests.tiny import save_model, save_tokenizer

HERE = Path(__file__).parent
NO_CARD = pytest.mark.skip(reason="needs a CUDA device")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def card_runs(ranks: RankPool, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of a model of four layers, of widths for every kernel."""
    directory = tmp_path_factory.mktemp("runs")
    save_model(directory / "model", hidden_size=128, intermediate_size=128, num_hidden_layers=4)
    save_tokenizer(directory / "model")
    return Runs(ranks, directory / "model", tiny_data, directory)


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
    return "device" in getattr(item, "fixturenames", []) and (is_first or os.environ.get("ALL_ON_CPU") == "1")
