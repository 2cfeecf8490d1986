"""--elastic: a run that comes back with other ranks is the same run."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.sharding.topology import tp_sizes_on_nodes
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.start import elastic
from expertmesh.training.start.elastic import recorded_sequences_per_step
from tests.distributed.whole_runs import Runs, assert_equal_weights
from tests.rounding import near

STEADY = (
    "--per-device-train-batch-size 2 --learning-rate 1e-3 --lr-scheduler-type constant --router-z-loss-coef 0.01 "
    "--max-steps 6"
)
"""A constant rate, so that where a life ends does not matter to the steps before."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "lives"),
    [
        # neither 3 nor 8 divide 8 sequences in micro-batches of 2 without a rest, and 3 divides no number of experts
        ("--ep-size 4", [(4, 2, ""), (3, 4, "--ep-size 1 instead of 4"), (8, 6, "")]),
        # of a pipeline the stages stay
        ("--pp-size 2 --ep-size 2 --pipeline-layers 1,1", [(4, 3, ""), (2, 6, "--ep-size 1 instead of 2")]),
    ],
    ids=["ep", "pp"],
)
def test_goes_on_with_fewer_and_more_ranks(runs: Runs, flags: str, lives: list[tuple[int, int, str]]) -> None:
    whole = runs(4, f"{STEADY} {flags} --save-steps 0", "whole")
    for world_size, steps, told in lives:
        ended = runs(world_size, f"{STEADY} {flags} --save-steps 1 --max-steps {steps} --resume auto --elastic")
        assert ended.errors == ""
        assert told in ended.printed
    for name in ("loss", "grad_norm", "tokens", "z_loss"):
        assert ended.values(name) == near(whole.values(name))
    assert_equal_weights(ended.weights, whole.weights)
    if "--pp-size" in flags:
        runs.refuses(1, f"{STEADY} {flags} --resume auto --elastic", "--pp-size 2 does not divide 1 rank; use 1")


def test_same_batch_before_the_first_checkpoint(tmp_path: Path) -> None:
    assert recorded_sequences_per_step(None, tmp_path) is None
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(ExpertMeshError, match="give --global-batch-size"):
        recorded_sequences_per_step(None, tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"global_batch_size": 24}))
    assert recorded_sequences_per_step(None, tmp_path) == 24


def test_other_ranks_keep_the_global_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the run's beginning, in as many micro-batches as it takes, on the most ranks that experts divide over."""
    monkeypatch.setattr(elastic, "raise_together", nullcontext)
    monkeypatch.setattr(elastic.dist, "broadcast_object_list", lambda *args, **kwargs: None)
    config = TrainConfig(model="-", dataset=["-"], ep_size=4, per_device_train_batch_size=2, output_dir=str(tmp_path))
    config.resume = "auto"

    def fit(world_size: int) -> tuple[TrainConfig, list[str]]:
        return elastic.fit_to_ranks(config, 8, Ranks(0, world_size, torch.device("cpu"), dist.HashStore()), None)

    assert fit(4) == (config, [])
    (tmp_path / "environment.json").write_text(json.dumps({"global_batch_size": 8}))
    for world_size, ep_size, forwards in ((4, 4, 1), (3, 1, 2), (2, 2, 2), (8, 4, 1)):
        found, changes = fit(world_size)
        assert (found.ep_size, found.sequences_per_step(world_size)) == (ep_size, 8)
        assert found.micro_batches(world_size) == forwards
        assert any("for the same global batch of 8 sequences" in line for line in changes) == (forwards == 2)
    config.global_batch_size = 12
    assert fit(2)[0].global_batch_size == 12


@pytest.mark.parametrize(
    ("size", "nodes", "fits"), [(4, "aaaaaabbbbbb", [1, 2]), (2, "aaabbb", [1]), (4, "aaaabbbb", [1, 2, 4])]
)
def test_tensor_parallel_groups_stay_on_a_node(size: int, nodes: str, fits: list[int]) -> None:
    assert tp_sizes_on_nodes(size, nodes) == fits


@pytest.mark.slow
def test_other_ranks_without_it_are_refused(runs: Runs) -> None:
    flags = f"{STEADY} --resume auto --save-steps 1 --max-steps 1 --ep-size"
    runs(4, f"{flags} 4")
    runs.refuses(2, f"{flags} 4", "--ep-size 4 does not divide the 2 ranks")
    runs.refuses(2, f"{flags} 2", "--global-batch-size 8 keeps it")


def test_global_batch_on_any_ranks(runs: Runs) -> None:
    alone, three = (runs(size, f"{STEADY} --global-batch-size 10 --max-steps 2", str(size)) for size in (1, 3))
    assert_equal_weights(three.weights, alone.weights)
