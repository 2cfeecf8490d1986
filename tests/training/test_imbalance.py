"""How uneven a forecast takes routing to be."""

import json
from pathlib import Path

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.training.model_setup.rates import natural_imbalance
from expertmesh.training.planning.imbalance import imbalance_of, read_imbalance


def metrics(folder: Path, *records: dict[str, object]) -> str:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_a_number_or_nothing() -> None:
    assert read_imbalance("1.5") == 1.5
    assert imbalance_of(read_imbalance(None), 128) == natural_imbalance(128)
    assert imbalance_of(1.0, 128) == 1.0
    # all tokens to one expert
    assert imbalance_of(8.0, 8) == 8.0
    with pytest.raises(ExpertMeshError, match="--imbalance 100: the busiest of 8 experts has at most 8 times the mean"):
        imbalance_of(100.0, 8)


def test_what_a_run_has_logged(tmp_path: Path) -> None:
    early: dict[str, object] = {"step": 1, "expert_load_max_over_mean": 9.0, "expert_tokens": [[9, 0], [9, 0]]}
    largest: dict[str, object] = {"step": 2, "expert_load_max_over_mean": 1.75}
    assert read_imbalance(metrics(tmp_path, early, largest, {"step": 3, "loss": 1.0})) == 1.75
    # the mean over layers, of which the logged figure is the largest
    layers: dict[str, object] = {"step": 2, "expert_load_max_over_mean": 2.0, "expert_tokens": [[4, 0], [2, 2]]}
    assert read_imbalance(metrics(tmp_path, early, layers)) == 1.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("0.9", "--imbalance 0.9: must be 1 "),
        ("nan", "--imbalance nan: must be 1 "),
        ("/nonexistent", "--imbalance /nonexistent: is not a readable metrics.jsonl"),
    ],
)
def test_what_will_not_do(given: str, said: str) -> None:
    with pytest.raises(ExpertMeshError, match=said):
        read_imbalance(given)


@pytest.mark.parametrize("last", [{"loss": 1.0}, {"expert_load_max_over_mean": None}])
def test_a_file_without_it(tmp_path: Path, last: dict[str, object]) -> None:
    with pytest.raises(ExpertMeshError, match="no line has expert_load_max_over_mean"):
        read_imbalance(metrics(tmp_path, last))
