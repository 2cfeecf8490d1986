"""Pipelines: loss, gradients and updated weights are those of one process, however layers are spread over ranks."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import expertmesh
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool
from tests.distributed.reference import Case, Figures, ours, random_samples, reference
from tests.distributed.test_generate import PROMPTS, hf_continuations
from tests.distributed.test_generate import ours as continuations
from tests.distributed.test_parity import assert_same
from tests.tiny import save_model

SAMPLES = random_samples([2 + (7 * i) % 12 for i in range(32)])
LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
CASE = Case(SAMPLES, z=0.01, accumulation=4, changes=LAYERS)
DEEP = 9
PARTS = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (2, 2, 2)]


@cache
def expected() -> Figures:
    return reference(CASE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    save_model(path, **LAYERS)
    return path


@pytest.mark.sample(2)
@pytest.mark.parametrize(("pp", "dp", "ep"), PARTS)
def test_equals_one_process(ranks: RankPool, model: Path, pp: int, dp: int, ep: int) -> None:
    topology = Topology(pp * dp * ep, ep, pp_size=pp)
    found = ranks.run(ours, topology.world_size, model, topology, CASE)[0]
    assert_same(found, expected(), CASE)


@pytest.mark.release
@pytest.mark.parametrize(("pp", "dp", "ep"), PARTS)
@pytest.mark.parametrize("per_layer", [False, True])
def test_bits_are_those_without_a_pipeline(
    ranks: RankPool, model: Path, pp: int, dp: int, ep: int, per_layer: bool
) -> None:
    """The balancing loss, which depends on how a batch is cut into micro-batches, included."""
    case = replace(CASE, balance=0.05, settings={"router_aux_loss_per_layer": per_layer})
    assert_same_bits(ranks, model, Topology(pp * dp * ep, ep, pp_size=pp), case, {})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("schedule", "chunks", "pp", "dp", "ep"),
    [
        ("interleaved", 2, 2, 1, 1),
        ("interleaved", 2, 2, 2, 2),
        ("zero-bubble", 1, 2, 1, 2),
        ("zero-bubble", 1, 4, 1, 1),
        ("zero-bubble", 2, 2, 2, 1),
    ],
)
def test_every_schedule_gives_the_same_bits(
    ranks: RankPool, model: Path, schedule: str, chunks: int, pp: int, dp: int, ep: int
) -> None:
    case = replace(CASE, balance=0.05, gradient_checkpointing="selective", kernel="torch-grouped")
    settings = {"pipeline_schedule": schedule, "pipeline_chunks": chunks}
    assert_same_bits(ranks, model, Topology(pp * dp * ep, ep, pp_size=pp), case, settings)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep")
    save_model(path, num_hidden_layers=DEEP)
    return path


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(20))
def test_random_cuts_and_schedules(ranks: RankPool, deep: Path, seed: int) -> None:
    """Stages of any lengths, however many of them a rank has, and any number of micro-batches."""
    random = Random(seed)
    pp = random.choice([2, 3, 4])
    chunks = random.randint(1, DEEP // pp)
    schedule = random.choice(["zero-bubble", "1f1b" if chunks == 1 else "interleaved"])
    ends = [0, *sorted(random.sample(range(1, DEEP), pp * chunks - 1)), DEEP]
    layers = ",".join(str(end - start) for start, end in pairwise(ends))
    settings = {"pipeline_schedule": schedule, "pipeline_chunks": chunks, "pipeline_layers": layers}
    changes = {"num_hidden_layers": DEEP}
    case = replace(CASE, balance=0.05, steps=1, accumulation=random.randint(1, 9), changes=changes)
    assert_same_bits(ranks, deep, Topology(pp, 1, pp_size=pp), case, settings)


def assert_same_bits(ranks: RankPool, model: Path, topology: Topology, case: Case, settings: dict[str, Any]) -> None:
    """Losses and gradients are, bit for bit, those of a model that is not cut, with the same micro-batches."""
    whole = Topology(topology.ranks_per_stage, topology.ep_size)
    cut = replace(case, settings=case.settings | settings)
    found = ranks.run(ours, topology.world_size, model, topology, cut)[0]
    want = ranks.run(ours, whole.world_size, model, whole, case)[0]
    assert (found.losses[0], found.balance_loss, found.z_loss) == (want.losses[0], want.balance_loss, want.z_loss)
    assert found.grads.keys() == want.grads.keys()
    assert not [name for name, grad in found.grads.items() if not torch.equal(grad, want.grads[name])]
    # the norm's square is summed up in another order
    assert_same(found, want, case)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("pp", "dp", "ep", "chunks"), [(2, 1, 2, 1), (2, 2, 1, 1), (2, 1, 1, 2)])
def test_generates_through_the_stages(ranks: RankPool, model: Path, pp: int, dp: int, ep: int, chunks: int) -> None:
    topology = Topology(pp * dp * ep, ep, pp_size=pp)
    case = Case([], settings={"pipeline_chunks": chunks})
    found = ranks.run(continuations, topology.world_size, model, topology, PROMPTS, [], case)
    assert found == [hf_continuations(PROMPTS, eos=-1, **LAYERS)] * topology.world_size


def _evaluated(model: Path, settings: dict[str, Any]) -> tuple[float, int]:
    engine = expertmesh.load(str(model), use_cpu=True, cpu_matmul="onednn", **settings)
    rows = [{"input_ids": [[*range(3, 9 + i)]], "labels": [[-100] * i + [*range(3 + i, 9 + i)]]} for i in range(3)]
    found = engine.evaluate(rows)
    return found.loss, found.targets


def test_an_evaluation_counts_each_target_once(ranks: RankPool, model: Path) -> None:
    """Though all stages are given the same batches."""
    ((loss, targets),) = ranks.run(_evaluated, 1, model, {})
    assert targets == 5 + 6 + 6
    for found in ranks.run(_evaluated, 2, model, {"pp_size": 2}):
        assert found == (pytest.approx(loss, rel=1e-6), targets)
