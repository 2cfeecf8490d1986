"""Process groups are used when they are made, by all ranks in one order, so that no step is the first to use one."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.sharding.collectives.warm_up import warm_up
from expertmesh.sharding.topology import Topology
from expertmesh.training.optim.optimizer import build_optimizer
from expertmesh.training.steps.step import LossWeights, train_step
from tests.distributed.pool import RankPool
from tests.distributed.reference import config_of, my_batches, sharded_model
from tests.parity.case import Case, hf_model, random_samples
from tests.tiers import tiered

CASE = Case(random_samples([9 + (5 * i) % 12 for i in range(16)]), balance=0.05, accumulation=2, steps=1)
LAYOUTS: dict[str, tuple[Topology, dict[str, Any]]] = {
    "ep 4 of 8": (Topology(8, 4), {}),
    "hybrid": (Topology(8, 4, "hybrid"), {}),
    "once to each node": (Topology(8, 8), {"dispatch": "node", "ranks_per_node": 4}),
    "cp": (Topology(8, 4, "full", 2), {}),
    "tp": (Topology(8, 4, tp_size=2), {}),
    "matrices of replicas": (Topology(8, 4, "hybrid"), {"optim": "muon"}),
    "matrices of a stage": (Topology(8, 2, pp_size=2), {"optim": "muon", "dispatch": "rank"}),
    "tp and cp": (Topology(8, 8, "hybrid", 2, tp_size=2), {}),
    "pp": (Topology(8, 2, pp_size=2), {}),
    "pp 4, tied": (Topology(4, 1, pp_size=4), {}),
    "zero-bubble": (Topology(4, 2, pp_size=2), {"pipeline_schedule": "zero-bubble"}),
    "interleaved": (Topology(4, 1, pp_size=4), {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}),
}


@dataclass(frozen=True, order=True)
class Use:
    """What is sent in a group: its purpose, its name, with which rank (None: with all of them), and in which way, as
    NCCL connects a group's ranks for each of them."""

    purpose: str
    name: str
    peer: int | None
    way: str


WAYS = {
    "allreduce_": "sum", "_allgather_base_": "gather", "allgather_": "gather", "_reduce_scatter_base_": "gather",
    "broadcast_": "gather", "alltoall_base_": "exchange", "alltoall_": "exchange", "send": "pass", "recv_": "pass",
}  # fmt: skip


class Uses(TorchDispatchMode):
    """Within it, what is sent through which groups of several ranks, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Use] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in (*args, *(kwargs or {}).values()):
            if isinstance(given, torch.ScriptObject) and "ProcessGroup" in str(given._type()):
                group = dist.ProcessGroup.unbox(given)
                if group.size() > 1:
                    way = WAYS[operator.name().removeprefix("c10d::")]
                    peer = args[2] if way == "pass" else None
                    self.all.append(Use(group.group_desc, group.group_name, peer, way))
        return operator(*args, **(kwargs or {}))


def _uses(path: Path, topology: Topology, case: Case) -> tuple[list[Use], list[Use]]:
    """(those when the model is made and sharded, those of a step)."""
    with Uses() as before:
        model, mesh, _ = sharded_model(path, topology, case)
        optimizer = build_optimizer(model, config_of(case, topology), mesh)
    batches = my_batches(case, topology, dist.get_rank(), mesh.cp_group)
    with Uses() as step:
        train_step(model.train(), optimizer, batches, mesh, LossWeights(case.balance, case.z, False), 0.5)
    return before.all, step.all


@pytest.mark.parametrize(
    "name",
    tiered(
        slow=["tp and cp", "once to each node", "interleaved"],
        release=[
            "pp",
            "matrices of replicas",
            "ep 4 of 8",
            "hybrid",
            "matrices of a stage",
            "cp",
            "tp",
            "pp 4, tied",
            "zero-bubble",
        ],
    ),
)
def test_no_step_is_the_first_to_use_a_group(ranks: RankPool, tmp_path: Path, name: str) -> None:
    topology, settings = LAYOUTS[name]
    changes = {"num_hidden_layers": 8, "tie_word_embeddings": True} if topology.pp_size > 1 else {}
    case = replace(CASE, settings=settings, changes=changes)
    hf_model(case).save_pretrained(tmp_path)
    found = ranks.run(_uses, topology.world_size, tmp_path, topology, case)
    for rank, (before, step) in enumerate(found):
        assert step
        assert {*step} <= {*before}, f"rank {rank}: {sorted({*step} - {*before})}"
    # of each kind of group every rank uses its own, and all come to one kind after the other
    orders = [[use.purpose for use in before if use.purpose != "mesh_pp (shared weights)"] for before, _ in found]
    assert all(order == orders[0] for order in orders)


def test_warns_of_nothing(ranks: RankPool) -> None:
    """torch 2.13 has other names for collectives of one tensor; the old ones would begin every run's output with a
    warning."""
    assert ranks.run(_warnings, 2) == [[], []]


def _warnings() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warm_up([group], [group], "cpu")
    return [str(each.message) for each in found]
