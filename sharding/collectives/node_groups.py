"""Which ranks share a node, and the groups by which a token reaches each node once."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...moe.dispatch.dedup import NodeGroups
from ..topology import Topology, check_tp_nodes, nodes_of_equal_size
from ..torchrun import node_name
from .warm_up import warm_up


def find_nodes(world_size: int) -> list[str]:
    """The name of every rank's node. All ranks call it together."""
    nodes = [""] * world_size
    dist.all_gather_object(nodes, node_name())
    return nodes


def check_tp_groups(topology: Topology, ranks_per_node: int | None) -> None:
    """All ranks call it together.

    Args:
        ranks_per_node: of all ranks, as many as have fast links between them; None: those that share a host.

    Raises:
        ExpertMeshError: on all ranks, where a tensor-parallel group has ranks on several nodes.
    """
    if topology.tp_size > 1:
        check_tp_nodes(topology, _nodes(topology.world_size, ranks_per_node))


def _nodes(world_size: int, ranks_per_node: int | None) -> list[str]:
    return find_nodes(world_size) if ranks_per_node is None else nodes_of_equal_size(world_size, ranks_per_node)


def make_node_groups(
    topology: Topology,
    ranks_per_node: int,
    timeout: timedelta | None,
    options: Callable[[], Any] = lambda: None,
    device_type: str = "cpu",
) -> NodeGroups:
    """The groups of this rank's ep group by nodes. All ranks call it together.

    Args:
        ranks_per_node: of each ep group; divides it.
        timeout: after which a collective in one of the groups fails; None: torch's.
        options: makes those of a group's backend.
        device_type: of the tensors that are sent.
    """
    groups = [range(first, first + topology.ep_size) for first in range(0, topology.world_size, topology.ep_size)]
    across = [list(group[place::ranks_per_node]) for group in groups for place in range(ranks_per_node)]
    inside = [
        list(group[first : first + ranks_per_node])
        for group in groups
        for first in range(0, topology.ep_size, ranks_per_node)
    ]
    own_across, _ = dist.new_subgroups_by_enumeration(
        across, timeout, pg_options=options(), group_desc="mesh_ep_across_nodes"
    )
    own_inside, _ = dist.new_subgroups_by_enumeration(
        inside, timeout, pg_options=options(), group_desc="mesh_ep_inside_node"
    )
    assert own_across is not None
    assert own_inside is not None
    warm_up([], [own_across, own_inside], device_type)
    return NodeGroups(own_across, own_inside)
