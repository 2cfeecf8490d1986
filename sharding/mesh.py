"""The device mesh: (pp, dp, ep), its parts, that of tensor parallelism, and the groups of ranks beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..moe.torch_private import _set_pg_timeout
from .collectives.context_parallel import CPGroup
from .collectives.groups import few_blocks, make_group
from .collectives.pipeline_groups import PipelineGroups, make_pipeline_groups
from .collectives.tensor_parallel import TPGroup
from .collectives.warm_up import warm_up
from .topology import Topology


@dataclass(frozen=True)
class Mesh:
    """The meshes of this rank's pp index: its stages' ranks.

    grid: the (dp, ep) mesh. all_ranks: the same ranks in one dimension. exchange: the ranks of `ep`, in a group whose
    collectives do not queue behind FSDP's. cp_group: the ranks that share this rank's sequences, if any do.
    pipeline: the ranks that pass its micro-batches on to one another, if there are several pp indices. timeout: after
    which a collective in one of the groups fails; None: torch's. divided: the mesh of what tensor parallelism divides:
    its last axis is "tp", FSDP's before it.
    """

    topology: Topology
    grid: DeviceMesh
    all_ranks: DeviceMesh
    exchange: dist.ProcessGroup
    cp_group: CPGroup | None = None
    pipeline: PipelineGroups | None = None
    timeout: timedelta | None = None
    divided: DeviceMesh | None = None

    @property
    def tp(self) -> DeviceMesh:
        """The ranks of this rank's tensor-parallel group."""
        assert self.divided is not None
        return self.divided["tp"]

    @property
    def dense_of_tp(self) -> DeviceMesh:
        """The mesh of FSDP for parameters that tensor parallelism divides: as `dense`, of ranks with one tp index."""
        assert self.divided is not None
        names = self.divided.mesh_dim_names
        assert names is not None
        return self.divided[names[:-1]] if len(names) > 2 else self.divided[names[0]]

    @property
    def dp(self) -> DeviceMesh:
        return self.grid["dp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.grid["ep"]

    @property
    def dense(self) -> DeviceMesh:
        """The mesh of FSDP for non-expert parameters: all ranks of a pp index, or replicas over dp of shards over
        ep."""
        return self.grid if self.topology.dense_shard == "hybrid" else self.all_ranks

    @property
    def dense_shards(self) -> DeviceMesh:
        """The ranks over which non-expert parameters are sharded; with replicas, those of one replica."""
        return self.ep if self.topology.dense_shard == "hybrid" else self.all_ranks

    @property
    def stage_group(self) -> dist.ProcessGroup:
        """The ranks of this pp index, over which a micro-batch's figures are summed."""
        group = dist.group.WORLD if self.pipeline is None else self.all_ranks.get_group()
        assert group is not None
        return group


def build_mesh(
    device_type: str, topology: Topology, timeout_seconds: int | None = None, overlaps: bool = False
) -> Mesh:
    """The meshes of a topology; the process group must have `topology.world_size` ranks.

    Args:
        timeout_seconds: after which a collective in one of the groups fails; default: torch's.
        overlaps: whether all-to-alls run beside expert GEMMs: NCCL is then kept to few blocks in the groups of rows and
            of parameters, none of which is the default group.
    """
    options = partial(few_blocks, device_type if overlaps else "cpu")
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    shape, axes = (topology.dp_size, topology.ep_size), ("dp", "ep")
    overrides = _overrides(axes, options)
    if topology.pp_size == 1:
        grid = init_device_mesh(device_type, shape, mesh_dim_names=axes, backend_override=overrides)
    else:
        names = ("pp", *axes)
        grid = init_device_mesh(
            device_type, (topology.pp_size, *shape), mesh_dim_names=names, backend_override=overrides
        )[axes]
    divided = _divided_mesh(device_type, topology, options)
    exchange, cp_group = _exchange_group(topology, grid["ep"], options()), _cp_group(topology)
    pipeline = make_pipeline_groups(topology, device_type, timeout)
    all_ranks = grid._flatten("stage", backend_override=options())
    mesh = Mesh(topology, grid, all_ranks, exchange, cp_group, pipeline, timeout, divided)
    if timeout is not None:
        groups = [*(part.get_group() for part in (mesh.dp, mesh.ep, mesh.all_ranks)), exchange]
        if cp_group is not None:
            groups += cp_group.process_groups()
        if divided is not None:
            groups += divided.get_all_groups()
        if pipeline is not None:
            groups += [pipeline.forward, pipeline.backward]
        # the groups of a mesh do not inherit the time limit of the default group
        for group in groups:
            _set_pg_timeout(timeout, group)
    world = dist.group.WORLD
    assert world is not None
    summing = [world, mesh.dp.get_group(), *mesh.dense.get_all_groups(), mesh.stage_group]
    exchanging = [exchange]
    if divided is not None:
        summing += mesh.dense_of_tp.get_all_groups()
    if cp_group is not None:
        summing += cp_group.summing_groups()
        exchanging += cp_group.process_groups()
    warm_up(summing, exchanging, device_type)
    return mesh


def _overrides(axes: tuple[str, ...], options: Callable[[], Any]) -> dict[int | str, Any] | None:
    """Options for the groups of a mesh's axes; None: those of the default group, which may then be one of them."""
    overrides: dict[int | str, Any] = {axis: options() for axis in axes}
    return overrides if all(overrides.values()) else None


def _exchange_group(topology: Topology, ep: DeviceMesh, options: Any) -> dist.ProcessGroup:
    """A separate group where FSDP uses that of `ep` too: there NCCL would make rows wait for gathered parameters, and
    the other way round, as it runs the collectives of one group one after the other."""
    if topology.ep_size == 1 or (topology.ep_size < topology.ranks_per_stage and topology.dense_shard == "full"):
        return ep.get_group()
    return make_group(topology, "ep", "tokens", options=options)


def _divided_mesh(device_type: str, topology: Topology, options: Callable[[], Any]) -> DeviceMesh | None:
    """The mesh of parameters that tensor parallelism divides; its FSDP axes are those of `Mesh.dense`."""
    tp_size = topology.tp_size
    if tp_size == 1:
        return None
    if topology.dense_shard == "hybrid":
        shape, axes = (
            (topology.dp_size, topology.ep_size // tp_size, tp_size),
            ("dp (divided by tp)", "dense of tp", "tp"),
        )
    else:
        shape, axes = (topology.ranks_per_stage // tp_size, tp_size), ("dense of tp", "tp")  # type: ignore[assignment]
    if topology.pp_size == 1:
        return init_device_mesh(device_type, shape, mesh_dim_names=axes, backend_override=_overrides(axes, options))
    whole = init_device_mesh(
        device_type,
        (topology.pp_size, *shape),
        mesh_dim_names=("pp", *axes),
        backend_override=_overrides(axes, options),
    )
    return whole[axes]


def _cp_group(topology: Topology) -> CPGroup | None:
    """The ranks that share sequences, with process groups of their own: all-to-alls of rows and gathers of parameters
    begin while those of attention may be under way."""
    cp_size, tp_size, rank = topology.cp_size, topology.tp_size, dist.get_rank()
    size = topology.ranks_per_sequence
    if size == 1:
        return None
    if tp_size == 1:
        return CPGroup(size, rank % size, make_group(topology, "cp"))
    all_ranks = make_group(topology, "sequences")
    tp = TPGroup(tp_size, rank % tp_size, make_group(topology, "tp", "activations"))
    inner = CPGroup(cp_size, rank % size // tp_size, make_group(topology, "cp")) if cp_size > 1 else None
    return CPGroup(size, rank % size, all_ranks, tp, inner)
