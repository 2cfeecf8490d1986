"""The memory bound of loading and exporting, on a checkpoint of at least 1 GB and 4 ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.arms import LEFT, restart_peak
from benchmarks.load_memory import make_checkpoint, measure, print_table
from tests.distributed.pool import RankPool


def measure_and_free(directory: Path, ep_size: int) -> None:
    measure(directory, ep_size)
    restart_peak()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "gigabytes", "ep_size"), [("float32", 1.0, 4), ("fp8", 0.25, 2)])
def test_no_rank_holds_much_more_than_its_shard(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, gigabytes: float, ep_size: int
) -> None:
    """Of a model of a billion bytes in fp32."""
    assert make_checkpoint(tmp_path / "model", gigabytes, dtype) >= gigabytes * 10**9
    ranks.run(measure_and_free, 4, tmp_path, ep_size, join_group=False, timeout=570)
    figures = json.loads((tmp_path / LEFT).read_text())
    assert len(figures) == 4
    assert sum(f["shard_mb"] for f in figures) >= 1000
    for f in figures:
        assert max(f["load_peak_mb"], f["export_peak_mb"]) <= 1.3 * f["shard_mb"] + 200
    print_table(figures)
    assert "OVER THE BOUND" not in capsys.readouterr().out
