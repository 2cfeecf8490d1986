"""The linear layers of a model's decoder layers: transformers' own, of which the class is changed to `Linear`. Their
parameters' names stay.

A layer's attributes say how it multiplies. Its weight may be held transposed, as of those that tensor parallelism
divides by their inputs: so every parameter, of whatever layer, is divided along its dim 0, over whatever axes of ranks.
They lie so without tensor parallelism too: checkpoints, and what optimizers compute of blocks of rows, are then the
same with any layout.

Shape suffixes: M rows of the input, K the layer's input width, N its output width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .division import Division
from .fp8 import fp8_product, suits_rows
from .low_rank import LowRank, delta
from .quantized import SCALES, Kind, storages_of, store, stored_linear


class Linear(nn.Linear):
    """A linear layer; by default it computes what torch's does.

    Attributes:
        is_transposed: whether its weight is (in, out).
        is_fp8: whether bf16 inputs and weights are multiplied in fp8; others as ever.
        division: what of it ranks divide; None: nothing.
        low_rank: of its adapter, `lora_A` (r, in) and `lora_B` (out, r), transposed or not; None: it has none.
    """

    is_transposed: bool = False
    is_fp8: bool = False
    division: Division | None = None
    low_rank: LowRank | None = None
    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        out = self._multiplied(x)
        if self.low_rank is None:
            return out
        update = delta(x, self.part("lora_A"), self.part("lora_B"), self.low_rank, self.training)
        return torch.add(out, update, alpha=self.low_rank.scale)

    def part(self, name: str) -> Any:
        """A parameter or, where ranks divide the layer, what this one computes with in its place; None: nothing."""
        parameter = getattr(self, name)
        return parameter if parameter is None or self.division is None else self.division.part(name, parameter)

    def _multiplied(self, x: Tensor) -> Tensor:
        weight, bias, storage = self.part("weight"), self.part("bias"), storages_of(self).get("weight")
        if storage is not None:
            out = stored_linear(x, weight, self.part("weight" + SCALES), storage, self.is_transposed)
        elif self.is_fp8 and suits_rows(x):
            out = fp8_product(x, weight, self.is_transposed, self.division)
        elif self.is_transposed:
            out = x @ weight
        else:
            return F.linear(x, weight, bias)
        return out if bias is None else out + bias


def hold_transposed(linear: Any) -> None:
    """Have an nn.Linear on the meta device hold its weight transposed, in place."""
    weight_NK = linear.weight
    assert weight_NK.is_meta
    linear.__class__ = Linear
    linear.is_transposed = True
    linear.weight = nn.Parameter(weight_NK.detach().t().contiguous(), requires_grad=weight_NK.requires_grad)


def is_transposed(module: nn.Module) -> bool:
    return isinstance(module, Linear) and module.is_transposed


def use_fp8(linear: Any) -> None:
    """Have a linear layer, which may have an adapter, multiply by its weight in fp8, in place."""
    linear.__class__ = Linear
    linear.is_fp8 = True


def is_fp8(module: nn.Module) -> bool:
    return isinstance(module, Linear) and module.is_fp8


def quantize_weight(linear: Any, kind: Kind) -> None:
    """Have a linear layer, which may have an adapter, store its frozen weight in fewer bits, uninitialised, in place;
    before it is sharded."""
    linear.__class__ = Linear
    store(linear, "weight", kind)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer as torch has it, or one of these."""
    return type(module) in (nn.Linear, Linear)


def only_multiplies(module: nn.Module) -> bool:
    """Whether a module is a linear layer, in the dtype of its inputs and without an adapter."""
    is_changed = isinstance(module, Linear) and (module.is_fp8 or module.low_rank is not None)
    return is_linear(module) and not is_changed and "weight" not in storages_of(module)
