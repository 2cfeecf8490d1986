"""The comparison with published figures: what it counts, and what it takes of others' runs."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published import FULL, ROWS, _in_turn, _within
from benchmarks.rehearsed import MODELS, PUBLISHED
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.step_order import PlannedRun
from expertmesh.training.planning.rehearsal.run_setting import planned
from tests.tiny import tiny_config


def sent(run: PlannedRun) -> list[float]:
    spans = (span for kind in run.measured.kinds for span in (*kind.forward, *kind.backward))
    return [each.sent for span in spans for each in span.stretches if each.then and not each.is_read]


@pytest.mark.parametrize(("ep_size", "share"), [(2, 1 / 2), (8, 1.0)])
def test_a_token_to_each_rank_once(ep_size: int, share: float) -> None:
    """Eight experts, of which tokens have two, one behind the other: on one of two ranks, or on two of eight."""
    config = TrainConfig(model="-", dataset=["-"], bf16=True, ep_size=ep_size, max_seq_length=64, dispatch="plain")
    run = planned(config, tiny_config(), 8, is_kept=False)
    assert (run.model.num_experts, run.model.top_k) == (8, 2)
    assert sent(run)
    assert sent(_in_turn(run)) == pytest.approx([share * each for each in sent(run)])


def test_counts() -> None:
    assert _within([0.76, 1.24, 1.26, 0.5], "tok/s") == ("within 25% 2 of 4, 2 above and 2 below, geometric mean 0.88")
    assert _within([1.09, 1.11], "GiB").startswith("within 10% 1 of 2, 2 above and 0 below")


def test_rows_are_runs_that_could_be_started() -> None:
    for row in ROWS:
        assert (PUBLISHED / MODELS[row.model] / "config.json").is_file()
        assert row.figures
        for said, further in row.assumed:
            assert said
            flags: dict[str, Any] = {name: value for name, value in (row.flags | further).items() if name != "in_turn"}
            assert replace(TrainConfig(model="m", dataset=["d"], bf16=True), **flags).ep_size >= 1
    assert any(FULL.items() <= row.flags.items() for row in ROWS)
