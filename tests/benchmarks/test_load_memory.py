"""The memory bound of loading and exporting, on a checkpoint of at least 1 GB and 4 ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.load_memory import make_checkpoint, measure, print_table, restart_peak
from tests.distributed.pool import RankPool


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each with a checkpoint in it, as the benchmark makes one; of a billion bytes in fp32."""
    paths = {dtype: tmp_path_factory.mktemp(dtype) for dtype in ("float32", "fp8")}
    assert make_checkpoint(paths["float32"] / "model", 1.0, "float32") >= 10**9
    assert make_checkpoint(paths["fp8"] / "model", 0.25, "fp8") >= 0.25 * 10**9
    return paths


def measure_and_free(directory: Path, ep_size: int) -> None:
    measure(directory, ep_size)
    restart_peak()


@pytest.mark.release
@pytest.mark.parametrize(("dtype", "ep_size"), [("float32", 4), ("fp8", 2)])
def test_no_rank_holds_much_more_than_its_shard(
    ranks: RankPool, directories: dict[str, Path], capsys: pytest.CaptureFixture[str], dtype: str, ep_size: int
) -> None:
    directory = directories[dtype]
    ranks.run(measure_and_free, 4, directory, ep_size, join_group=False, timeout=570)
    figures = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert sum(f["shard_mb"] for f in figures) >= 1000
    for f in figures:
        assert max(f["load_peak_mb"], f["export_peak_mb"]) <= 1.3 * f["shard_mb"] + 200
    print_table(figures)
    assert "OVER THE BOUND" not in capsys.readouterr().out
