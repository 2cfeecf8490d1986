"""Tensors without memory, for operators too whose shapes torch does not tell."""

import logging
from typing import Any

import torch
from torch import Tensor

from ....moe.torch_private import FakeTensorMode


class FakeTensors(FakeTensorMode):
    """Within it tensors hold no memory. torch knows the shape of `grouped_mm`'s result in bf16 alone, and computes it
    in fp32 too: that shape is given here. Every element counts as non-zero: the most that there could be.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # of an operator that fails it logs a traceback, besides raising what its caller tells in a line
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            return args[0].new_empty(_grouped_shape(args[0], args[1], kwargs["offs"] if kwargs else args[2]))
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped_shape(a: Tensor, b: Tensor, ends_e: Tensor) -> tuple[int, ...]:
    """Shape of a grouped GEMM: each expert's rows times its matrix; or, for two matrices, one product per expert,
    summed over its rows."""
    return (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(ends_e), a.shape[0], b.shape[1])
