"""The device mesh: (dp, ep), and its flattening over all ranks."""

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from sharding.topology import Topology


@dataclass(frozen=True)
class Mesh:
    """grid: the (dp, ep) mesh. all_ranks: the same ranks in one dimension, "fsdp"."""

    topology: Topology
    grid: DeviceMesh
    all_ranks: DeviceMesh

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
    mesh = Mesh(topology, grid, grid._flatten("fsdp"))
    if timeout_seconds is not None:
        # the groups of a mesh do not inherit the time limit of the default group
        for part in (mesh.dp, mesh.ep, mesh.all_ranks):
            _set_pg_timeout(timedelta(seconds=timeout_seconds), part.get_group())
    return mesh
