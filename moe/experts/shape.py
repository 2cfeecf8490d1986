"""The sizes of an MoE layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoEShape:
    """The sizes of one MoE layer, whatever names the model's config uses for them.

    has_gate: whether an expert multiplies its up projection by a gate. has_bias: whether its matmuls have a bias.
    """

    model_width: int
    expert_width: int
    num_experts: int
    top_k: int
    has_gate: bool = True
    has_bias: bool = False
