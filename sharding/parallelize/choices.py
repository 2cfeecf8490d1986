"""What a run can choose of memory against time, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal

from ..topology import Topology

Checkpointing = Literal["none", "full", "selective"]
"""What a decoder layer recomputes in backward (see `sharding.parallelize.recompute`)."""

DispatchSums = Literal["same", "float32"]
"""The dtype in which sums over a token's experts travel; same: the compute dtype."""


@dataclass(frozen=True)
class Strategy:
    """How a step trades memory for time; what it computes is the same.

    Attributes:
        checkpointing: which results of a decoder layer to recompute in backward (see `checkpoint_layers`).
        keep_expert_products: in how many layers, the last ones, selective checkpointing also keeps the outputs of each
            expert's first GEMMs.
        offload: keep parameters and gradients in host memory, but for the layer that is being computed.
        reshard_after_forward: free a layer's gathered parameters after its forward and gather them again in backward;
            False keeps them, all layers' at once.
        offload_activations: keep checkpointed layers' inputs in host memory until backward (see `offload_inputs`).
        overlap_chunks: chunks in which a layer's rows are sent to their experts; one chunk's all-to-all overlaps
            another's GEMMs.
        dispatch: how tokens travel to their experts (see `moe.dispatch.dispatcher_entries`).
        ranks_per_node: of all ranks, as many as have fast links between them; None: those that share a host.
        offload_experts: keep frozen experts in host memory, but for two layers' (see `offload_frozen`).
        keep_expert_copies: keep experts' weights in the compute dtype, where FSDP does not gather them, from a step's
            first forward to its update; so does no `reshard_after_forward` (see `moe.experts.bf16_copies`).
        sums_in_fp32: whether sums of several experts' results, and of gradients, travel in fp32; else as tokens do.
    """

    checkpointing: Checkpointing = "none"
    keep_expert_products: int = 0
    offload: bool = False
    reshard_after_forward: bool = True
    overlap_chunks: int = 1
    offload_activations: bool = False
    dispatch: str = "auto"
    ranks_per_node: int | None = None
    sums_in_fp32: bool = False
    offload_experts: bool = False
    keep_expert_copies: bool = False


def ranks_of_nodes(nodes: Sequence[str], ep_size: int) -> int | None:
    """The ranks that each node has of an ep group; the size of the group where none spans nodes. None where nodes have
    unequally many, or a node's are not adjacent.

    Args:
        nodes: the name of every rank's node.
    """
    sizes = set()
    for group in Topology(len(nodes), ep_size).groups("ep"):
        runs = [(name, len(list(ranks))) for name, ranks in groupby(nodes[rank] for rank in group)]
        if len({name for name, _ in runs}) < len(runs):
            return None
        sizes |= {size for _, size in runs}
    return sizes.pop() if len(sizes) == 1 else None


@cache
def ranks_of_equal_nodes(world_size: int, ranks_per_node: int, ep_size: int) -> int | None:
    """As `ranks_of_nodes`, where every node has as many ranks."""
    return ranks_of_nodes([str(rank // ranks_per_node) for rank in range(world_size)], ep_size)
