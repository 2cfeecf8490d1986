"""Tensors that hold no memory, in which steps are run: those of torch, whose results are kept by the arguments."""

import logging
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ....moe.torch_private import CalledDirectly, FakeTensor, FakeTensorMode, fake_like

aten = torch.ops.aten
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose results do not follow from what arguments look like, or that change how one looks."""


class _Result(NamedTuple):
    """A tensor that an operator gives.

    given: the argument that it is, or in whose storage it lies; -1: none. is_given: whether it is that argument.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    given: int = -1
    is_given: bool = False


_KNOWN: dict[Hashable, tuple[type | None, list[_Result | None]]] = {}
"""What operators gave, by what they were given: of all models of a process, as a plan tries one with several flags."""


class FakeTensors(CalledDirectly, FakeTensorMode):
    """Within it tensors hold no memory. torch knows the shape of `grouped_mm`'s result in bf16 alone, and computes it
    in fp32 too: that shape is given here. Every element counts as non-zero: the most that there could be.

    A step calls few operators, with many tensors that look alike: what they gave is kept here. torch keeps it too, but
    takes as long to look it up as all else takes by which a step is recorded.
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
        if func.namespace != "aten" or not _OF_DATA.isdisjoint(func.tags):
            return super().__torch_dispatch__(func, types, args, kwargs)
        asked = (func, torch.get_default_dtype(), _looks(args), _looks(tuple((kwargs or {}).items())))
        is_kept = None not in asked
        if is_kept and (known := _KNOWN.get(asked)) is not None:
            kind, results = known
            made = [None if each is None else self._make(each, args) for each in results]
            return made[0] if kind is None else kind(made)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_kept and (told := _told(result, args, kwargs)) is not None:
            _KNOWN[asked] = told
        return result

    def _make(self, result: _Result, args: Sequence[Any]) -> Tensor:
        if result.is_given:
            given: Tensor = args[result.given]
            return given
        if result.given < 0:
            made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        else:
            made = torch.empty(0, dtype=result.dtype, device="meta")
            made.set_(args[result.given].untyped_storage(), result.offset, result.shape, result.stride)
        if result.device not in self._held:
            first = FakeTensor(self, made, result.device)
            self._held[result.device] = dict(vars(first))
            return first
        return fake_like(FakeTensor, made, result.device, self._held[result.device])


def _looks(value: Any) -> Hashable:
    """How an argument looks, as a key; None where its results are not kept."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            return None
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad, value.fake_device
    if isinstance(value, tuple | list):
        looks = tuple(map(_looks, value))
        return None if None in looks else (type(value), looks)
    if isinstance(value, Tensor):
        return None
    # 1 and 1.0 are equal, but do not give equal types
    return (type(value), value)


def _told(result: Any, args: Sequence[Any], kwargs: Any) -> tuple[type | None, list[_Result | None]] | None:
    """The kind of sequence that an operator gives, if it gives one, and what is in it; None where that is not to be
    kept."""
    kind = type(result) if isinstance(result, tuple | list) else None
    results = [_result(each, args, kwargs) for each in (result if kind is not None else [result])]
    if kind not in (None, tuple, list) or False in results:
        return None
    return kind, [each or None for each in results]


def _result(tensor: Any, args: Sequence[Any], kwargs: Any) -> _Result | Literal[False] | None:
    """Returns None for none; False for what is not to be kept."""
    if tensor is None:
        return None
    is_plain = isinstance(tensor, FakeTensor) and tensor.constant is None and not tensor.requires_grad
    if not is_plain or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    looks = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device)
    storage = tensor.untyped_storage()
    for number, given in enumerate(args):
        if isinstance(given, Tensor) and given.untyped_storage()._cdata == storage._cdata:
            return _Result(*looks, number, given is tensor)
    others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_alone = all(other.untyped_storage()._cdata != storage._cdata for other in others)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    is_full = storage.nbytes() == (elements if tensor.numel() else 0) * tensor.element_size()
    return _Result(*looks) if is_alone and is_full and tensor.storage_offset() == 0 else False


def _grouped_shape(a: Tensor, b: Tensor, ends_e: Tensor) -> tuple[int, ...]:
    """Shape of a grouped GEMM: each expert's rows times its matrix; or, for two matrices, one product per expert,
    summed over its rows."""
    return (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(ends_e), a.shape[0], b.shape[1])
