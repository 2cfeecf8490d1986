"""How much memory tensors hold at once: counted from storages as operators make them and as they go."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....moe.experts.bf16_copies import WorkingWeights
from ....moe.torch_private import CalledDirectly, watching_resizes
from ....moe.util.tensors import tensors_in
from ....sharding.state import has_dtensor, local_storage


class Pausable:
    """is_paused: whether what happens now is not reported."""

    is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it nothing is reported."""
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused


class LiveTensors(CalledDirectly, Pausable, TorchDispatchMode):
    """Within it, `peak` is the most bytes that storages held at once: of `held`, and of all that operators make.
    `changed` is called with the number of each storage that grows or shrinks, by how much, and whether it is freed.

    While it `is_paused`, what is made is never counted, and what goes stays counted. What the C library keeps of memory
    that was given back, and what is no tensor, is not counted. FSDP frees what it has gathered by making its storage
    empty, which no operator tells of: so resizing is watched too.

    Python's garbage collector does not run by itself within it, as it does not within a run's steps: otherwise a tensor
    of cyclic garbage would go at a moment that depends on how many objects the process has made before.
    """

    def __init__(
        self,
        held: Iterable[Tensor],
        changed: Callable[[int, int, bool], object] = lambda number, more, is_gone: None,
    ):
        super().__init__()
        self.changed = changed
        self.sizes: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.left_out: set[int] = set()
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._numbering = itertools.count()
        self.total = 0
        self.peak = 0
        for tensor in held:
            self._add(local_storage(tensor))

    def __enter__(self) -> "LiveTensors":
        def resized(storage: torch.UntypedStorage) -> None:
            if (key := storage._cdata) in self.sizes:
                self._change(key, storage.nbytes() - self.sizes[key])

        self._watching = watching_resizes(resized)
        self._watching.__enter__()
        entered: LiveTensors = super().__enter__()
        self._collects = gc.isenabled()
        gc.disable()
        return entered

    def __exit__(self, *error: Any) -> None:
        if self._collects:
            gc.enable()
        super().__exit__(*error)
        self._watching.__exit__(None, None, None)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_dtensor(types):
            return NotImplemented  # what it does with its local tensor comes here by itself
        result = operator(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._add(tensor.untyped_storage())
        return result

    def number(self, tensor: Tensor) -> int | None:
        """The number that `changed` is given for a tensor's storage; None if it is not counted."""
        return self.numbers.get(local_storage(tensor)._cdata)

    @contextmanager
    def noting_casts(self) -> Iterator[set[int]]:
        """Within it, the numbers of storages that are experts' weights in the compute dtype go into what it gives."""
        casts: set[int] = set()
        rounded = WorkingWeights._rounded

        def noted(working: WorkingWeights, *args: Any) -> Tensor:
            found = rounded(working, *args)
            if (number := self.numbers.get(found.untyped_storage()._cdata)) is not None:
                casts.add(number)
            return found

        with mock.patch.object(WorkingWeights, "_rounded", noted):
            yield casts

    def _add(self, storage: torch.UntypedStorage) -> None:
        # the address of the storage itself: that of its memory may be another's before this one is gone
        key = storage._cdata
        if key in self.sizes or key in self.left_out:
            return
        if self.is_paused:
            self.left_out.add(key)
        else:
            self.sizes[key], self.numbers[key] = 0, next(self._numbering)
            self._change(key, storage.nbytes())
        # not weakref.finalize, which takes several times as long to be made and to be called
        self._ends[key] = weakref.ref(storage, lambda _: self._drop(key))

    def _change(self, key: int, more: int) -> None:
        self.sizes[key] += more
        self.total += more
        self.changed(self.numbers[key], more, False)
        self.peak = max(self.peak, self.total)

    def _drop(self, key: int) -> None:
        del self._ends[key]
        if key in self.left_out:
            self.left_out.remove(key)
            return
        size, number = self.sizes.pop(key), self.numbers.pop(key)
        if not self.is_paused:
            self.total -= size
            self.changed(number, -size, True)
