"""Gate and up in one GEMM, as on GPUs, where experts are divided among ranks: here on CPUs, where only this asks for
it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from expertmesh.moe.experts import expert_mlp
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, hf_model, ours, random_samples
from tests.distributed.test_weight_gradients import _in_all_orders

WAYS: dict[str, dict[str, Any]] = {
    "kept products": dict(
        gradient_checkpointing="selective", settings={"overlap_chunks": 2, "keep_expert_products": 1}
    ),
    "kept copies": dict(gradient_checkpointing="full", settings={"reshard_after_forward": False}),
}


def case_of(way: str) -> Case:
    samples = random_samples([11, 6, 9, 5, 7, 12, 10, 8])
    return Case(samples, kernel="torch-grouped", compute_dtype=torch.bfloat16, steps=2, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_two_gemms(ranks: RankPool, tmp_path: Path, way: str) -> None:
    case = case_of(way)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    two = ranks.run(ours, 2, tmp_path, Topology(2, 2), case)[0]
    one, calls = ranks.run(_as_on_gpu, 2, ours, tmp_path, Topology(2, 2), case)[0]
    assert calls > 0
    assert one.losses == pytest.approx(two.losses, rel=1e-3)
    assert one.grads.keys() == two.grads.keys()
    for name, grad in one.grads.items():
        assert distance(grad, two.grads[name]) < 1e-2, name


@pytest.mark.sample(19)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_training_does_not_depend_on_ranks(ranks: RankPool, tmp_path: Path, ep_size: int) -> None:
    """On one rank, on two, and on two that gather experts, which have two GEMMs: as near as bf16 is."""
    case = replace(case_of("kept products"), settings={"keep_expert_products": 1})
    hf_model(case, seed=1).save_pretrained(tmp_path)
    alone: Figures = ranks.run(_as_on_gpu, 1, ours, tmp_path, Topology(1, 1), case)[0][0]
    found, calls = ranks.run(_as_on_gpu, 2, ours, tmp_path, Topology(2, ep_size), case)[0]
    assert (calls > 0) == (ep_size == 2)
    assert found.losses == pytest.approx(alone.losses, rel=1e-3)
    for name, grad in found.grads.items():
        assert distance(grad, alone.grads[name]) < 1e-2, name


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_left_for_later_have_the_same_bits(ranks: RankPool, tmp_path: Path, way: str) -> None:
    case = case_of(way)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    for (plain, found), calls in ranks.run(_as_on_gpu, 2, _in_all_orders, tmp_path, Topology(2, 2), case):
        assert calls > 0
        assert found["AB a b 1 2"].keys() == plain["AB"].keys()
        for order, grads in found.items():
            expected = plain["ABC" if "C" in order else "AB"]
            assert [name for name, grad in expected.items() if not torch.equal(grad, grads[name])] == [], order


def _as_on_gpu(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """What `function` gives where experts are taken to be on a GPU; and how often their gate and up were joined."""
    take = expert_mlp.WorkingWeights.take_joined
    with (
        mock.patch.object(expert_mlp, "computes_on_cpu", return_value=False),
        mock.patch.object(expert_mlp.WorkingWeights, "take_joined", autospec=True, side_effect=take) as taken,
    ):
        return function(*arguments), taken.call_count


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
