"""Which ranks of an ep group share a node, and the groups by which a token reaches each node once."""

from collections.abc import Callable
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch.distributed as dist

from expertmesh.moe.dispatch.once import NodeGroups
from expertmesh.sharding.life.torchrun import node_name
from expertmesh.sharding.topology import Topology


def find_ranks_per_node(topology: Topology) -> int | None:
    """The ranks that each node has of an ep group; the size of the group where none spans nodes. None where nodes have
    unequally many, or a node's are not adjacent. All ranks call it together."""
    nodes: list[str] = [""] * topology.world_size
    dist.all_gather_object(nodes, node_name())
    return ranks_per_node(nodes, topology.ep_size)


def ranks_per_node(nodes: list[str], ep_size: int) -> int | None:
    """As `find_ranks_per_node`, by the name of every rank's node."""
    sizes = set()
    for first in range(0, len(nodes), ep_size):
        runs = [(name, len(list(ranks))) for name, ranks in groupby(nodes[first : first + ep_size])]
        if len({name for name, _ in runs}) < len(runs):
            return None
        sizes |= {size for _, size in runs}
    return sizes.pop() if len(sizes) == 1 else None


def make_node_groups(
    topology: Topology, ranks_per_node: int, timeout: timedelta | None, options: Callable[[], Any] = lambda: None
) -> NodeGroups:
    """The groups of this rank's ep group by nodes. All ranks call it together.

    Args:
        ranks_per_node: of each ep group; divides it.
        timeout: after which a collective in one of the groups fails; None: torch's.
        options: makes those of a group's backend.
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
    return NodeGroups(own_across, own_inside)
