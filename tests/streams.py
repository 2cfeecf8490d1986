"""What a stream beside the one that computes reads and writes, found out on a CPU.

A GPU's allocator knows the stream that a tensor was made on. Where the host gives it up while another stream still
reads it, its memory is the next tensor's of the first, and may be overwritten before it is read: no error, and other
numbers once in a while. So a test asks of each tensor that operators on the second stream touch, and that was made
before, whether it is still there when the host has waited for that stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Beside(TorchDispatchMode):
    """The operators of a stream: which memory, made before, they have touched."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: dict[int, tuple[str, StorageWeakRef]] = {}
        self.own: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            weak = StorageWeakRef(tensor.untyped_storage())
            if weak.cdata not in self.own:
                self.touched[weak.cdata] = str(operator), weak
        made = operator(*args, **(kwargs or {}))
        known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in given}
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and (cdata := StorageWeakRef(leaf.untyped_storage()).cdata) not in known:
                self.own.add(cdata)
        return made

    def given_up(self) -> list[str]:
        """The operators some of whose memory is gone already; forgets all."""
        gone = [name for name, weak in self.touched.values() if weak.expired()]
        self.touched.clear()
        self.own.clear()
        return gone


@contextmanager
def watching_counts() -> Iterator[tuple[list[str], list[int]]]:
    """Within it, (operators of the counts' stream whose memory the host has given up before it has waited for them,
    how many tensors each wait was for)."""
    from expertmesh.moe.dispatch import alltoall as plain
    from expertmesh.moe.dispatch import dedup as once

    beside, gone, waits = Beside(), [], []
    wait = plain.wait_for_counts

    def waiting(device: torch.device) -> None:
        waits.append(len(beside.touched))
        gone.extend(beside.given_up())
        wait(device)

    with (
        mock.patch.object(torch.cpu, "stream", return_value=beside),
        mock.patch.object(plain, "wait_for_counts", waiting),
        mock.patch.object(once, "wait_for_counts", waiting),
    ):
        yield gone, waits
