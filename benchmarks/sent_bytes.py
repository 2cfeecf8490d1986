"""Counts what a rank sends, by kind of collective, with the conventions of `sharding.planner.traffic`."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """While it is active, adds up in `sent` what this rank has to send, in bytes, and in `calls` how often.

    Keys: "all-gather", "reduce-scatter", "all-reduce", "all-to-all".
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted = _COUNTED.get(str(func.overloadpacket))
        if counted is not None:
            kind, count = counted
            self.sent[kind] += count(*args)
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def _group(boxed: Any) -> dist.ProcessGroup:
    return boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)


def _all_gather(output: Tensor, input: Tensor, group: Any, *_: Any) -> int:
    return (_group(group).size() - 1) * input.nbytes


def _reduce_scatter(output: Tensor, input: Tensor, group: Any, *_: Any) -> int:
    size = _group(group).size()
    return input.nbytes * (size - 1) // size


def _all_reduce(tensors: Sequence[Tensor], group: Any, *_: Any) -> int:
    size = _group(group).size()
    return sum(2 * tensor.nbytes * (size - 1) // size for tensor in tensors)


def _all_to_all(
    output: Tensor, rows: Tensor, group: Any, received: Sequence[int], sent: Sequence[int], *_: Any
) -> int:
    return _to_others(rows, sent, _group(group))


def _our_all_to_all(rows: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> int:
    return _to_others(rows, sent, _resolve_process_group(group_name))  # type: ignore[arg-type]


def _to_others(rows: Tensor, sent: Sequence[int], group: dist.ProcessGroup) -> int:
    """Splits are in rows; none are given where all are equal."""
    share = sum(sent) - sent[group.rank()] if sent else rows.shape[0] * (group.size() - 1) // group.size()
    return share * rows[:1].numel() * rows.element_size() if rows.shape[0] else 0


_COUNTED: dict[str, tuple[str, Callable[..., int]]] = {
    "c10d._allgather_base_": ("all-gather", _all_gather),
    "c10d._reduce_scatter_base_": ("reduce-scatter", _reduce_scatter),
    "c10d.allreduce_": ("all-reduce", _all_reduce),
    "c10d.alltoall_base_": ("all-to-all", _all_to_all),
    "expertmesh.all_to_all": ("all-to-all", _our_all_to_all),
}
