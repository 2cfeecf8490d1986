"""The comparison with published figures: what it counts, and what it takes of others' runs."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published import FULL, NOT_FLAGS, ROWS, _within, sending, sent_in_turn
from benchmarks.rehearsed import PUBLISHED
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.costs import seconds_among
from expertmesh.training.planning.planner.hardware import preset


@pytest.mark.parametrize(
    ("experts", "top_k", "ep_size", "share"), [(8, 2, 2, 1 / 2), (8, 2, 8, 1.0), (128, 8, 8, 1 / 8), (16, 4, 16, 0.25)]
)
def test_a_token_to_each_rank_once(experts: int, top_k: int, ep_size: int, share: float) -> None:
    """Eight experts, of which tokens have two, one behind the other: on one of two ranks, or on two of eight; of 16
    ranks, on one of two nodes."""
    assert sent_in_turn(experts, top_k, ep_size) == share


def test_all_to_alls_of_hardware_on_which_less_is_sent() -> None:
    """Rows take that share of the time, on whatever link, and nothing else does."""
    plain = preset("H100", "infiniband-ndr")
    for ranks in (range(8), range(32), range(0, 64, 8)):
        for kind in ("all-to-all", "all-gather", "send"):
            size = 2**40  # beside which latency is nothing
            seconds = [seconds_among(kind, size, ranks, each, 8) for each in (plain, sending(plain, 0.25))]
            assert seconds[1] / seconds[0] == pytest.approx(0.25 if kind == "all-to-all" else 1.0, rel=1e-3)


def test_counts() -> None:
    assert _within([0.76, 1.24, 1.26, 0.5], "tok/s") == ("within 25% 2 of 4, 2 above and 2 below, geometric mean 0.88")
    assert _within([1.09, 1.11], "GiB").startswith("within 10% 1 of 2, 2 above and 0 below")


def test_rows_are_runs_that_could_be_started() -> None:
    for row in ROWS:
        assert (PUBLISHED / row.model / "config.json").is_file()
        assert row.figures
        for said, further in row.assumed:
            assert said
            given = (row.flags | further).items()
            flags: dict[str, Any] = {name: value for name, value in given if name not in NOT_FLAGS}
            assert replace(TrainConfig(model="m", dataset=["d"], bf16=True), **flags).ep_size >= 1
    assert any(FULL.items() <= row.flags.items() for row in ROWS)
