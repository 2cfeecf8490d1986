"""What an adapter adds to a linear layer (see `moe.experts.lora`).

Shape suffixes: r the adapter's rank, K the layer's input width, N its output width.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..util.step_parts import register_step_part

register_step_part(__name__, "adapters")


@dataclass(frozen=True)
class LowRank:
    """An adapter's rank, the factor of its delta, and its dropout."""

    rank: int
    scale: float
    dropout: float


def delta(x: Tensor, a_rK: Tensor, b_Nr: Tensor, low_rank: LowRank, is_training: bool) -> Tensor:
    """dropout(x) · Aᵀ · Bᵀ, in the dtype of x, without the factor."""
    low = F.linear(F.dropout(x, low_rank.dropout, is_training), a_rK.to(x.dtype))
    return F.linear(low, b_Nr.to(x.dtype))
