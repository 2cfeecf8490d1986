"""The order that the planner says FSDP has, against the collectives of the real code: kind, ranks, bytes and order."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from expertmesh.training.config.train_config import TrainConfig
from expertmesh.training.planning.planner.step_order import ROOT, Act, PlannedRun
from expertmesh.training.planning.planner.traffic import act_traffic
from expertmesh.training.planning.rehearsal.recorder import Event
from expertmesh.training.planning.rehearsal.run_setting import planned
from expertmesh.training.planning.rehearsal.world import rehearse
from tests.families.configs import tiny_config

Collective = tuple[str | None, tuple[int, ...], float]
"""Kind, ranks, and bytes that each sends."""
TOKENS = 64
PIPELINE: dict[str, Any] = {"ep_size": 2, "pp_size": 2, "gradient_accumulation_steps": 4}
IN_THE_MIDDLE = 2
"""Of a pipeline's micro-batches, one before and after which there are others."""
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recomputed in part": ("mixtral", 16, {"ep_size": 8, "gradient_checkpointing": "selective"}),
    "hybrid": ("mixtral", 16, {"ep_size": 4, "dense_shard": "hybrid"}),
    "not resharded": ("qwen3_moe", 8, {"ep_size": 4, "reshard_after_forward": False}),
    "tensor parallel": ("qwen3_moe", 8, {"ep_size": 4, "tp_size": 2, "gradient_checkpointing": "full"}),
    "adapters": ("mixtral", 8, {"ep_size": 4, "adapter": "lora"}),
    "1f1b": ("mixtral", 8, PIPELINE),
    "interleaved": ("mixtral", 8, PIPELINE | {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}),
    "zero-bubble": ("mixtral", 8, PIPELINE | {"pipeline_schedule": "zero-bubble"}),
}
QUICK = ("recomputed in part", "1f1b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SETTINGS]
)
def test_collectives_are_those_of_the_real_code(name: str) -> None:
    family, world_size, flags = SETTINGS[name]
    common: dict[str, Any] = {"bf16": True, "per_device_train_batch_size": 1, "max_seq_length": TOKENS}
    config = TrainConfig(model="-", dataset=["-"], **common, **flags)
    model_config = tiny_config(family, **({"num_hidden_layers": 4} if config.pp_size > 1 else {}))
    run = planned(config, model_config, world_size, is_kept=False)
    for pp_rank, own in enumerate(run.by_pp_rank):
        rank = pp_rank * run.setting.ranks_per_stage
        events = rehearse(config, model_config, world_size, rank).recorder.events
        compared = 0
        for found, wanted in both(own, rank, [event for event in events if is_of_fsdp(event)]):
            assert found == wanted
            compared += len(found)
        assert compared >= 3 * len(own.layers)


def is_of_fsdp(event: Event) -> bool:
    is_sum = event.collective == "all-reduce" and event.place.part == "FSDP"
    return len(event.ranks) > 1 and (event.is_sharding or is_sum)


def both(run: PlannedRun, rank: int, events: list[Event]) -> Iterator[tuple[list[Collective], list[Collective]]]:
    """What was recorded of a micro-batch and what is planned for it; in a pipeline, of each stage's forward and
    backward."""
    if run.setting.pp_size == 1:
        yield recorded(event for event in events if event.micro == 0), list(planned_of(run, rank, run.acts))
        return
    is_later = run.setting.schedule == "zero-bubble"
    # of several stages on a rank: the schedule says which one finds them gathered
    with_root = run.setting.chunks == 1
    root = {unit_bytes for act in (Act("gather"), Act("reduce")) for _, _, unit_bytes in planned_of(run, rank, [act])}
    for stage in run.stages:
        forward, backward = run.acts_of(stage)
        later = [act for act in backward if is_later and act.doing == "reduce" and act.unit.kind == "experts"]
        for kind, acts in (
            ("forward", forward),
            ("backward", [act for act in backward if act not in later]),
            ("weights", later),
        ):
            own = (e for e in events if e.micro == IN_THE_MIDDLE and e.action is not None and e.action.stage == stage)
            found = recorded(event for event in own if event.action is not None and event.action.kind == kind)
            wanted = list(planned_of(run, rank, (act for act in acts if with_root or act.unit != ROOT)))
            yield [each for each in found if with_root or each[2] not in root], wanted


def recorded(events: Iterable[Event]) -> list[Collective]:
    return [(event.collective, event.ranks, event.sent) for event in events]


def planned_of(run: PlannedRun, rank: int, acts: Iterable[Act]) -> Iterator[Collective]:
    for act in acts:
        for traffic in act_traffic(act, run) if act.doing in ("gather", "reduce") else ():
            if traffic.sent:
                ranks = run.setting.topology.group(traffic.group, rank, run.setting.ranks_per_node)
                yield traffic.kind, tuple(ranks), traffic.sent
