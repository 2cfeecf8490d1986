"""The device mesh: (dp, ep), and its flattening over all ranks."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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


def build_mesh(device_type: str, topology: Topology) -> Mesh:
    """The meshes of a topology; the process group must have `topology.world_size` ranks."""
    shape = (topology.dp_size, topology.ep_size)
    grid = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "ep"))
    return Mesh(topology, grid, grid._flatten("fsdp"))
