"""A process's place among the ranks, by the variables of each launcher, and counted where these do not tell."""

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.moe.util.process_place import ProcessPlace, process_place, read_place
from expertmesh.sharding.runtime.memory import available_memory
from expertmesh.sharding.runtime.process import end_process_group, join_process_group, start_process_group
from expertmesh.sharding.torchrun import node_name
from tests.distributed.pool import RankPool

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
BATCH_FILE = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
"""What slurm.sbatch has once set, and scripts of others still do."""
PLACE = ProcessPlace(5, 8, 1, 4, 1)
ALONE = ProcessPlace(0, 1, 0, 1, None)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, PLACE),
        (SRUN, PLACE),
        (SRUN | BATCH_FILE, PLACE),
        (SRUN | TORCHRUN, PLACE),
        # of unequal nodes
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,3(x1),1", "SLURM_NODEID": "2"}, ProcessPlace(5, 8, 1, 1, 2)),
        # torchrun as srun's only task of each node
        (SRUN | TORCHRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
         PLACE),
        (BATCH_FILE, ProcessPlace(5, 8, 1)),
        (BATCH_FILE | {"LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"}, PLACE),
        ({}, ALONE),
        # a batch script's own process, which is in no step of srun's
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, ALONE),
        # a shell of salloc's, and an empty variable
        (SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "RANK": "",
                 "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, ProcessPlace(0, 1, 0, 1, 0)),
    ],
)  # fmt: skip
def test_each_launchers_variables(variables: dict[str, str], place: ProcessPlace) -> None:
    assert read_place(variables) == place
    assert place.spans_nodes == (place.world_size > 1)


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(ExpertMeshError, match="the environment variable LOCAL_RANK is 'one'; it must be a number"):
        read_place(BATCH_FILE | {"LOCAL_RANK": "one"})


def place_on(hosts: list[str], told: list[str], own_group: bool) -> dict[str, Any]:
    """What this rank knows of its place, of a run whose launcher tells these variables alone; and of the next one."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in names or name in told}
    with mock.patch.dict(os.environ, kept, clear=True), mock.patch("socket.gethostname", return_value=hosts[rank]):
        with mock.patch("expertmesh.sharding.runtime.memory.free_on_host", return_value=1200.0):
            if own_group:
                dist.init_process_group("gloo", rank=rank, world_size=world_size)
                ranks = join_process_group(use_cpu=True, timeout_seconds=60)
            else:
                ranks = start_process_group(use_cpu=True, timeout_seconds=60)
            found = {"place": process_place(), "name": node_name(), "memory": available_memory(ranks.device, 0.0)}
        end_process_group()
    return found


@pytest.mark.parametrize(
    ("told", "own_group"), [(["RANK", "WORLD_SIZE", "LOCAL_RANK"], False), (["RANK", "WORLD_SIZE"], False), ([], True)]
)
def test_hosts_are_counted_where_nothing_tells_them(ranks: RankPool, told: list[str], own_group: bool) -> None:
    """Also where a script has made the process group by itself, and no variable tells anything."""
    hosts = ["a", "b", "b", "a"] if "LOCAL_RANK" not in told else ["a", "b", "b", "b"]
    places = [
        ProcessPlace(0, 4, 0, 2, 0),
        ProcessPlace(1, 4, 0, 2, 1),
        ProcessPlace(2, 4, 1, 2, 1),
        ProcessPlace(3, 4, 1, 2, 0),
    ]
    if "LOCAL_RANK" in told:  # which then is as it is told
        places = [ProcessPlace(0, 4, 0, 1, 0), *(ProcessPlace(rank, 4, rank, 3, 1) for rank in (1, 2, 3))]
    found = ranks.run(place_on, 4, hosts, told, own_group, join_group=False)
    assert [each["place"] for each in found] == places
    assert [each["name"] for each in found] == [
        f"node {place.node} ({host})" for place, host in zip(places, hosts, strict=True)
    ]
    assert [each["memory"] for each in found] == [1200 / place.ranks_here for place in places]
    # the next run of these processes is told of all
    assert ranks.run(process_place, 4) == [ProcessPlace(rank, 4, rank, 4, None) for rank in range(4)]
