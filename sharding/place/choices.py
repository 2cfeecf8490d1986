"""What a run can choose of memory against time, by name."""

from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "full", "selective"]
"""What a decoder layer recomputes in backward (see `sharding.place.recompute`)."""

Dispatch = Literal["auto", "plain", "rank", "node"]
"""How tokens travel to their experts: a row for each choice, once to each rank, or once to each node (see
`sharding.place.dispatchers`)."""

ResolvedDispatch = Literal["plain", "rank", "node"]

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
        dispatch: how tokens travel to their experts.
        ranks_per_node: of an ep group; None: as many as share a host.
        sums_in_fp32: whether sums of several experts' results, and of gradients, travel in fp32; else as tokens do.
    """

    checkpointing: Checkpointing = "none"
    keep_expert_products: int = 0
    offload: bool = False
    reshard_after_forward: bool = True
    overlap_chunks: int = 1
    offload_activations: bool = False
    dispatch: Dispatch = "auto"
    ranks_per_node: int | None = None
    sums_in_fp32: bool = False


def resolve_dispatch(asked: Dispatch, ep_size: int, ranks_per_node: int | None, top_k: int) -> ResolvedDispatch:
    """ "plain", "rank" or "node".

    Args:
        asked: "auto" becomes "plain" inside a node, where links are fast, and with one expert per token, of which
            nothing is sent twice; else "node".
        ranks_per_node: of an ep group; None: nodes have unequally many. With one rank on each node, or all on one, once
            to each node is once to each rank.
    """
    if asked in ("plain", "rank"):
        return asked
    spans_nodes = ranks_per_node is None or ranks_per_node < ep_size
    if asked == "auto" and (top_k == 1 or not spans_nodes):
        return "plain"
    return "node" if ranks_per_node is not None and 1 < ranks_per_node < ep_size else "rank"
