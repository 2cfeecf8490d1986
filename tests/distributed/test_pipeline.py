"""Pipelines beside parity: what they hold, generate, evaluate and compare."""

import gc
import re
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import expertmesh
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.replicas import check_replicas
from expertmesh.sharding.stages import layers_here
from expertmesh.sharding.state import local_tensor
from expertmesh.sharding.topology import Topology
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.steps.step import compute_gradients, train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import config_of, my_batches, sharded_model
from tests.distributed.test_generate import PROMPTS, hf_continuations
from tests.distributed.test_generate import ours as continuations
from tests.parity.case import MAX_GRAD_NORM, SAMPLES, Case, hf_model
from tests.parity.runner import Runner
from tests.parity.table import stages
from tests.rounding import near
from tests.tiny import save_model

LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
CASE = Case(SAMPLES, z=0.01, accumulation=4, changes=LAYERS)
DEEP = 9
PP, PP_EP = Topology(2, 1, pp_size=2), Topology(4, 2, pp_size=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    save_model(path, **LAYERS)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_cuts_and_schedules(runner: Runner, seed: int) -> None:
    """Stages of any lengths, however many of them a rank has, and any number of micro-batches."""
    random = Random(seed)
    pp = random.choice([2, 3, 4])
    chunks = random.randint(1, DEEP // pp)
    schedule = random.choice(["zero-bubble", "1f1b" if chunks == 1 else "interleaved"])
    ends = [0, *sorted(random.sample(range(1, DEEP), pp * chunks - 1)), DEEP]
    layers = ",".join(str(end - start) for start, end in pairwise(ends))
    pipeline = {"pipeline_schedule": schedule, "pipeline_chunks": chunks, "pipeline_layers": layers}
    changes, accumulation = {"num_hidden_layers": DEEP}, random.randint(1, 9)
    (row,) = stages("random", f"{pp} pp {pp}", pipeline, steps=1, accumulation=accumulation, changes=changes)
    runner.compare(row)


@pytest.mark.parametrize(("topology", "chunks"), [(PP_EP, 1), (PP, 2)])
def test_generates_through_the_stages(ranks: RankPool, model: Path, topology: Topology, chunks: int) -> None:
    case = Case([], settings={"pipeline_chunks": chunks})
    found = ranks.run(continuations, topology.world_size, model, topology, PROMPTS, [], case)
    assert found == [hf_continuations(PROMPTS, eos=-1, **LAYERS)] * topology.world_size


def _evaluated(model: Path, settings: dict[str, Any]) -> tuple[float, int]:
    engine = expertmesh.load(str(model), use_cpu=True, **settings)
    rows = [{"input_ids": [[*range(3, 9 + i)]], "labels": [[-100] * i + [*range(3 + i, 9 + i)]]} for i in range(3)]
    found = engine.evaluate(rows)
    return found.loss, found.targets


def test_an_evaluation_counts_each_target_once(ranks: RankPool, model: Path) -> None:
    """Though all stages are given the same batches."""
    ((loss, targets),) = ranks.run(_evaluated, 1, model, {})
    assert targets == 5 + 6 + 6
    for found in ranks.run(_evaluated, 2, model, {"pp_size": 2}):
        assert found == (near(loss), targets)


def test_nothing_is_held_after_a_step(ranks: RankPool, tmp_path: Path) -> None:
    """No activation waits for the collector of cyclic garbage, which a run calls every 50 steps."""
    hf_model(CASE).save_pretrained(tmp_path)
    for held in ranks.run(_held, PP.world_size, tmp_path, CASE):
        assert held == [0] * 6


def test_forwards_without_a_backward_are_forgotten(ranks: RankPool, tmp_path: Path) -> None:
    """Where nothing on a rank is trained: FSDP would remember every forward of the run."""
    case = replace(CASE, z=0.0, settings={"freeze": ["^(?!lm_head)"]})
    hf_model(case).save_pretrained(tmp_path)
    assert ranks.run(_remembered, PP.world_size, tmp_path, case) == [0, 0]


def _remembered(path: Path, case: Case) -> int:
    model, mesh, _ = sharded_model(path, PP, case)
    optimizer = build_optimizer(model.train(), config_of(case, PP), mesh)
    batches = my_batches(case, PP, dist.get_rank())
    for _ in range(2):
        train_step(model, optimizer, batches, mesh, LossWeights(0.0, 0.0), MAX_GRAD_NORM)
    return len(model._get_fsdp_state()._comm_ctx.post_forward_order)


def _held(path: Path, case: Case) -> list[int]:
    """Storages of layers' outputs that are still there after a step's backward."""
    found = []
    for more in ({"pipeline_schedule": "interleaved", "pipeline_chunks": 2}, {"pipeline_schedule": "zero-bubble"}):
        for mode in ("none", "full", "selective"):
            one = replace(case, settings=more, gradient_checkpointing=mode)
            model, *_ = sharded_model(path, PP, one)
            seen: list[Any] = []

            def note(layer: Any, args: Any, output: Any, seen: list[Any] = seen) -> None:
                seen.append(weakref.ref((output[0] if isinstance(output, tuple) else output).untyped_storage()))

            for layer in layers_here(model):
                layer.register_forward_hook(note)
            batches = my_batches(one, PP, dist.get_rank())
            gc.disable()
            compute_gradients(model.train(), batches, LossWeights(one.balance, one.z))
            assert len(seen) >= len(batches) * LAYERS["num_hidden_layers"] // 2
            found.append(sum(storage() is not None for storage in seen))
            gc.enable()
    return found


def test_a_flipped_bit_of_either_copy_is_found(ranks: RankPool, tmp_path: Path) -> None:
    """Of tied embeddings, which the first and the last stage hold."""
    case = replace(CASE, changes=LAYERS | {"tie_word_embeddings": True})
    hf_model(case).save_pretrained(tmp_path)
    for told in ranks.run(_flipped, PP_EP.world_size, tmp_path, PP_EP, case):
        assert len(told) == 2
        for message in told:
            assert "1 of " in message
            assert re.search(r"model.embed_tokens.weight \((rank 1 against rank 3|rank 3 against rank 1)\)", message)


def _flipped(path: Path, topology: Topology, case: Case) -> list[str]:
    """What is said of one bit on rank 1, then on rank 3, whose rows are the same."""
    model, *_ = sharded_model(path, topology, case)
    bits = local_tensor(model.get_parameter("model.embed_tokens.weight").detach()).view(torch.int32)
    told = []
    for rank in (1, 3):
        mine = dist.get_rank() == rank
        bits[3, 5] ^= int(mine)
        with pytest.raises(ExpertMeshError) as error:
            check_replicas(model, topology, torch.device("cpu"), 1, {})
        bits[3, 5] ^= int(mine)
        told.append(str(error.value))
    check_replicas(model, topology, torch.device("cpu"), 2, {})
    return told
