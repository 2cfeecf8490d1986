"""Which library computes a run's matmuls on a CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.cpu import matmul
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.environment import cpu_model
from expertmesh.training.model_setup import cpu_matmuls as products
from expertmesh.training.model_setup.cpu_matmuls import MatmulLibraries, choose_matmul_libraries

MIXED: dict[matmul.Product, matmul.Library]
MIXED = {"forward": "onednn", "input-gradient": "onednn", "weight-gradient": "blas"}
CONFIG = TrainConfig(model="m", dataset=["d"])


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, and what is chosen is forgotten afterwards."""
    monkeypatch.setattr(matmul, "_libraries", matmul.libraries_in_use())
    monkeypatch.setattr(dist, "broadcast_object_list", lambda found, src: None)
    monkeypatch.setattr(products, "has_onednn", lambda: True)


def choose(config: TrainConfig, ratio: float = 2.0) -> MatmulLibraries:
    ranks = Ranks(0, 1, torch.device("cpu"), dist.HashStore())
    with mock.patch.object(products, "probe_libraries", return_value=dict.fromkeys(MIXED, ratio)):
        chosen = choose_matmul_libraries(config, ranks)
    assert chosen is not None
    assert matmul.libraries_in_use() == chosen.by_product
    return chosen


def test_the_faster_is_taken_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(choose(CONFIG)) == "onednn"
    assert "2.00" in choose(CONFIG).line
    assert str(choose(CONFIG, ratio=0.9)) == "blas"
    assert choose(replace(CONFIG, cpu_matmul="blas")).line == "CPU matmuls: blas (asked for)"
    assert str(choose(replace(CONFIG, deterministic=True), ratio=0.9)) == "onednn"
    monkeypatch.setattr(products, "has_onednn", lambda: False)
    assert str(choose(CONFIG)) == "blas"


def test_none_on_a_gpu() -> None:
    assert choose_matmul_libraries(CONFIG, Ranks(0, 1, torch.device("cuda", 0), dist.HashStore())) is None


@pytest.mark.parametrize("chosen", [dict.fromkeys(MIXED, "blas"), MIXED])
def test_a_run_that_goes_on_keeps_to_what_it_began_with(
    tmp_path: Path, chosen: dict[matmul.Product, matmul.Library]
) -> None:
    said = str(MatmulLibraries(chosen, ""))
    (tmp_path / "environment.json").write_text(json.dumps({"cpu_matmul": said, "cpu": cpu_model()}))
    again = replace(CONFIG, resume="auto", output_dir=str(tmp_path))
    assert choose(again).by_product == chosen
    elsewhere = replace(CONFIG, resume=str(tmp_path / "checkpoints" / "step-1"), output_dir=str(tmp_path / "new"))
    assert choose(elsewhere).by_product == chosen
    assert str(choose(replace(again, cpu_matmul="onednn"))) == "onednn"
    assert str(choose(replace(CONFIG, output_dir=str(tmp_path)))) == "onednn"


@pytest.mark.parametrize(
    "facts",
    [
        {"cpu_matmul": "blas", "cpu": "another CPU"},
        {"cpu_matmul": "forward blas", "cpu": cpu_model()},
        {"cpu_matmul": "forward x, input-gradient blas, weight-gradient blas", "cpu": cpu_model()},
        {"cpu_matmul": 3, "cpu": cpu_model()},
        {"cpu": cpu_model()},
        [],
    ],
)
def test_what_does_not_tell_is_passed_over(tmp_path: Path, facts: Any) -> None:
    (tmp_path / "environment.json").write_text(json.dumps(facts))
    assert choose(replace(CONFIG, resume="auto", output_dir=str(tmp_path))).why.startswith("auto: onednn's speed")
