"""Which way tokens take to their experts, by what a run asks for and by which ranks share a node."""

from collections.abc import Callable
from functools import partial

import torch

from expertmesh.moe import ExpertMeshError
from expertmesh.moe.dispatch.once import OnceDispatcher
from expertmesh.moe.dispatch.plain import AllToAllDispatcher, Dispatcher
from expertmesh.sharding.comms.nccl import few_blocks
from expertmesh.sharding.comms.node_groups import find_ranks_per_node, make_node_groups
from expertmesh.sharding.mesh import Mesh
from expertmesh.sharding.place.choices import Strategy, resolve_dispatch

MakeDispatcher = Callable[[int], Dispatcher]
"""Makes a layer's dispatcher, of its number of experts."""


def choose_dispatcher(mesh: Mesh, strategy: Strategy, top_k: int) -> MakeDispatcher:
    """What makes the dispatchers of all layers; makes the groups that they need. All ranks call it together.

    Args:
        top_k: experts per token.

    Raises:
        ExpertMeshError: --ranks-per-node does not divide the ep group.
    """
    found = strategy.ranks_per_node
    if found is None and strategy.dispatch in ("auto", "node") and mesh.topology.ep_size > 1:
        found = find_ranks_per_node(mesh.topology)
    ep_size = mesh.topology.ep_size
    if strategy.ranks_per_node is not None and found is not None and found < ep_size and ep_size % found:
        raise ExpertMeshError(
            f"--ranks-per-node {found} does not divide the {ep_size} ranks of --ep-size; nodes need as many each"
        )
    kind = resolve_dispatch(strategy.dispatch, ep_size, found, top_k)
    chunks, group = strategy.overlap_chunks, mesh.exchange
    if kind == "plain":
        return lambda num_experts: AllToAllDispatcher(num_experts, group, chunks)
    nodes = None
    if kind == "node":
        assert found is not None
        options = partial(few_blocks, mesh.grid.device_type if chunks > 1 else "cpu")
        nodes = make_node_groups(mesh.topology, found, mesh.timeout, options)
    sum_dtype = torch.float32 if strategy.sums_in_fp32 else None
    return lambda num_experts: OnceDispatcher(num_experts, group, chunks, nodes, sum_dtype)
