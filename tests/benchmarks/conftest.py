"""Whole runs for the benchmarks that break runs."""

import time
from collections.abc import Callable

import pytest

from benchmarks.runs import Run
from tests.distributed.pool import RankPool
from tests.distributed.whole_runs import run_main


@pytest.fixture
def run_whole(ranks: RankPool) -> Callable[[int, list[str]], Run]:
    """Runs that nobody disturbs need no processes of their own, which cost more than all else here."""

    def run(world_size: int, argv: list[str]) -> Run:
        results = ranks.run(run_main, world_size, argv, join_group=False)
        return Run(max(code for code, _ in results), "".join(errors for _, errors in results), time.time())

    return run
