"""Which ranks share a node, and the groups by which a token reaches each node once."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...moe.dispatch.dispatcher_registry import NodeGroups
from ..topology import Axis, Topology, check_tp_nodes, nodes_of_equal_size
from ..torchrun import node_name
from .groups import make_group
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
    axes: tuple[Axis, ...] = ("ep across nodes", "ep inside node")
    across, inside = (
        make_group(topology, axis, ranks_per_node=ranks_per_node, timeout=timeout, options=options()) for axis in axes
    )
    warm_up([], [across, inside], device_type)
    return NodeGroups(across, inside)
