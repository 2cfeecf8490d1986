"""benchmarks.learning: what it compares, and a run of it in small."""

import json
from pathlib import Path

import pytest

from benchmarks import learning


def test_differences_of_means() -> None:
    assert learning.differences([2.0, 4.0, 1.0, 3.0, 9.0], [1.0, 3.0, 4.0, 4.0, 0.0], 2) == [0.5, -0.5]


@pytest.mark.release
def test_on_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Schedules that begin at the same rate: the losses of two steps are the same, and what is learned is not."""
    data, figures = tmp_path / "data.jsonl", tmp_path / "figures.json"
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(240)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arms = ["--arm=--lr-scheduler-type constant", "--arm=--lr-scheduler-type linear"]
    sizes = ["--hidden-size", "32", "--intermediate-size", "32", "--layers", "1", "--vocabulary", "300"]
    flags = [*arms, *sizes, "--steps", "2", "--window", "1", "--dataset", str(data), "--columns", "question", "answer"]
    assert learning.main([*flags, "--json", str(figures)]) == 0
    assert "+0.00%" in capsys.readouterr().out
    (first,), (second,) = json.loads(figures.read_text()).values()
    assert first["losses"] == second["losses"]
    assert 0 < first["held_out"] != second["held_out"] > 0
