"""Rows that ranks share: the first law holds of them too."""

from functools import cache
from pathlib import Path

import pytest

from sharding import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, ours, random_samples, reference
from tests.distributed.test_parity import assert_same
from tests.tiny import save_model

# of one to four runs' length, and some that leave a rank with padding alone
SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(16)])

CASES = {
    "aux": Case(SAMPLES, balance=0.05, z=0.01, kernel="torch-grouped"),
    "accumulate": Case(SAMPLES, z=0.01, accumulation=2, gradient_checkpointing="full"),
    "selective": Case(SAMPLES, balance=0.05, gradient_checkpointing="selective", kernel="torch-grouped"),
}


@cache
def expected(name: str) -> Figures:
    return reference(CASES[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    save_model(path)
    return path


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "topology",
    [Topology(2, 2, "full", 2), Topology(4, 4, "full", 2), Topology(4, 2, "hybrid", 2), Topology(4, 4, "full", 4)],
    ids=str,
)
def test_equals_one_process(ranks: RankPool, model: Path, topology: Topology, name: str) -> None:
    found = ranks.run(ours, topology.world_size, model, topology, CASES[name])[0]
    assert_same(found, expected(name), CASES[name])
