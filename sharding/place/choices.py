"""What a run can choose of memory against time, by name."""

from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "full", "selective"]
"""What a decoder layer recomputes in backward (see `sharding.place.recompute`)."""


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
    """

    checkpointing: Checkpointing = "none"
    keep_expert_products: int = 0
    offload: bool = False
    reshard_after_forward: bool = True
    overlap_chunks: int = 1
    offload_activations: bool = False
