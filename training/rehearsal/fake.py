"""Tensors without memory, for operators too whose shapes torch does not tell."""

import logging
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class FakeTensors(FakeTensorMode):
    """Within it tensors hold no memory. torch tells what `grouped_mm` gives in bf16 alone, and computes it in fp32 too:
    there its result is told here. What of a tensor is not zero is told to be all of it: the most that it could be.
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
    """Expert by expert rows times a matrix; or, of two matrices, a product each, summed over an expert's rows."""
    return (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(ends_e), a.shape[0], b.shape[1])
