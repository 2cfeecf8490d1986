"""The benchmark of conversion runs."""

import json
from pathlib import Path

import pytest

from benchmarks import conversion


@pytest.mark.release
def test_what_each_tensor_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversion, "SETTLE_SECONDS", 0)
    flags = ["--layers", "2", "--experts", "8", "--wider", "2", "--rounds", "1"]
    assert conversion.main([*flags, "--directory", str(tmp_path), "--json", str(tmp_path / "figures.json")]) == 0
    assert "2 layers of 8 experts, width 128" in capfd.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures.keys() == {"cp -r", "export", "merge", "convert", "start"}
    assert all(found["cpu"] > 0 for found in figures.values())
    assert 0.9 < figures["merge"]["written"] / figures["export"]["written"] < 1.1
