"""The planner held against real runs, as its benchmark does it."""

import pytest

from benchmarks.plan_accuracy import MOST_ERROR, cases, error, run


@pytest.mark.release
@pytest.mark.parametrize("named", ["narrow, ep 2, selective, 2 x 512", "tp 2, ep 4, none, 2 x 256"])
def test_memory_and_bytes_of_a_real_run(named: str) -> None:
    ((number, case),) = ((number, case) for number, case in enumerate(cases()) if str(case) == named)
    figures = run(number, case, is_timed=False)
    assert abs(error(figures)) <= MOST_ERROR, figures
    assert figures["bytes_forecast"] == figures["bytes_measured"]
