"""Which way tokens take to their experts, by what a run asks for and by which ranks share a node."""

from collections.abc import Callable
from functools import partial

import torch

from ...moe.dispatch.dispatcher_entries import DISPATCHERS, dispatchers_of, resolve_dispatch
from ...moe.dispatch.dispatcher_registry import Dispatcher, DispatchOptions
from ...moe.util.errors import ExpertMeshError
from ...moe.util.registry import loaded
from ..collectives.groups import few_blocks
from ..collectives.node_groups import find_nodes, make_node_groups
from ..mesh import Mesh
from ..topology import Topology
from .choices import Strategy, ranks_of_equal_nodes, ranks_of_nodes

MakeDispatcher = Callable[[int], Dispatcher]
"""Makes a layer's dispatcher, of its number of experts."""


def choose_dispatcher(mesh: Mesh, strategy: Strategy, top_k: int) -> MakeDispatcher:
    """What makes the dispatchers of all layers; makes the groups that they need. All ranks call it together.

    Args:
        top_k: experts per token.

    Raises:
        ExpertMeshError: nodes have unequally many ranks, and a dispatcher that goes by nodes was asked for.
    """
    topology, found = mesh.topology, None
    if any(entry.by_nodes for entry in dispatchers_of(strategy.dispatch)):
        found = _ranks_on_node(topology, strategy)
    entry = resolve_dispatch(strategy.dispatch, topology.ep_size, found, top_k)
    chunks, group, nodes = strategy.overlap_chunks, mesh.exchange, None
    if entry.by_nodes:
        assert found is not None
        device_type = mesh.grid.device_type
        options = partial(few_blocks, device_type if chunks > 1 else "cpu")
        nodes = make_node_groups(mesh.topology, found, mesh.timeout, options, device_type)
    sum_dtype = torch.float32 if strategy.sums_in_fp32 and entry.sums else None
    make = loaded(entry.make)
    return lambda num_experts: make(DispatchOptions(num_experts, group, chunks, nodes, sum_dtype))


def _ranks_on_node(topology: Topology, strategy: Strategy) -> int | None:
    """The ranks that each node has of an ep group; None where they have unequally many.

    Raises:
        ExpertMeshError: they have by --ranks-per-node, and a dispatcher that goes by nodes was asked for.
    """
    given = strategy.ranks_per_node
    if given is None:
        return ranks_of_nodes(find_nodes(topology.world_size), topology.ep_size)
    found = ranks_of_equal_nodes(topology.world_size, given, topology.ep_size)
    if found is None and strategy.dispatch != "auto":
        raise ExpertMeshError(
            f"--ranks-per-node {given}: the {topology.ep_size} ranks of an EP group are spread "
            f"unevenly over nodes; --dispatch {strategy.dispatch} needs equal numbers, --dispatch "
            f"{DISPATCHERS.get(strategy.dispatch).without_nodes} does not"
        )
    return found
