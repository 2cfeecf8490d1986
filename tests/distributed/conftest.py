"""Fixtures of whole runs."""

from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import Runs


@pytest.fixture
def runs(ranks: RankPool, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Runs:
    """Of the tiny model over its data, each in a directory of `tmp_path`."""
    return Runs(ranks, tiny_model, tiny_data, tmp_path)
