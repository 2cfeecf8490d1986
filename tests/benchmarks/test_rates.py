"""Measuring a device's rates writes what forecasts read."""

import json
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.rates import FACTORS, GROUPS, HEADS, LENGTHS, PARAMETERS, SQUARES, main
from expertmesh.training.model_setup.rates import Operator
from expertmesh.training.planning.planner.hardware import LINKS, load_measured


def test_the_rates_of_this_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tables = ((SQUARES, (8, 16)), (GROUPS, ((2, 4, 8, 16),)), (FACTORS, (4,)), (LENGTHS, (16,)), (PARAMETERS, 256))
    for table, small in tables:
        monkeypatch.setitem(table, "cpu", small)
    file = tmp_path / "card.json"
    assert main(["--device", "cpu", "--network", "ethernet-100", "--write", str(file)]) == 0
    hardware = load_measured(file)
    assert hardware.between == LINKS["ethernet-100"]
    by_class = {each.operator: each for each in hardware.rates.attained}
    # neither of these has a kernel here
    assert set(get_args(Operator)) - by_class.keys() == {
        "grouped matmul fp8", "efficient attention", "efficient attention backward"
    }  # fmt: skip
    assert by_class["grouped matmul"].size == 2 * 4 * 8 * 16
    assert by_class["attention"].size == 16
    assert HEADS > 1
    assert all(each.source.startswith("measured: ") for each in hardware.rates.attained)
    assert max(e.share for e in hardware.rates.attained if e.operator not in ("memory", "update")) <= 1
    assert hardware.rates.call > 0
    # nothing runs beside anything on one CPU
    assert hardware.rates.compute_beside == 1
    assert json.loads(file.read_text())["rates"]["constants"]


def test_links_that_were_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--links", "/nonexistent"]) == 2
    assert "--calibrate /nonexistent: is not what" in capsys.readouterr().err
