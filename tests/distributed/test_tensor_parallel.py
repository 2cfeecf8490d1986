"""Heads, dense MLPs and the vocabulary divided by ranks: the first law holds of them too."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from expertmesh.sharding import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, ours, random_samples, reference
from tests.distributed.test_parity import assert_same
from tests.tiny import save_model

# of one to four ranges' length, and some that leave a rank with padding alone
SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(16)])
HEADS: dict[str, Any] = {"num_key_value_heads": 4}

CASES = {
    "aux": Case(SAMPLES, balance=0.05, z=0.01, kernel="torch-grouped", changes=HEADS),
    "accumulate": Case(SAMPLES, z=0.01, accumulation=2, gradient_checkpointing="full", changes=HEADS),
    "selective": Case(SAMPLES, balance=0.05, z=0.01, gradient_checkpointing="selective", changes=HEADS),
}
TOPOLOGIES = {
    "tp 2": Topology(2, 1, tp_size=2),
    "tp 4": Topology(4, 4, tp_size=4),
    "tp 2 x ep 2": Topology(4, 2, tp_size=2),
    "hybrid": Topology(4, 2, "hybrid", tp_size=2),
    "tp 2 x cp 2": Topology(4, 4, cp_size=2, tp_size=2),
    "tp 2 x pp 2": Topology(4, 2, pp_size=2, tp_size=2),
    "tp 2 x pp 2 x ep 2": Topology(8, 2, pp_size=2, tp_size=2),
}


@cache
def expected(name: str) -> Figures:
    return reference(CASES[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("divided")
    save_model(path, **HEADS)
    return path


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("tp 2", "aux"),
        *((layout, name) for layout in TOPOLOGIES for name in ("accumulate", "selective")),
    ],
    ids=str,
)
def test_equals_one_process(ranks: RankPool, model: Path, layout: str, name: str) -> None:
    topology = TOPOLOGIES[layout]
    found = ranks.run(ours, topology.world_size, model, topology, CASES[name])[0]
    assert_same(found, expected(name), CASES[name])
