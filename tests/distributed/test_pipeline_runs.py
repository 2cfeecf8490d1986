"""train_ep.py with a pipeline, whole: what it says, writes and exports."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from expertmesh.checkpoints.__main__ import main as checkpoints_main
from expertmesh.sharding.topology import Topology
from expertmesh.training.config.train_config import parse_config
from expertmesh.training.planning.planner.forecasts import Forecasts
from expertmesh.training.planning.planner.model_config import find_config
from tests.checkpoints.test_encodings import SOURCES
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import round_trip
from tests.distributed.whole_runs import Runs, assert_equal_weights, read
from tests.rounding import near

LEARNING = "--learning-rate 1e-3 --router-z-loss-coef 0.01 --per-device-train-batch-size 3"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_quantized_sources(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Each stage reads, and dequantizes, its own layers."""
    SOURCES[name](tmp_path / "source")
    for out, topology in (("alone", Topology(1, 1)), ("stages", Topology(2, 1, pp_size=2))):
        ranks.run(round_trip, topology.world_size, tmp_path / "source", tmp_path / out, topology)
    stages, alone = (
        {file.name: file.read_bytes() for file in (tmp_path / out).iterdir() if file.is_file()}
        for out in ("stages", "alone")
    )
    assert stages == alone


@pytest.mark.slow
def test_a_whole_run(runs: Runs, tmp_path: Path) -> None:
    """Trains, evaluates, saves and exports, as without a pipeline: tokens count once."""
    runs = runs.of(num_hidden_layers=4)
    flags = (
        f"{LEARNING} --ep-size 2 --gradient-accumulation-steps 2 --eval-ratio 0.1 --eval-steps 2 --save-steps 2 "
        "--max-steps 4 --load-best-model-at-end"
    )
    found, expected = runs(4, f"{flags} --pp-size 2", "stages"), runs(2, flags, "alone")
    assert "layout  4 ranks on CPU = pp 2 x dp 1 x ep 2; 4 experts per rank; 12 sequences per step" in found.printed
    assert "batch: 12 sequences = 2 pipelines x 3 sequences x 2 micro-batches; dense shard full" in found.printed
    assert "pipeline: 2 stages of 2 and 2 layers (balanced by floating point operations); 1f1b, " in found.printed
    assert json.loads((found.out / "environment.json").read_text())["global_batch_size"] == 12
    for name in ("expert_tokens", "router_entropy", "loss", "grad_norm", "tokens", "target_tokens", "dropped_tokens"):
        assert np.array(found.values(name)) == near(np.array(expected.values(name))), name
    for name in ("eval_loss", "eval_target_tokens"):
        assert found.values(name) == near(expected.values(name))
    assert "drawAll" in (found.out / "report.html").read_text()
    best, hf, shards = found.checkpoint("best").resolve(), str(found.out / "hf"), str(tmp_path / "shards")
    assert best.name == expected.checkpoint("best").resolve().name
    for command in (
        ["verify", str(best), hf],
        ["inspect", str(best), "--check"],
        ["convert", str(best), shards, "--ep-size", "4"],
        ["verify", shards, hf],
    ):
        assert checkpoints_main(command) == 0


@pytest.mark.release
def test_adapters_are_merged(runs: Runs) -> None:
    flags = f"{LEARNING} --adapter lora --lora-rank 4 --max-steps 2 --save-steps 0 --merge"
    stages, alone = runs(2, f"{flags} --pp-size 2", "stages"), runs(1, flags, "alone")
    for form in ("adapter", "hf"):
        assert_equal_weights(read(stages.out / form), read(alone.out / form), 1e-4)


@pytest.mark.slow
def test_a_resumed_run_takes_what_it_is_told_or_the_default(runs: Runs, tmp_path: Path) -> None:
    """Not what the run had that it resumes, which went the same way; its config.yaml serves a run of another size."""
    runs = runs.of(num_hidden_layers=4)
    flags = f"{LEARNING} --pp-size 2 --save-steps 1 --no-export --max-steps"
    out = runs(2, f"{flags} 1 --pipeline-layers 1,3 --pipeline-schedule zero-bubble").out
    ended, through = runs(2, f"{flags} 2 --resume auto"), runs(2, f"{flags} 2", "through")
    default = "layers (balanced by floating point operations); 1f1b, "
    assert f"pipeline: 2 stages of 2 and 2 {default}" in ended.printed
    assert ended.values("loss") == near(through.values("loss"))
    other = f"--config {out}/config.yaml --resume '' --output-dir {tmp_path}/other"
    ended = runs(4, f"{other} --pp-size 4 --max-steps 1")
    assert f"pipeline: 4 stages of 1, 1, 1 and 1 {default}" in ended.printed


def test_a_run_has_the_stages_of_its_dry_run(runs: Runs) -> None:
    """Where both leave them open: those that balance floating point operations, with a head that takes as many as
    several layers."""
    runs = runs.of(num_hidden_layers=7, vocab_size=2048)
    flags = "--pp-size 2 --gradient-accumulation-steps 2 --per-device-train-batch-size 2 --max-seq-length 32"
    ended = runs(2, f"{flags} --learning-rate 1e-3 --max-steps 1 --save-steps 0 --no-export")
    ((counts, schedule),) = re.findall(r"pipeline: 2 stages of (\d and \d) layers \(.*\); ([\w-]+), ", ended.printed)
    assert (counts, schedule) == ("6 and 1", "1f1b")
    file = find_config(str(runs.model))
    config = parse_config(["--model", str(runs.model), "--dataset", str(runs.data), *flags.split()])
    assert Forecasts(file.content, file.load).with_stages(config).pipeline_layers == "6,1"
