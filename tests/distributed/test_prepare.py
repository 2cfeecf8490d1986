"""`--prepare-only`: the cache is filled without weights, and a run on ranks finds it."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.whole_runs import Runs, Told, tell

SKIPPED = "*.safetensors"


def cached(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*.arrow")}


def tell_cached(argv: list[str], cache: Path) -> Told:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        return tell(argv)


def test_a_run_finds_what_was_prepared(runs: Runs, tmp_path: Path) -> None:
    """By another directory of the model, and with another layout."""
    bare, cache = tmp_path / "bare", tmp_path / "cache"
    shutil.copytree(runs.model, bare, ignore=shutil.ignore_patterns(SKIPPED))
    assert not list(bare.glob(SKIPPED))
    prepared = Runs(runs.ranks, bare, runs.data, tmp_path)
    ended = prepared(1, "--prepare-only --ep-size 2 --eval-ratio 0.1", "prepared", call=tell_cached, given=[cache])
    said = " ".join(ended.printed.split())
    assert said.startswith("note: --prepare-only in one process ignores --ep-size 2")
    assert " trained), about " in said
    assert f"prepared: a run with the same data flags finds these samples in {cache / 'expertmesh'}" in said
    assert not ended.out.exists()
    before = cached(cache)
    assert len(before) == 2, "records, and their tokens"
    flags = "--ep-size 2 --max-steps 1 --save-steps 0 --no-export --eval-ratio 0.1 --packing"
    run = runs(2, flags, "run", call=tell_cached, given=[cache])
    assert run.lines("loss")
    assert cached(cache) == before
