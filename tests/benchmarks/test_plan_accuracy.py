"""The planner held against real runs, as its benchmark does it."""

import json
from dataclasses import asdict

import pytest

from benchmarks.plan_accuracy import MOST_ERROR, _hardware, cases, error, run
from expertmesh.training.planning.planner.hardware import preset


@pytest.mark.slow
def test_memory_and_bytes_of_a_real_run() -> None:
    ((number, case),) = (
        (number, case) for number, case in enumerate(cases()) if str(case) == "narrow, ep 2, selective, 2 x 512"
    )
    figures = run(number, case, is_timed=False)
    assert abs(error(figures)) <= MOST_ERROR, figures
    assert figures["bytes_forecast"] == figures["bytes_measured"]


def test_what_ranks_tell_of_their_machine_is_read_as_it_was() -> None:
    hardware = preset("H100", "infiniband-ndr")
    assert _hardware(json.loads(json.dumps(asdict(hardware)))) == hardware
