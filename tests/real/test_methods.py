"""Twenty steps of DPO, of KTO and of distillation on a real model: what they are judged by goes the right way, and they
take the memory that was forecast."""

from pathlib import Path

import pytest

from benchmarks.real import METHODS, Batch, learned
from tests.real.conftest import KEPT, assert_memory_as_forecast


@pytest.mark.release
@pytest.mark.parametrize("method", ["DPO", "KTO", "distillation"])
def test_it_learns(batch: Batch, tmp_path: Path, method: str) -> None:
    ran, how = learned(method, KEPT, 2, batch.records, tmp_path / "run"), METHODS[method]
    losses, judged = ran.values("loss"), ran.values(how.judged_by)
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert judged[-1] > judged[0] + 1 if how.rises else judged[-1] < judged[0] / 2


@pytest.mark.release
@pytest.mark.usefixtures("freed_memory_given_back")
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_as_forecast(batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr("benchmarks.real.LEARNED_IN", 2)
    assert_memory_as_forecast(learned(method, KEPT, 2, batch.records, tmp_path / "run"))
