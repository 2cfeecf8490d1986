"""What operators give on tensors that hold no memory, kept by what their arguments look like.

A model calls few operators, with many tensors that look alike, and for most of them torch finds out in Python, anew at
each call, how the result looks.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..util.tensors import tensors_in

_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose results do not follow from what arguments look like, or that change how one looks."""


class Result(NamedTuple):
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

    def on_meta(self, args: Sequence[Any]) -> Tensor:
        """Such a tensor on the meta device, in the storage of the argument that it lies in."""
        if self.given < 0:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        made = torch.empty(0, dtype=self.dtype, device="meta")
        made.set_(args[self.given].untyped_storage(), self.offset, self.shape, self.stride)
        return made


class KnownResults:
    """What operators gave, by what they were given.

    Args:
        device_of: of a tensor without memory its device, and None of any other, with which nothing is kept.
    """

    def __init__(self, device_of: Callable[[Tensor], torch.device | None]):
        self._device_of = device_of
        self._known: dict[Hashable, tuple[type | None, list[Result | None]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def call(
        self,
        operator: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
        make: Callable[[Result, Sequence[Any]], Tensor],
    ) -> Any:
        """What the operator gives.

        Args:
            run: calls it, where that is not known. make: a tensor that holds no memory, of the arguments.
        """
        if not _is_kept(operator):
            return run()
        asked = (operator, torch.get_default_dtype(), self._looks(args), self._looks(tuple(kwargs.items())))
        if None in asked:
            return run()
        if (known := self._known.get(asked)) is not None:
            kind, results = known
            made = [
                None if each is None else args[each.given] if each.is_given else make(each, args) for each in results
            ]
            return made[0] if kind is None else kind(made)
        result = run()
        if (told := self._told(result, args, kwargs)) is not None:
            self._known[asked] = told
        return result

    def _looks(self, value: Any) -> Hashable:
        """How an argument looks, as a key; None where its results are not kept."""
        if isinstance(value, Tensor):
            device = self._device_of(value)
            if device is None:
                return None
            return value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad, device
        if isinstance(value, tuple | list):
            looks = tuple(map(self._looks, value))
            return None if None in looks else (type(value), looks)
        # 1 and 1.0 are equal, but do not give equal types
        return (type(value), value)

    def _told(self, result: Any, args: Sequence[Any], kwargs: Any) -> tuple[type | None, list[Result | None]] | None:
        """The kind of sequence that an operator gives, if it gives one, and what is in it; None where that is not to be
        kept."""
        kind = type(result) if isinstance(result, tuple | list) else None
        results = [self._result(each, args, kwargs) for each in (result if kind is not None else [result])]
        if kind not in (None, tuple, list) or False in results:
            return None
        return kind, [each or None for each in results]

    def _result(self, tensor: Any, args: Sequence[Any], kwargs: Any) -> Result | Literal[False] | None:
        """Returns None for none; False for what is not to be kept."""
        if tensor is None:
            return None
        device = self._device_of(tensor) if isinstance(tensor, Tensor) else None
        if device is None or tensor.requires_grad or tensor.layout != torch.strided:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        looks = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, device)
        storage = tensor.untyped_storage()
        for number, given in enumerate(args):
            if isinstance(given, Tensor) and given.untyped_storage()._cdata == storage._cdata:
                return Result(*looks, number, given is tensor)
        is_alone = all(x.untyped_storage()._cdata != storage._cdata for x in tensors_in(args, kwargs))
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        is_full = storage.nbytes() == (elements if tensor.numel() else 0) * tensor.element_size()
        return Result(*looks) if is_alone and is_full and tensor.storage_offset() == 0 else False


@cache
def _is_kept(operator: Any) -> bool:
    return operator.namespace == "aten" and _OF_DATA.isdisjoint(operator.tags)
