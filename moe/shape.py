"""The sizes of an MoE layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoEShape:
    """The sizes of one MoE layer, whatever names the model's config uses for them."""

    model_width: int
    expert_width: int
    num_experts: int
    top_k: int
    normalize_top_k: bool
    jitter_noise: float = 0.0
