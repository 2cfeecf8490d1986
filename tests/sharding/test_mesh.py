"""Which process groups a mesh has: rows never stand in line with what FSDP sends."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from expertmesh.moe.kernels.carve_out import LEFT
from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.mesh import Mesh, build_mesh
from expertmesh.sharding.parallelize.choices import Strategy
from expertmesh.sharding.parallelize.dispatchers import choose_dispatcher
from expertmesh.sharding.runtime.watchdog import recorded_collectives
from expertmesh.sharding.topology import Axis, DenseShard, Topology, check_sizes
from tests.distributed.pool import RankPool

TOPOLOGIES = [
    Topology(1, 1),
    Topology(4, 4),
    Topology(8, 8),
    Topology(8, 4),
    Topology(8, 1),
    Topology(8, 4, "hybrid"),
    Topology(8, 8, "hybrid"),
]


@contextmanager
def fake_mesh(topology: Topology, rank: int) -> Iterator[Mesh]:
    """A mesh of a world whose collectives send nothing."""
    dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
    try:
        yield build_mesh("cpu", topology)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_rows_travel_in_a_group_of_their_own(topology: Topology) -> None:
    rank = topology.world_size - 1
    with fake_mesh(topology, rank) as mesh:
        block = rank // topology.ep_size * topology.ep_size
        assert dist.get_process_group_ranks(mesh.exchange) == list(range(block, block + topology.ep_size))
        if topology.ep_size == 1:  # nothing travels
            return
        of_fsdp = [*mesh.dense.get_all_groups(), mesh.dp.get_group()]
        assert mesh.exchange.group_name not in [group.group_name for group in of_fsdp]


@pytest.mark.parametrize("topology", [Topology(8, 4, "full", 4), Topology(8, 8, "hybrid", 2)], ids=str)
def test_rows_are_shared_by_neighbours(topology: Topology) -> None:
    """In a group that nothing else uses: what goes to experts, and parameters, may be under way at the same time."""
    with fake_mesh(topology, rank=5) as mesh:
        assert mesh.cp_group is not None
        assert mesh.cp_group.ranks is not None
        assert (mesh.cp_group.size, mesh.cp_group.index) == (topology.cp_size, 5 % topology.cp_size)
        first = 5 - mesh.cp_group.index
        assert dist.get_process_group_ranks(mesh.cp_group.ranks) == list(range(first, first + topology.cp_size))
        others = [mesh.exchange, mesh.ep.get_group(), mesh.all_ranks.get_group()]
        assert mesh.cp_group.ranks.group_name not in [group.group_name for group in others]


def _topologies() -> Iterator[Topology]:
    for world, ep, shard, *sizes in product((1, 2, 6, 8, 12), (1, 2, 4), get_args(DenseShard), *[(1, 2)] * 3):
        topology = Topology(world, ep, shard, *sizes)
        with suppress(ExpertMeshError):
            check_sizes(topology, None)
            yield topology


def _groups_of(mesh: Mesh) -> Iterator[tuple[Axis, dist.ProcessGroup | None]]:
    """Every process group of a mesh, with its axis."""
    yield "ep", mesh.ep.get_group()
    yield "ep", mesh.exchange
    yield "dp", mesh.dp.get_group()
    yield "stage", mesh.all_ranks.get_group()
    yield "stage", mesh.stage_group
    yield "dense", mesh.dense_shards.get_group()
    if mesh.pipeline is not None:
        yield "pp", mesh.pipeline.forward
        yield "pp", mesh.pipeline.backward
    if mesh.cp_group is not None:
        yield "sequences", mesh.cp_group.ranks
        if mesh.cp_group.tp is not None:
            yield "tp", mesh.cp_group.tp.ranks
        if mesh.cp_group.within_tp is not None:
            yield "cp", mesh.cp_group.within_tp.ranks
    if mesh.divided is not None:
        *replicas, shards, tp = mesh.divided.get_all_groups()
        yield "tp", tp
        yield "dense of tp", shards
        for group in replicas:
            yield "dp", group


def test_groups_are_those_of_the_mesh() -> None:
    """Which torch counts out in its own way."""
    for topology in _topologies():
        rank = topology.world_size * 5 // 8
        with fake_mesh(topology, rank) as mesh:
            for axis, group in _groups_of(mesh):
                assert group is not None
                assert dist.get_process_group_ranks(group) == list(topology.group(axis, rank)), (topology, axis)


def test_groups_are_lines_of_the_grids() -> None:
    """Those of which process groups are made, so that the mesh's tell nothing of them."""
    for topology in _topologies():
        ranks = torch.arange(topology.world_size)
        stages = ranks.view(topology.pp_size, -1)
        data = ranks.view(-1, topology.cp_size, topology.tp_size)
        lines: dict[Axis, torch.Tensor] = {
            "world": ranks.unsqueeze(0),
            "pp": stages.T,
            "sequences": data.flatten(1),
            "cp": data.transpose(1, 2).flatten(0, 1),
            "tp": data.flatten(0, 1),
            "ep": ranks.view(-1, topology.ep_size),
        }
        for axis, expected in lines.items():
            assert list(map(list, topology.groups(axis))) == expected.tolist(), (topology, axis)


def test_groups_by_nodes() -> None:
    for topology, n in product(_topologies(), (1, 2, 4)):
        ep, ranks = topology.ep_size, range(topology.world_size)
        # what the ranks of a group have in common
        common: dict[Axis, list[Any]] = {"node": [rank // n for rank in ranks], "across nodes": [r % n for r in ranks]}
        if ep % n == 0 or n % ep == 0:
            common["ep inside node"] = [(rank // ep, rank // n) for rank in ranks]
            common["ep across nodes"] = [(rank // ep, rank % n) for rank in ranks]
        for axis, keys in common.items():
            expected = [[rank for rank in ranks if keys[rank] == key] for key in sorted(set(keys))]
            assert sorted(map(list, topology.groups(axis, n))) == sorted(expected), (topology, axis, n)


def test_every_rank_is_in_one_group_of_an_axis() -> None:
    for topology, axis in product(_topologies(), get_args(Axis)):
        groups = topology.groups(axis, 2)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        for group in groups:
            assert all(topology.group(axis, rank, 2) == group for rank in group), (topology, axis)


class Options(_distributed_c10d.Backend.Options):
    """In the place of `ProcessGroupNCCL.Options`, which a build for CPUs does not have."""

    def __init__(self) -> None:
        super().__init__("nccl")
        self.config = SimpleNamespace(max_ctas=None)


@pytest.mark.parametrize("topology", [*TOPOLOGIES[2:], Topology(8, 2, "full", 1, 2)], ids=str)
@pytest.mark.parametrize("overlaps", [False, True])
def test_beside_gemms_nccl_has_few_blocks(topology: Topology, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all groups of rows and of parameters, each with options of its own."""
    made: dict[str, Any] = {}
    monkeypatch.setattr("expertmesh.sharding.mesh.make_pipeline_groups", lambda *given: None)
    for module in ("mesh", "collectives.node_groups"):
        # there is no GPU to send from
        monkeypatch.setattr(f"expertmesh.sharding.{module}.warm_up", lambda *given: None)
    new_group = distributed_c10d.new_group

    def recording(*given: Any, pg_options: Any = None, **settings: Any) -> Any:
        group = new_group(*given, **settings)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            made[group.group_name] = pg_options
        return group

    monkeypatch.setattr(distributed_c10d, "new_group", recording)
    monkeypatch.setattr(device_mesh, "new_group", recording)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    dist.init_process_group("fake", rank=5, world_size=topology.world_size, store=FakeStore())
    try:
        mesh = build_mesh("cuda", topology, overlaps=overlaps)
        groups = [mesh.exchange, mesh.dp.get_group(), mesh.ep.get_group(), mesh.all_ranks.get_group()]
        if topology.ep_size > 2:
            strategy = Strategy(dispatch="node", ranks_per_node=2, overlap_chunks=2 if overlaps else 1)
            dispatcher: Any = choose_dispatcher(mesh, strategy, top_k=2)(2 * topology.ep_size)
            groups += [dispatcher.nodes.across, dispatcher.nodes.inside]
        found: list[Any] = [made.get(name) for name in {group.group_name for group in groups}]
    finally:
        dist.destroy_process_group()
    if not overlaps:
        assert found == [None] * len(found)
        return
    assert [options.config.max_ctas for options in found] == [LEFT] * len(found)
    assert len({id(options) for options in found}) == len(found)


@pytest.mark.slow
def test_its_time_limit_and_its_name(ranks: RankPool) -> None:
    for topology in (Topology(4, 4), Topology(4, 2, "hybrid"), Topology(4, 2)):
        # a group of its own where FSDP uses that of ep, too
        group = "ep" if topology == Topology(4, 2) else "ep (tokens)"
        told = (timedelta(seconds=77), f"all_gather over {group} of Float [2]")
        assert ranks.run(_gather, 4, topology) == [told] * 4


def _gather(topology: Topology) -> tuple[timedelta, str]:
    mesh = build_mesh("cpu", topology, timeout_seconds=77)
    parts = [torch.empty(2) for _ in range(topology.ep_size)]
    dist.all_gather(parts, torch.zeros(2), group=mesh.exchange)
    options = mesh.exchange._get_backend(torch.device("cpu")).options
    return options._timeout, str(recorded_collectives()[-1]).partition(", called")[0]
