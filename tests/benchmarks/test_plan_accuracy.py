"""The planner held against real runs, as its benchmark does it."""

import pytest

from benchmarks.plan_accuracy import MOST_ERROR, cases, error, run


@pytest.mark.slow
def test_memory_and_bytes_of_a_real_run() -> None:
    ((number, case),) = (
        (number, case) for number, case in enumerate(cases()) if str(case) == "narrow, ep 2, selective, 2 x 512"
    )
    figures = run(number, case, is_timed=False)
    assert abs(error(figures)) <= MOST_ERROR, figures
    assert figures["bytes_forecast"] == figures["bytes_measured"]
