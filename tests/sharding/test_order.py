"""Every member of a process group comes to its collectives in the same order: else a run hangs, or mixes up data.

One rank at a time is dry-run, on fake tensors and collectives that send nothing.
"""

import pytest
from transformers import MixtralConfig

from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal.collective_order import check_order
from expertmesh.training.planning.rehearsal.recorder import Event
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.training.dry_runs import CLUSTER

MEMBERS = {8: (0, 7), 16: (0, 7, 15)}
"""Ranks by world size, at least two of an ep group, of a dp group and of all. Of 100 tokens' rows rank 7 of 8 holds
fewer than others, and rank 15 of 16 none."""


def rehearsed(world_size: int, rank: int, checkpointing: Checkpointing) -> list[Event]:
    """Every collective of a step with two micro-batches, at ep 8."""
    config = TrainConfig(
        model="-",
        dataset=["-"],
        bf16=True,
        ep_size=8,
        gradient_checkpointing=checkpointing,
        max_seq_length=32,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
    )
    model_config = MixtralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    events = rehearse(Asked(config, world_size, CLUSTER, rank), model_config).recorder.events
    return [event for event in events if event.collective is not None]


@pytest.mark.release
@pytest.mark.parametrize(("world_size", "checkpointing"), [(8, "none"), (8, "selective"), (16, "full")])
def test_members_of_a_group_call_in_the_same_order(world_size: int, checkpointing: Checkpointing) -> None:
    by_rank = {rank: rehearsed(world_size, rank, checkpointing) for rank in MEMBERS[world_size]}
    groups = {call.ranks for of_rank in by_rank.values() for call in of_rank}
    assert {len(group) for group in groups} == {8: {8}, 16: {2, 8, 16}}[world_size]
    # within each group, and between groups: a GPU runs what it is given in the order it is given, whatever the group
    assert check_order(by_rank) == len(by_rank[0])
    assert len(by_rank[0]) >= 20
