"""The device mesh: (dp, ep), and its flattening over all ranks."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from sharding.topology import Topology


@dataclass(frozen=True)
class Mesh:
    """grid: the (dp, ep) mesh. all_ranks: the same ranks in one dimension, "fsdp". exchange: the ranks of `ep`, in a
    group whose collectives do not stand in line with FSDP's."""

    topology: Topology
    grid: DeviceMesh
    all_ranks: DeviceMesh
    exchange: dist.ProcessGroup

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
    mesh = Mesh(topology, grid, grid._flatten("fsdp"), _exchange_group(topology, grid["ep"]))
    if timeout_seconds is not None:
        # the groups of a mesh do not inherit the time limit of the default group
        for group in (*(part.get_group() for part in (mesh.dp, mesh.ep, mesh.all_ranks)), mesh.exchange):
            _set_pg_timeout(timedelta(seconds=timeout_seconds), group)
    return mesh


def _exchange_group(topology: Topology, ep: DeviceMesh) -> dist.ProcessGroup:
    """A group of its own where FSDP has that of `ep` too: there NCCL would make rows wait for gathered parameters, and
    the other way round, as it runs the collectives of one group one after the other."""
    if topology.ep_size == 1 or (topology.ep_size < topology.world_size and topology.dense_shard == "full"):
        return ep.get_group()
    starts = range(0, topology.world_size, topology.ep_size)
    groups = [list(range(start, start + topology.ep_size)) for start in starts]
    # named as torch names that of the mesh, which is what is told of its collectives
    group, _ = dist.new_subgroups_by_enumeration(groups, group_desc="mesh_ep")
    assert group is not None
    return group
