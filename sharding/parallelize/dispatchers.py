"""Which way tokens take to their experts, by what a run asks for and by which ranks share a node."""

from collections.abc import Callable
from functools import partial

import torch

from ...moe.dispatch.alltoall import AllToAllDispatcher, Dispatcher
from ...moe.dispatch.dedup import OnceDispatcher
from ...moe.util.errors import ExpertMeshError
from ..collectives.nccl import few_blocks
from ..collectives.node_groups import find_nodes, make_node_groups
from ..mesh import Mesh
from ..topology import Topology
from .choices import Strategy, ranks_of_equal_nodes, ranks_of_nodes, resolve_dispatch

MakeDispatcher = Callable[[int], Dispatcher]
"""Makes a layer's dispatcher, of its number of experts."""


def choose_dispatcher(mesh: Mesh, strategy: Strategy, top_k: int) -> MakeDispatcher:
    """What makes the dispatchers of all layers; makes the groups that they need. All ranks call it together.

    Args:
        top_k: experts per token.

    Raises:
        ExpertMeshError: nodes have unequally many ranks, and --dispatch node was asked for.
    """
    topology, found = mesh.topology, None
    if strategy.dispatch in ("auto", "node"):
        found = _ranks_on_node(topology, strategy)
    kind = resolve_dispatch(strategy.dispatch, topology.ep_size, found, top_k)
    chunks, group = strategy.overlap_chunks, mesh.exchange
    if kind == "plain":
        return lambda num_experts: AllToAllDispatcher(num_experts, group, chunks)
    nodes = None
    if kind == "node":
        assert found is not None
        device_type = mesh.grid.device_type
        options = partial(few_blocks, device_type if chunks > 1 else "cpu")
        nodes = make_node_groups(mesh.topology, found, mesh.timeout, options, device_type)
    sum_dtype = torch.float32 if strategy.sums_in_fp32 else None
    return lambda num_experts: OnceDispatcher(num_experts, group, chunks, nodes, sum_dtype)


def _ranks_on_node(topology: Topology, strategy: Strategy) -> int | None:
    """The ranks that each node has of an ep group; None where they have unequally many.

    Raises:
        ExpertMeshError: they have by --ranks-per-node, and --dispatch node was asked for.
    """
    given = strategy.ranks_per_node
    if given is None:
        return ranks_of_nodes(find_nodes(topology.world_size), topology.ep_size)
    found = ranks_of_equal_nodes(topology.world_size, given, topology.ep_size)
    if found is None and strategy.dispatch == "node":
        raise ExpertMeshError(
            f"--ranks-per-node {given}: leaves the {topology.ep_size} ranks of an EP group on nodes with unequally "
            "many of them; --dispatch node needs equally many, --dispatch rank does not"
        )
    return found
