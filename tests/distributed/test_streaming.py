"""`--streaming`: the same batches with every layout, also when a run is stopped and resumed; and the cache's loss."""

import json
import shutil
from pathlib import Path

import pytest

from expertmesh.checkpoints.training_state.marker import read_marker
from tests.distributed.whole_runs import (
    SIX_STEPS,
    Ended,
    Runs,
    assert_equal_weights,
    assert_same_bits,
    batch_of_12,
    stop_at_checkpoint,
)
from tests.rounding import near

STREAMED = f"{SIX_STEPS} --logging-steps 1 --streaming --shuffle-buffer 20"
"""Windows of 20, 20 and 10 records: steps begin within them, and the fifth is in two epochs."""
LAYOUTS = {
    "2 packed": (2, "--ep-size 2 --packing --max-seq-length 128"),
    "4 ep 2 cp 2": (4, "--ep-size 2 --cp-size 2"),
    "4 ep 2 pp 2": (4, "--ep-size 2 --pp-size 2"),
    "2 accumulated": (2, "--ep-size 1 --dense-shard hybrid"),
}


def flags_of(world_size: int, flags: str) -> str:
    readers = world_size // 2 if "cp-size 2" in flags or "pp-size 2" in flags else world_size
    return f"{STREAMED} {flags} {batch_of_12(readers, 2)}"


def assert_alike(one: Ended, other: Ended, start: int = 0) -> None:
    assert other.values("tokens") == one.values("tokens")[start:]
    assert other.values("loss") == near(one.values("loss")[start:])
    assert other.values("epoch") == one.values("epoch")[start:]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_with_any_layout(layout: str, runs: Runs) -> None:
    number, flags = LAYOUTS[layout]
    alone = flags.replace("--ep-size 2", "").replace("--cp-size 2", "").replace("--pp-size 2", "")
    one = runs(1, flags_of(1, alone), "one")
    other = runs(number, flags_of(number, flags), "other")
    assert len(set(one.values("tokens"))) > 1
    assert one.values("epoch")[0] == 0
    assert one.values("epoch")[-1] >= 1
    assert_alike(one, other)
    assert_equal_weights(other.weights, one.weights)


@pytest.mark.slow
def test_killed_and_resumed(runs: Runs, tmp_path: Path) -> None:
    """On the same ranks bit for bit; on others the same batches."""
    packed = "--packing --max-seq-length 128"
    first = runs(2, flags_of(2, f"--ep-size 2 {packed}"), "first")
    stands = read_marker(first.checkpoint(4))["order"]
    assert stands["stream_window"] > 0
    for number, flags in ((2, f"--ep-size 2 {packed}"), (1, packed)):
        out = tmp_path / f"on {number}"
        stop_at_checkpoint(first.out, out)
        again = runs(number, f"{flags_of(number, flags)} --resume auto", out)
        assert f"resumed from {out / 'checkpoints' / 'step-00000004'}" in " ".join(again.printed.split())
        assert again.values("tokens") == first.values("tokens")
        assert again.values("loss") == near(first.values("loss"))
        if number == 2:
            assert again.values("loss") == first.values("loss")
            assert_same_bits(again.weights, first.weights)
        assert_equal_weights(again.weights, first.weights)
    stop_at_checkpoint(first.out, tmp_path / "cached")
    cached = f"{SIX_STEPS} {batch_of_12(2, 2)} --ep-size 2 {packed} --resume auto"
    runs.refuses(2, cached, "is of other data", "shuffle buffer 20", out=tmp_path / "cached")
    said = "that run had shuffle buffer 20, this one has 0"
    runs.refuses(2, f"{cached} --allow-changed data", said, out=tmp_path / "cached")


@pytest.mark.slow
def test_the_loss_is_that_of_the_cache(runs: Runs, tmp_path: Path) -> None:
    """Of all records in one step, with weights; a directory and two files are read one after the other."""
    rows = [json.loads(line) for line in runs.data.read_text().splitlines()]
    weighed = [{**row, "w": 1 + (number % 3)} for number, row in enumerate(rows)]
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, part in (("a", weighed[:20]), ("b", weighed[20:])):
        (parts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    flags = (
        f"--max-steps 1 --learning-rate 0 --global-batch-size {len(rows)} --logging-steps 1 --save-steps 0 --no-export "
        "--weight-column w --ep-size 2"
    )
    of_parts = Runs(runs.ranks, runs.model, parts, tmp_path)
    wanted = of_parts(2, flags, "cached").lines("loss")[0]
    found = of_parts(
        2, f"{flags} --streaming --eval-dataset {parts} --eval-dataset-split train --eval-steps 1", "stream"
    )
    assert found.lines("loss")[0]["loss"] == near(wanted["loss"])
    assert found.lines("loss")[0]["tokens"] == wanted["tokens"]
    assert found.lines("eval_loss")[0]["eval_loss"] == near(wanted["loss"])
    assert "2 files, read while training; first: 50 samples" in " ".join(found.printed.split())
    shutil.rmtree(parts)


@pytest.mark.slow
def test_wrapped_texts(runs: Runs, tmp_path: Path) -> None:
    """The same sequences on any ranks, and after a resume, there bit for bit."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": "ab" * (2 + 7 * at % 40)}) + "\n" for at in range(60)))
    flags = f"{SIX_STEPS} --logging-steps 1 --packing wrapped --max-seq-length 40 --dataset {data}"
    alone = runs(1, f"{flags} {batch_of_12(1, 2)}", "alone")
    first = runs(2, f"{flags} --ep-size 2 {batch_of_12(2, 2)}", "first")
    assert "no token is lost" in " ".join(first.printed.split())
    assert first.values("tokens")[0] == 12 * 40
    assert_alike(alone, first)
    assert_equal_weights(first.weights, alone.weights)
    stop_at_checkpoint(first.out, tmp_path / "again")
    again = runs(2, f"{flags} --ep-size 2 {batch_of_12(2, 2)} --resume auto", tmp_path / "again")
    assert again.values("loss") == first.values("loss")
    assert_same_bits(again.weights, first.weights)
