"""A dry run of a pipeline's rank is what its rank does: the same operators in the same order, and as much memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from expertmesh.moe.torch_private import FakeStore
from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.asked import Asked
from expertmesh.training.planning.rehearsal import world
from expertmesh.training.planning.rehearsal.building import build_rehearsed
from tests.distributed.pool import RankPool
from tests.tiny import tiny_config
from tests.training.dry_runs import CLUSTER

CONFIG: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_seq_length": 32,
    "pp_size": 2,
    "expert_kernel": "torch-grouped",
    "attn_implementation": "eager",
    "router_aux_loss_coef": 0.01,
    "learning_rate": 1e-3,
}
Figures = tuple[list[tuple[Any, ...]], int]
"""Events in order, and the peak of memory in bytes."""


class Real:
    """In place of `FakeTensors`."""

    def __enter__(self) -> "Real":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def materialized(model: nn.Module, *how: Any) -> None:
    world_materialize(model, *how)
    for parameter in model.parameters():
        if not parameter.is_meta:
            nn.init.normal_(parameter, std=0.02)


world_materialize = world.materialize


@contextmanager
def on_a_cpu(is_real: bool) -> Iterator[None]:
    """Within it, a dry run is of what a CPU runs; with `is_real`, with tensors that have values."""
    with (
        mock.patch.object(world, "_giving", return_value=nullcontext()),
        mock.patch.object(world, "micro_batches_to_run", lambda pipeline, number: number),
        mock.patch.object(world, "FakeTensors", Real if is_real else world.FakeTensors),
        mock.patch.object(world, "materialize", materialized if is_real else world_materialize),
    ):
        yield


def figures(config: TrainConfig, world_size: int, is_real: bool) -> Figures:
    with on_a_cpu(is_real):
        model = build_rehearsed(config, tiny_config(num_hidden_layers=5), "cpu")
        asked = Asked(config, world_size, CLUSTER, dist.get_rank(), device="cpu")
        step = world._rehearse(asked, model, model.config)
    events = [
        (event.name, str(event.place), event.phase, event.micro, str(event.action), event.collective, event.flops)
        for event in step.recorder.events
    ]
    return events, max(map(sum, step.held.values()))


def rehearsed(config: TrainConfig, world_size: int, rank: int) -> Figures:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        return figures(config, world_size, is_real=False)
    finally:
        dist.destroy_process_group()


@pytest.mark.release
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, {}),
        (2, {"pipeline_schedule": "interleaved", "pipeline_chunks": 2, "gradient_checkpointing": "selective"}),
        (2, {"pipeline_schedule": "zero-bubble"}),
        (4, {"pp_size": 4, "gradient_checkpointing": "full"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_dry_run_is_what_a_rank_does(ranks: RankPool, world_size: int, flags: dict[str, Any]) -> None:
    # a dry run's norm is 1 and is clipped: so must a rank's be
    settings = {"gradient_accumulation_steps": 5, "max_grad_norm": 1e-6} | CONFIG | flags
    config = TrainConfig(model="-", dataset=["-"], **settings)
    real = ranks.run(figures, world_size, config, world_size, True)
    for rank, (events, peak) in enumerate(real):
        dry_events, dry_peak = rehearsed(config, world_size, rank)
        assert dry_events == events
        assert dry_peak == pytest.approx(peak, rel=0.01)
        assert len(events) > 300
