"""Tensors that hold no memory, in which steps are run: those of torch, whose results are kept by the arguments."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....moe.hf_model.known_results import KnownResults, Result
from ....moe.torch_private import CalledDirectly, FakeTensor, FakeTensorMode, fake_like

aten = torch.ops.aten


def _device(tensor: Tensor) -> torch.device | None:
    """None where a tensor holds memory, or a value is known of it."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) and tensor.constant is None else None


_KNOWN = KnownResults(_device)
"""Of all models of a process, as a plan tries one with several flags."""


class FakeTensors(CalledDirectly, FakeTensorMode):
    """Within it tensors hold no memory. torch knows the shape of `grouped_mm`'s result in bf16 alone, and computes it
    in fp32 too: that shape is given here. Every element counts as non-zero: the most that there could be.

    What operators gave is kept in `KnownResults`. torch keeps it too, but takes as long to look it up as all else takes
    by which a step is recorded.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # of an operator that fails it logs a traceback, besides raising what its caller tells in a line
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        # torch's own
        self.cache_enabled = False
        # attributes that a tensor on a device has when it is made
        self._held: dict[torch.device, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._grouped_mm.default and args[0].dtype == torch.float32:
            return args[0].new_empty(_grouped_shape(args[0], args[1], kwargs["offs"] if kwargs else args[2]))
        if func is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func.namespace == "profiler":
            # it has no tensors
            return func(*args, **(kwargs or {}))
        run = partial(super().__torch_dispatch__, func, types, args, kwargs)
        return _KNOWN.call(func, args, kwargs or {}, run, self._make)

    def _make(self, result: Result, args: Sequence[Any]) -> Tensor:
        made = result.on_meta(args)
        if result.device not in self._held:
            first = FakeTensor(self, made, result.device)
            self._held[result.device] = dict(vars(first))
            return first
        return fake_like(FakeTensor, made, result.device, self._held[result.device])


def _grouped_shape(a: Tensor, b: Tensor, ends_e: Tensor) -> tuple[int, ...]:
    """Shape of a grouped GEMM: each expert's rows times its matrix; or, for two matrices, one product per expert,
    summed over its rows."""
    return (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(ends_e), a.shape[0], b.shape[1])
