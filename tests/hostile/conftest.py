"""Runs a campaign of cases in a watched process, and holds its number of cases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.cases import CASES
from tests.hostile.harness import MULTIPLIER, Campaign, run_campaign


@pytest.fixture
def campaign(tmp_path: Path, _own_cache: None) -> Callable[..., None]:
    """A function that runs a campaign, by its name in CASES, with so many generated cases and further arguments."""

    def run(function: Campaign, *args: Any) -> None:
        num_generated, num_made = CASES[function.__name__]
        directory = tmp_path / "watched"
        directory.mkdir()
        num_cases, num_refused, seconds = run_campaign(function, directory, num_generated * MULTIPLIER, *args)
        print(f"{function.__name__}: {num_cases:,} cases, {num_refused:,} refused, {seconds:.1f} s of CPU")
        assert num_cases >= num_generated * MULTIPLIER + num_made, (function.__name__, num_cases)

    return run
