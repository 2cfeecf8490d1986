"""The activation between an expert's two matmuls, computed by transformers' own code of the family.

Shape suffixes: R rows, F expert width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..util.step_parts import register_step_part

register_step_part(__name__, "experts' activation")


class Activation:
    """gate_RF, up_RF -> hidden_RF, as the experts module of a family in transformers has it.

    Attributes:
        is_swiglu: whether it is silu(gate) * up and nothing else, for which there are faster ways.
    """

    def __init__(self, experts: Any):
        """`experts`: an instance of a class marked with `use_experts_implementation`; its parameters are not needed."""
        from transformers.activations import SiLUActivation
        from transformers.integrations import moe as experts_of_transformers

        self.experts = experts
        gate = type(experts)._apply_gate
        self.is_default = gate.__module__ == experts_of_transformers.__name__
        is_silu = isinstance(getattr(experts, "act_fn", None), nn.SiLU | SiLUActivation)
        self.is_swiglu = bool(experts.has_gate) and self.is_default and is_silu

    def __call__(self, gate_RF: Tensor, up_RF: Tensor | None) -> Tensor:
        """`up_RF` is None where experts have no gate; `gate_RF` is then the output of their only first matmul."""
        hidden_RF: Tensor
        if up_RF is None:
            hidden_RF = self.experts.act_fn(gate_RF)
        elif self.is_default:
            hidden_RF = self.experts.act_fn(gate_RF) * up_RF
        else:
            hidden_RF = self.experts._apply_gate(self._joined(gate_RF, up_RF))
        return hidden_RF

    def _joined(self, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        """(R, 2F) in the family's order: concatenated or interleaved."""
        if self.experts.is_concatenated:
            return torch.cat([gate_RF, up_RF], dim=-1)
        return torch.stack([gate_RF, up_RF], dim=-1).flatten(-2)
