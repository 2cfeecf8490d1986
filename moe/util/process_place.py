"""A process's place among the ranks that were started with it, as its launcher tells it.

torchrun tells all of it by variables, srun by others. Of a launcher that tells only some, the rest is found out once
the ranks can talk to one another (see `settle_place`).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import ExpertMeshError

_NAMES = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "node": ("GROUP_RANK", "NODE_RANK"),  # torchrun's name; Ray Train's
}


@dataclass(frozen=True)
class ProcessPlace:
    """rank: of `world_size`. local_rank: of the `local_world_size` ranks of its node, the number of which is `node`;
    None: not known."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    node: int | None = None

    @property
    def spans_nodes(self) -> bool:
        """Whether there are, or may be, ranks on other nodes."""
        return self.local_world_size != self.world_size

    @property
    def ranks_here(self) -> int:
        """Ranks of this node; all, where that is not known."""
        return self.local_world_size or self.world_size


_settled: ProcessPlace | None = None


def process_place() -> ProcessPlace:
    """Where this process is: as its launcher's variables have it, or as it was found out."""
    return read_place() if _settled is None else _settled


def read_place(variables: Mapping[str, str] | None = None) -> ProcessPlace:
    """By variables of torchrun, or of srun where there are none of torchrun's; a lone process without any.

    Args:
        variables: those of the environment, by default this process's.

    Raises:
        ExpertMeshError: one is no number.
    """
    variables = os.environ if variables is None else variables
    told: dict[str, int] = {}
    for field, names in _NAMES.items():
        for name in names:
            if field not in told and variables.get(name):
                told[field] = _number(name, variables[name])
    srun = _of_srun(variables)
    # a script may say by torchrun's names what srun says; within a step of srun, torchrun may have started others
    if all(told.get(field, srun.get(field)) == srun.get(field) for field in ("rank", "world_size")):
        told = srun | told
    place = ProcessPlace(**told)
    return place if place.world_size > 1 else ProcessPlace(**{**told, "local_world_size": 1})


def _of_srun(variables: Mapping[str, str]) -> dict[str, int]:
    """The place of a task of srun's; empty elsewhere. A batch script itself is a task too, but of no step."""
    names = {"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID"}
    names["node"] = "SLURM_NODEID"
    if not all(variables.get(name) for name in names.values()):
        return {}
    place = {field: _number(name, variables[name]) for field, name in names.items()}
    # such as "4(x2),3": of three nodes
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    of_nodes = [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]
    if place["node"] < len(of_nodes):
        place["local_world_size"] = of_nodes[place["node"]]
    return place


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ExpertMeshError(f"the environment variable {name} is {value!r}; it must be a number") from error


def settle_place(rank: int, known: Sequence[bool], hosts: Sequence[str]) -> None:
    """Find out what the launcher has not told, by the hosts of all ranks.

    Args:
        rank: of this process.
        known: for each rank, whether its variables tell its rank, and how many there are on its node.
        hosts: the host of each rank.
    """
    global _settled
    _settled = None
    if all(known):
        return
    told, here = read_place(), [other for other, host in enumerate(hosts) if host == hosts[rank]]
    is_of_group = told.rank == rank and told.world_size == len(hosts)
    local_rank = told.local_rank if is_of_group and os.environ.get("LOCAL_RANK") else here.index(rank)
    node = list(dict.fromkeys(hosts)).index(hosts[rank])
    _settled = ProcessPlace(rank, len(hosts), local_rank, len(here), node)
