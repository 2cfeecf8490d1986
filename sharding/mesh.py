"""The device mesh: (dp, ep), its flattening over all ranks, and the ranks that share rows."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from sharding.context import RowGroup
from sharding.topology import Topology


@dataclass(frozen=True)
class Mesh:
    """grid: the (dp, ep) mesh. all_ranks: the same ranks in one dimension, "fsdp". exchange: the ranks of `ep`, in a
    group whose collectives do not stand in line with FSDP's. sharers: with whom this rank shares rows; None: nobody."""

    topology: Topology
    grid: DeviceMesh
    all_ranks: DeviceMesh
    exchange: dist.ProcessGroup
    sharers: RowGroup | None = None

    @property
    def dp(self) -> DeviceMesh:
        return self.grid["dp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.grid["ep"]

    @property
    def dense(self) -> DeviceMesh:
        """Where FSDP puts everything that is no expert: all ranks, or replicas over dp of shards over ep."""
        return self.grid if self.topology.dense_shard == "hybrid" else self.all_ranks

    @property
    def dense_shards(self) -> DeviceMesh:
        """The ranks that share out the rows of what is no expert; with replicas, those of one replica."""
        return self.ep if self.topology.dense_shard == "hybrid" else self.all_ranks


def build_mesh(device_type: str, topology: Topology, timeout_seconds: int | None = None) -> Mesh:
    """The meshes of a topology; the process group must have `topology.world_size` ranks.

    Args:
        timeout_seconds: after which a collective in one of the groups fails; default: torch's.
    """
    shape = (topology.dp_size, topology.ep_size)
    grid = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "ep"))
    exchange, sharers = _exchange_group(topology, grid["ep"]), _row_group(topology)
    mesh = Mesh(topology, grid, grid._flatten("fsdp"), exchange, sharers)
    if timeout_seconds is not None:
        groups = [*(part.get_group() for part in (mesh.dp, mesh.ep, mesh.all_ranks)), exchange]
        if sharers is not None and sharers.ranks is not None:
            groups.append(sharers.ranks)
        # the groups of a mesh do not inherit the time limit of the default group
        for group in groups:
            _set_pg_timeout(timedelta(seconds=timeout_seconds), group)
    return mesh


def _exchange_group(topology: Topology, ep: DeviceMesh) -> dist.ProcessGroup:
    """A group of its own where FSDP has that of `ep` too: there NCCL would make rows wait for gathered parameters, and
    the other way round, as it runs the collectives of one group one after the other."""
    if topology.ep_size == 1 or (topology.ep_size < topology.world_size and topology.dense_shard == "full"):
        return ep.get_group()
    return _group_of_neighbours(topology, topology.ep_size, "ep")


def _row_group(topology: Topology) -> RowGroup | None:
    """In a group of its own: rows' way to their experts, and parameters', begin while attention's may be under way."""
    if topology.cp_size == 1:
        return None
    index = dist.get_rank() % topology.cp_size
    return RowGroup(topology.cp_size, index, _group_of_neighbours(topology, topology.cp_size, "cp"))


def _group_of_neighbours(topology: Topology, size: int, axis: str) -> dist.ProcessGroup:
    groups = [list(range(start, start + size)) for start in range(0, topology.world_size, size)]
    # named as torch names those of a mesh, which is what is told of their collectives
    group, _ = dist.new_subgroups_by_enumeration(groups, group_desc=f"mesh_{axis}")
    assert group is not None
    return group
