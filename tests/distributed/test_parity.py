"""The main guarantee: loss, gradients and updated weights are identical for every parallel layout.

Each case is tested against `MixtralForCausalLM` in one process on the full batch.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from expertmesh.sharding.topology import Topology
from expertmesh.training.model_setup.compiling import compilation
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, ours, random_samples, reference
from tests.tiny import relative_error, save_model

TOPOLOGIES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4), (8, 8)]
TOLERANCE = 1e-5
# 32 rows of 2 to 13 tokens, so that ranks differ in their token counts
SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(32)])

CASES = {
    "aux": Case(SAMPLES, balance=0.05, z=0.01),
    "aux-grouped": Case(SAMPLES, balance=0.05, z=0.01, kernel="torch-grouped"),
    "accumulate-2": Case(SAMPLES, z=0.01, accumulation=2),
    "accumulate-4": Case(SAMPLES, z=0.01, accumulation=4, kernel="torch-grouped"),
    "checkpointing": Case(SAMPLES, balance=0.05, gradient_checkpointing="full"),
}


# held against one process on fewer parallel layouts
OTHER_CASES = {
    "selective": Case(SAMPLES, balance=0.05, z=0.01, gradient_checkpointing="selective", kernel="torch-grouped"),
    "compiled": Case(SAMPLES, z=0.01, gradient_checkpointing="selective", settings={"compile": True}),
    "aux per layer": Case(SAMPLES, balance=0.05, settings={"router_aux_loss_per_layer": True}),
    "no reshard": Case(SAMPLES, z=0.01, accumulation=2, settings={"reshard_after_forward": False}),
}


@cache
def expected(name: str) -> Figures:
    return reference((CASES | OTHER_CASES)[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity")
    save_model(path)
    return path


def modes(world_size: int, ep_size: int) -> list[tuple[str, str]]:
    """(dense shard, case) of a parallel layout: of several that take one path through the code there, one."""
    if world_size == 8:
        # Eight ranks cost most, and add larger groups and a rank with one expert alone. What a rank does by itself, how
        # often it accumulates and by which kernel, is the same with four: each is among these, not with each other.
        return [("full", "aux"), ("full", "accumulate-4"), ("hybrid", "checkpointing")]
    if world_size == 1:
        return [("full", name) for name in CASES]  # one rank has no replicas
    # of two cases with auxiliary losses, and of two that accumulate, one: they differ in what a rank does by itself
    full = [("full", name) for name in ("aux", "accumulate-4", "checkpointing")]
    if ep_size == world_size:
        return [*full, ("hybrid", "checkpointing")]  # shards over ep are those over all ranks, on a mesh of two dims
    # the other two here, with the other kernel
    return [*full, *(("hybrid", name) for name in ("aux-grouped", "accumulate-2", "checkpointing"))]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("world_size", "ep_size", "dense_shard", "name"),
    [(*topology, *mode) for topology in TOPOLOGIES for mode in modes(*topology)],
)
def test_equals_one_process(
    ranks: RankPool, model: Path, world_size: int, ep_size: int, dense_shard: str, name: str
) -> None:
    topology = Topology(world_size, ep_size, dense_shard)  # type: ignore[arg-type]
    found = ranks.run(ours, world_size, model, topology, CASES[name])[0]
    assert_same(found, expected(name), CASES[name])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "world_size", "ep_size"),
    [
        ("selective", 1, 1),
        ("selective", 4, 2),
        ("selective", 4, 4),
        ("no reshard", 4, 2),
        ("aux per layer", 4, 2),
    ],
)
def test_other_cases_equal_one_process(ranks: RankPool, model: Path, world_size: int, ep_size: int, name: str) -> None:
    found = ranks.run(ours, world_size, model, Topology(world_size, ep_size), OTHER_CASES[name])[0]
    assert_same(found, expected(name), OTHER_CASES[name])


@pytest.mark.release
@pytest.mark.parametrize(("world_size", "backend"), [(1, None), (2, "eager")], ids=["inductor", "eager"])
def test_compiled_equals_one_process(ranks: RankPool, model: Path, world_size: int, backend: str | None) -> None:
    topology = Topology(world_size, world_size)
    found = ranks.run(_compiled, world_size, model, topology, OTHER_CASES["compiled"], backend)[0]
    assert_same(found, expected("compiled"), OTHER_CASES["compiled"])


def _compiled(path: Path, topology: Topology, case: Case, backend: str | None) -> Figures | None:
    before = compilation().graphs
    torch.compiler.reset()  # what an earlier test compiled in this process
    with torch.compiler.set_stance(force_backend=backend):
        figures = ours(path, topology, case)
    assert compilation().graphs >= before + 2, "attention and norms were to be compiled"
    return figures


def assert_same(found: Figures, want: Figures, case: Case, cancelled: float = 0.0) -> None:
    """`cancelled`: gradients below this share of the global norm are held to the tolerance at that share, and weights
    are left out, since AdamW's first step follows the signs of such gradients."""
    assert found.losses == pytest.approx(want.losses, rel=TOLERANCE, nan_ok=True)
    assert found.grad_norms == pytest.approx(want.grad_norms, rel=TOLERANCE)
    if case.balance:
        assert found.balance_loss == pytest.approx(want.balance_loss, rel=TOLERANCE)
    if case.z:
        assert found.z_loss == pytest.approx(want.z_loss, rel=TOLERANCE)
    for kind in ("grads",) if cancelled else ("grads", "weights"):
        have, expect = getattr(found, kind), getattr(want, kind)
        assert have.keys() == expect.keys()
        floor = cancelled * want.grad_norms[0]
        errors = {name: relative_error(have[name], expect[name], floor) for name in expect}
        wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        assert not wrong, (kind, wrong)
