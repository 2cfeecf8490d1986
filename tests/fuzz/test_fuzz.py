"""Seeds, as many as there is time for: time bounds how many are tried, and no result depends on it."""

import time

import pytest

from tests.distributed.pool import RankPool
from tests.fuzz.fuzz import mechanisms_of, run_seeds

SECONDS, SHARES = 6.0, 1
"""Of `make test`: of each of so many parts that may run at once."""
SECONDS_OF_REST, SHARES_OF_REST = 30.0, 3
FIRST_OF_REST = 1000
ENOUGH = 15
"""Seeds that were compared, among which each axis is to be."""


@pytest.mark.parametrize("share", range(SHARES))
def test_seeds(ranks: RankPool, share: int) -> None:
    _run(ranks, share, SHARES, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES_OF_REST))
def test_more_seeds(ranks: RankPool, share: int) -> None:
    _run(ranks, FIRST_OF_REST + share, SHARES_OF_REST, SECONDS_OF_REST)


def _run(ranks: RankPool, first: int, step: int, seconds: float) -> None:
    tally = run_seeds(range(first, first + 1000 * step, step), ranks, time.monotonic() + seconds)
    unlike = [outcome for outcome in tally.outcomes if outcome.unlike is not None]
    assert not unlike, "\n".join(line for outcome in unlike for line in outcome.lines())
    # nothing was tested of what is refused
    assert 2 * len(tally.compared) >= len(tally.outcomes), "\n".join(tally.lines())
    if len(tally.compared) >= ENOUGH:
        seen = {name for outcome in tally.compared for name in mechanisms_of(outcome)}
        assert {"ep", "cp", "tp", "pp"} <= seen, "\n".join(tally.lines())
