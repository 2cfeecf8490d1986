"""How much memory tensors hold at once: counted from storages as operators make them and as they go."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sharding import has_dtensor, local_tensor


class LiveTensors(TorchDispatchMode):
    """Within it, `peak` is the most bytes that storages held at once: of `held`, and of all that operators make; `when`
    is what `moment` said then. What is made while it `is_paused` is not counted.

    What the C library keeps of memory that was given back, and what is no tensor, is not counted. FSDP frees what it
    has gathered by making its storage empty, which no operator tells of: so resizing is watched too.
    """

    def __init__(self, held: Iterable[Tensor], moment: Callable[[], Any] = lambda: None):
        super().__init__()
        self.moment = moment
        self.when: Any = None
        self.is_paused = False
        self.sizes: dict[int, int] = {}
        self.total = 0
        self.peak = 0
        for tensor in held:
            self._add(local_tensor(tensor.detach()))

    def __enter__(self) -> "LiveTensors":
        resize = torch.UntypedStorage.resize_

        def watched(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            if (key := storage._cdata) in self.sizes:
                self._change(key, storage.nbytes() - self.sizes[key])
            return resized

        self._watching = mock.patch.object(torch.UntypedStorage, "resize_", watched)
        self._watching.start()
        entered: LiveTensors = super().__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watching.stop()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_dtensor(args, kwargs):
            return NotImplemented  # what it does with its local tensor comes here by itself
        result = operator(*args, **(kwargs or {}))
        for leaf in () if self.is_paused else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # the address of the storage itself: that of its memory may be another's before this one is gone
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            self._change(key, storage.nbytes())
            weakref.finalize(storage, self._drop, key)

    def _change(self, key: int, more: int) -> None:
        self.sizes[key] += more
        self.total += more
        if self.total > self.peak:
            self.peak, self.when = self.total, self.moment()

    def _drop(self, key: int) -> None:
        self.total -= self.sizes.pop(key)
