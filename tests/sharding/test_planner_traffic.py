"""Bytes a step against those that real ranks send."""

from typing import Any

import pytest
import torch
from torch import distributed as dist

from benchmarks.plan_accuracy import build_run, full_batch
from benchmarks.traffic import CountTraffic
from expertmesh.training.loss.balance import LossWeights
from expertmesh.training.steps.step import train_step
from tests.distributed.pool import RankPool
from tests.sharding.planned import ODD_SIZES, flags_of, tiny_account
from tests.tiny import tiny_config


def count(world_size: int, flags: dict[str, Any], sizes: dict[str, Any]) -> dict[str, float]:
    """What this rank sends in a step, the first one's set-up left out."""
    config, model_config = flags_of(**flags), tiny_config(**sizes)
    model, optimizer, mesh = build_run(config, model_config, world_size, torch.device("cpu"))
    seed = mesh.topology.data_index(dist.get_rank())
    batch = full_batch(config, model_config.vocab_size, seed, mesh.cp_group)
    batches = [batch] * (config.gradient_accumulation_steps or 1)
    weights = LossWeights(config.router_aux_loss_coef or 0.0, 0.0)
    train_step(model, optimizer, batches, mesh, weights, 1.0)
    with CountTraffic() as counted:
        train_step(model, optimizer, batches, mesh, weights, 1.0)
    return dict(counted.sent)


@pytest.mark.sample(19)
@pytest.mark.parametrize(
    ("world_size", "flags", "sizes"),
    [
        (4, {}, {}),
        (4, {"ep_size": 2, "router_aux_loss_coef": 0.01}, ODD_SIZES),
        (4, {"ep_size": 4, "gradient_checkpointing": "full"}, {}),
        (4, {"ep_size": 4, "gradient_checkpointing": "selective"}, {}),
        (4, {"ep_size": 2, "dense_shard": "hybrid", "gradient_accumulation_steps": 2}, {}),
        (2, {"gradient_checkpointing": "full"}, ODD_SIZES),
        (4, {"ep_size": 2, "reshard_after_forward": False}, {}),
        (4, {"ep_size": 2, "adapter": "lora"}, {}),
        (2, {"adapter": "lora", "base_dtype": "nf4"}, {}),
        (4, {"ep_size": 2, "freeze": ("experts",)}, {}),
    ],
    ids=[
        *("ep1", "ep2-odd-sizes-balanced", "ep4-full", "ep4-selective", "ep2-hybrid-accumulated", "ep1-full-odd-sizes"),
        *("not-resharded", "lora", "nf4", "frozen"),
    ],
)
def test_bytes_are_exact(ranks: RankPool, world_size: int, flags: dict[str, Any], sizes: dict[str, Any]) -> None:
    expected: dict[str, float] = {}
    for each in tiny_account(world_size, flags, sizes).sent:
        expected[each.kind] = expected.get(each.kind, 0) + each.total
    # tokens of all micro-batches are counted in one sum, 24 bytes each in a ring of four: of those alone that are run
    uncounted = 36 * (flags.get("gradient_accumulation_steps", 1) - 1)
    for sent in ranks.run(count, world_size, world_size, flags, sizes):
        assert {kind: n for kind, n in sent.items() if n} == pytest.approx(expected, abs=2 + uncounted, rel=0)


@pytest.mark.slow
@pytest.mark.sample(13)
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, {"ep_size": 2, "tp_size": 2}),
        (4, {"ep_size": 4, "tp_size": 4, "gradient_checkpointing": "selective"}),
        (4, {"ep_size": 2, "tp_size": 2, "dense_shard": "hybrid", "gradient_accumulation_steps": 2}),
        (4, {"ep_size": 4, "tp_size": 2, "cp_size": 2, "gradient_checkpointing": "full"}),
        (2, {"ep_size": 2, "tp_size": 2, "loss_parallel": False}),
    ],
    ids=["tp2", "tp4-selective", "tp2-hybrid-accumulated", "tp2-cp2-full", "tp2-whole-vocabulary"],
)
def test_bytes_of_a_tensor_parallel_group_are_exact(ranks: RankPool, world_size: int, flags: dict[str, Any]) -> None:
    """Where a sequence ends, one position has no target, which the forecast does not know: it is sent as padding, but
    for the 12 bytes of what each rank has found of its logits."""
    without = 12 * 2 * (flags["tp_size"] - 1) * flags.get("gradient_accumulation_steps", 1)
    sizes = {"num_key_value_heads": 4}
    expected: dict[str, float] = {}
    for each in tiny_account(world_size, flags, sizes, trained=1.0).sent:
        expected[each.kind] = expected.get(each.kind, 0) + each.total
    for sent in ranks.run(count, world_size, world_size, flags, sizes):
        assert {kind: n for kind, n in sent.items() if n} == pytest.approx(expected, abs=2 + without, rel=0)
