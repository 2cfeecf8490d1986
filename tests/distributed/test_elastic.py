"""--elastic: a run that comes back with other ranks is the same run."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.sharding.topology import tp_sizes_on_nodes
from expertmesh.training import elastic
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.elastic import _dispatch, recorded_sequences_per_step
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import read
from tests.distributed.test_train_ep import assert_equal_weights
from tests.distributed.test_training import lines, start


@pytest.fixture
def common(tiny_model: Path, tiny_data: Path) -> list[object]:
    """8 rows a step on 4 ranks; a constant rate, so that where a life ends does not matter to the steps before."""
    return [
        "--model", tiny_model, "--dataset", tiny_data, "--per-device-train-batch-size", 2, "--learning-rate", "1e-3",
        "--lr-scheduler-type", "constant", "--router-z-loss-coef", "0.01", "--ep-size", 4,
    ]  # fmt: skip


@pytest.mark.slow
def test_goes_on_with_fewer_and_more_ranks(ranks: RankPool, common: list[object], tmp_path: Path) -> None:
    """4 ranks, then 3, then 8. Neither 3 nor 8 divide 8 sequences in micro-batches of 2 without a rest, and 3 divides
    no number of experts."""
    whole = tmp_path / "whole"
    assert start(ranks, 4, *common, "--output-dir", whole, "--max-steps", 6, "--save-steps", 0) == [(0, "")] * 4
    out = tmp_path / "elastic"
    for world_size, steps in ((4, 2), (3, 4), (8, 6)):
        elastic = ("--save-steps", 1, "--max-steps", steps, "--resume", "auto", "--elastic")
        assert start(ranks, world_size, *common, "--output-dir", out, *elastic) == [(0, "")] * world_size
    for name in ("loss", "grad_norm", "tokens", "z_loss"):
        found, expected = ([line[name] for line in lines(path, "loss")] for path in (out, whole))
        assert found == pytest.approx(expected, rel=1e-5)
    assert_equal_weights(read(out / "hf"), read(whole / "hf"))


def test_same_batch_before_the_first_checkpoint(tmp_path: Path) -> None:
    assert recorded_sequences_per_step("auto", tmp_path) is None
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(ExpertMeshError, match="give it, by --global-batch-size"):
        recorded_sequences_per_step("auto", tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"global_batch_size": 24}))
    assert recorded_sequences_per_step("auto", tmp_path) == 24


def test_other_ranks_keep_the_global_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the run's beginning, in as many micro-batches as it takes, on the most ranks that experts divide over."""
    monkeypatch.setattr(elastic, "raise_together", nullcontext)
    monkeypatch.setattr(elastic.dist, "broadcast_object_list", lambda *args, **kwargs: None)
    config = TrainConfig(model="-", dataset=["-"], ep_size=4, per_device_train_batch_size=2, output_dir=str(tmp_path))
    config.resume = "auto"
    assert elastic.fit_to_ranks(config, 8, Ranks(0, 4, torch.device("cpu"), dist.HashStore())) == (config, [])
    (tmp_path / "environment.json").write_text(json.dumps({"global_batch_size": 8}))
    for world_size, ep_size, forwards in ((4, 4, 1), (3, 1, 2), (2, 2, 2), (8, 4, 1)):
        found, changes = elastic.fit_to_ranks(config, 8, Ranks(0, world_size, torch.device("cpu"), dist.HashStore()))
        assert (found.ep_size, found.sequences_per_step(world_size)) == (ep_size, 8)
        assert found.micro_batches(world_size) == forwards
        assert any("for a global batch of 8 sequences as before" in line for line in changes) == (forwards == 2)
    config.global_batch_size = 12
    assert (
        elastic.fit_to_ranks(config, 8, Ranks(0, 2, torch.device("cpu"), dist.HashStore()))[0].global_batch_size == 12
    )


def test_how_tokens_travel_to_fewer_ranks() -> None:
    """What was chosen stays, but for what fewer ranks cannot have."""

    def changes(given_ep: int, world_size: int, **settings: Any) -> dict[str, Any]:
        values: dict[str, Any] = {"model": "-", "dataset": ["-"], "ep_size": 8} | settings
        return _dispatch(TrainConfig(**values), given_ep, world_size)

    assert changes(8, 16, dispatch="rank") == {}
    assert changes(4, 8, dispatch="rank") == {}
    assert changes(1, 8, dispatch="rank") == {"dispatch": "auto"}
    assert changes(1, 8, dispatch="plain", overlap_chunks=2) == {"dispatch": "auto", "overlap_chunks": 1}
    assert changes(4, 8, dispatch="node", ranks_per_node=2) == {}
    assert changes(6, 12, dispatch="node", ranks_per_node=4) == {"ranks_per_node": None}
    # given for the sake of tensor parallelism
    assert changes(1, 4, ep_size=4, ranks_per_node=4, tp_size=4) == {}
    assert changes(1, 1, ep_size=4, ranks_per_node=4) == {"ranks_per_node": None}
    assert changes(3, 3, ep_size=4, ranks_per_node=4, dispatch="rank") == {"ranks_per_node": None}


@pytest.mark.parametrize(
    ("size", "nodes", "fits"), [(4, "aaaaaabbbbbb", [1, 2]), (2, "aaabbb", [1]), (4, "aaaabbbb", [1, 2, 4])]
)
def test_tensor_parallel_groups_stay_on_a_node(size: int, nodes: str, fits: list[int]) -> None:
    assert tp_sizes_on_nodes(size, nodes) == fits


@pytest.mark.slow
def test_other_ranks_without_it_are_refused(ranks: RankPool, common: list[object], tmp_path: Path) -> None:
    common += ["--output-dir", tmp_path, "--resume", "auto", "--save-steps", 1, "--max-steps", 1]
    assert start(ranks, 4, *common) == [(0, "")] * 4
    for more, said in (
        ((), "--ep-size 4 does not divide the 2 ranks"),
        (("--ep-size", 2), "--global-batch-size 8 keeps it"),
    ):
        code, errors = start(ranks, 2, *common, *more)[0]
        assert code == 2
        assert said in errors


def test_global_batch_on_any_ranks(ranks: RankPool, common: list[object], tmp_path: Path) -> None:
    batch = ("--global-batch-size", 10, "--max-steps", 2, "--save-steps", 0, "--ep-size", 1)
    for world_size in (1, 3):
        out = tmp_path / str(world_size)
        assert start(ranks, world_size, *common, *batch, "--output-dir", out) == [(0, "")] * world_size
    assert_equal_weights(read(tmp_path / "3" / "hf"), read(tmp_path / "1" / "hf"))
