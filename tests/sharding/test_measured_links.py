"""`mesh --check --json`: the cost model, fed with its own times, gives back the links that it was computed with."""

import pytest

from expertmesh.sharding.topology import Axis, Topology
from expertmesh.training.cluster.check import GroupSpeed, measured_links
from expertmesh.training.planning.planner.costs import Kind, seconds_among
from expertmesh.training.planning.planner.hardware import DEVICES, Hardware, Link

TRUE_LINKS = Link(450e9, 3e-6), Link(50e9, 8e-6)


def modelled_speeds(
    topology: Topology, gpus_per_node: int, beside_mesh: bool, links: tuple[Link, Link]
) -> list[GroupSpeed]:
    """What `check_groups` would measure on a machine that is as the cost model has it."""
    kinds: dict[Axis, Kind] = {"ep": "all-to-all", "dp": "all-reduce", "stage": "all-reduce", "pp": "send"}
    if beside_mesh:
        kinds |= {"node": "all-reduce", "across nodes": "all-reduce"}
    hardware = Hardware("true", DEVICES["H100"], *links)
    speeds = []
    for axis, kind in kinds.items():
        for members in topology.groups(axis, gpus_per_node):
            if len(members) > 1:
                ranks, sent = tuple(members), (8192.0, 2.0**26)
                small, large = (seconds_among(kind, size, ranks, hardware, gpus_per_node) for size in sent)
                speeds.append(GroupSpeed(axis, ranks, kind, sent, (small, large)))
    return speeds


@pytest.mark.parametrize(
    "topology",
    [Topology(16, ep) for ep in (1, 2, 8)] + [Topology(32, 4, pp_size=4), Topology(64, 8, pp_size=2)],
    ids=str,
)
def test_the_cost_models_own_times_give_its_links(topology: Topology) -> None:
    """Bytes that stay inside a node are not counted as crossing, nor a ring's hops as an all-to-all's."""
    has_inside = topology.ep_size > 1
    speeds = modelled_speeds(topology, 8, beside_mesh=not has_inside, links=TRUE_LINKS)
    for found, true in zip(measured_links(speeds, 8), TRUE_LINKS, strict=True):
        assert (found.bandwidth, found.latency) == pytest.approx((true.bandwidth, true.latency))


def test_links_where_every_group_of_the_mesh_spans_nodes() -> None:
    speeds = modelled_speeds(Topology(16, 16), 8, beside_mesh=True, links=TRUE_LINKS)
    for found, true in zip(measured_links(speeds, 8), TRUE_LINKS, strict=True):
        assert (found.bandwidth, found.latency) == pytest.approx((true.bandwidth, true.latency))


def test_links_that_hold_up_no_group() -> None:
    """Links between nodes so fast that those inside hold up every group: at least so fast."""
    fast = TRUE_LINKS[0], Link(2 * TRUE_LINKS[0].bandwidth, 8e-6)
    inside, between = measured_links(modelled_speeds(Topology(16, 8), 8, beside_mesh=False, links=fast), 8)
    assert inside.bandwidth == pytest.approx(fast[0].bandwidth)
    # a dp group has a rank on each node, and tells what there is; the ring over all of them does not count against it
    assert between.bandwidth == pytest.approx(fast[1].bandwidth)
    speeds = [s for s in modelled_speeds(Topology(16, 8), 8, False, fast) if s.name != "dp"]
    assert 0 < measured_links(speeds, 8)[1].bandwidth <= fast[1].bandwidth


def test_links_of_one_kind_stand_for_the_other() -> None:
    one_node = modelled_speeds(Topology(8, 2), 8, beside_mesh=False, links=TRUE_LINKS)
    inside, between = measured_links(one_node, 8)
    assert inside == between
    assert inside.bandwidth == pytest.approx(TRUE_LINKS[0].bandwidth)
    alone = modelled_speeds(Topology(8, 2), 1, beside_mesh=False, links=TRUE_LINKS)
    inside, between = measured_links(alone, 1)
    assert inside == between
    assert between.bandwidth == pytest.approx(TRUE_LINKS[1].bandwidth)
