"""The whole of training in a pipeline, for the families of test_parity.py: dense first layers, so that a stage may have
no experts, shared experts, correction biases, sliding windows, layers that carry a state."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, hf_model, ours, reference
from tests.families.configs import tiny_config
from tests.families.test_parity import (
    CANCELLED,
    SAMPLES,
    TOLERANCE,
    WEIGHT_TOLERANCE,
    compare,
    has_auxiliary_loss,
)
from tests.tiers import REPRESENTATIVES, two_diagonals

FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
INTERLEAVED: dict[str, Any] = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}

CASES: dict[str, tuple[Topology, dict[str, Any], dict[str, Any]]] = {
    "pp 2": (Topology(2, 1, pp_size=2), {}, {"pipeline_layers": "1,3"}),
    "pp 2, ep 2": (Topology(4, 2, pp_size=2), SELECTIVE, INTERLEAVED),
    "pp 2, dp 2": (Topology(4, 1, pp_size=2), FULL, {"pipeline_layers": "3,1"}),
    # the pooled balancing loss depends on how a batch is cut into micro-batches: of a single one it is the family's own
    "pp 4": (Topology(4, 1, pp_size=4), {"kernel": "torch-grouped", "balance": 0.05, "accumulation": 1}, {}),
    "pp 2, dp 2, ep 2": (Topology(8, 2, "hybrid", pp_size=2), SELECTIVE, {}),
}
"""A parallel layout, what its model is trained with, and how the pipeline is cut: with a stage of one layer, the first,
which has no experts in families with dense layers."""


def four_layers(family: str) -> dict[str, Any]:
    """The family's tiny model with another layer, of the kind of its last one."""
    kinds = getattr(tiny_config(family).get_text_config(), "layer_types", None)
    return {"num_hidden_layers": 4} | ({} if kinds is None else {"layer_types": [*kinds, kinds[-1]]})


def case_of(family: str, name: str) -> Case:
    """Without what cuts the pipeline."""
    more = {"accumulation": 4, "z": 0.01} | CASES[name][1]
    if not has_auxiliary_loss(family):
        more |= {"balance": 0.0, "z": 0.0}
    return Case(SAMPLES, family=family, steps=2, changes=four_layers(family), **more)


def expected(family: str, name: str) -> Figures:
    return _expected(family, case_of(family, name).balance)


@cache
def _expected(family: str, balance: float) -> Figures:
    return reference(replace(case_of(family, "pp 2"), balance=balance), seed=1)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("family", "name"), two_diagonals(REPRESENTATIVES, list(CASES)))
def test_equals_one_process(ranks: RankPool, tmp_path: Path, family: str, name: str) -> None:
    """Losses, gradients and, after two clipped updates by AdamW, weights. What stages send one another is alike in all
    families, and where their layers differ is cut in all of them by test_pipelines_all.py."""
    topology, case = CASES[name][0], case_of(family, name)
    hf_model(case, seed=1).save_pretrained(tmp_path)
    cut = replace(case, settings=CASES[name][2])
    found = ranks.run(ours, topology.world_size, tmp_path, topology, cut)[0]
    want = expected(family, name)
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE)
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    if case.balance:
        assert found.balance_loss == pytest.approx(want.balance_loss, rel=TOLERANCE)
    if case.z:
        assert found.z_loss == pytest.approx(want.z_loss, rel=TOLERANCE)
    # micro-batches are summed up one after the other
    compare(found.grads, want.grads, CANCELLED * want.grad_norms[0], 2 * TOLERANCE)
    compare(found.weights, want.weights, 0.0, WEIGHT_TOLERANCE)
