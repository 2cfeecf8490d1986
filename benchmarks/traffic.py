"""Counts what collectives send, by kind, as they are called: nothing is inferred from the model."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "other")


class CountTraffic(TorchDispatchMode):
    """Within it, `sent[kind]` adds up the bytes that this rank has to send to others, and `calls[kind]` the calls.

    Sent is what the best algorithm sends with n ranks in the group: all-to-all, the rows for others; all-gather, this
    rank's part n-1 times; reduce-scatter, (n-1)/n of the input; all-reduce, twice that. A backend may send more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: what is compiled within this mode is compiled all the same, and not skipped for good."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it then calls collectives on plain tensors, which come by here
        namespace, _, name = func._schema.name.partition("::")
        group = _group(func, args) if namespace in ("c10d", "_c10d_functional", "expertmesh") else None
        if group is not None and name != "barrier":
            self._count(name, args, group)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any, group: ProcessGroup) -> None:
        others = group.size() - 1
        if name == "alltoall_base_":
            self._count_rows(args[1], args[4], group)
        elif name == "all_to_all_single":
            self._count_rows(args[0], args[2], group)
        elif "reduce_scatter" in name:
            data = args[1] if name.endswith("_") else args[0]
            self._add("reduce-scatter", _bytes(data) * others / group.size())
        elif "allgather" in name or "all_gather" in name:
            data = args[1] if name.endswith("_") else args[0]
            self._add("all-gather", _bytes(data) * others)
        elif "allreduce" in name or "all_reduce" in name:
            self._add("all-reduce", 2 * _bytes(args[0]) * others / group.size())
        elif name == "send":
            self._add("other", _bytes(args[0]))
        elif not name.startswith("recv"):
            self._add("other", _bytes(args[0]) * others)

    def _count_rows(self, data: Tensor, splits: Iterable[int], group: ProcessGroup) -> None:
        rows = list(splits) or [data.shape[0] // group.size()] * group.size()
        to_others = sum(rows) - rows[dist.get_rank(group)]
        self._add("all-to-all", to_others * data[:1].numel() * data.element_size() if len(data) else 0)

    def _add(self, kind: str, number: float) -> None:
        self.sent[kind] += number
        self.calls[kind] += 1


def _group(func: Any, args: Any) -> ProcessGroup | None:
    """The process group among an operator's arguments, whether it is given as itself, boxed, or by name; None for an
    operator that talks to nobody."""
    names = [argument.name for argument in func._schema.arguments]
    place = next((i for i, name in enumerate(names) if name in ("process_group", "group_name")), None)
    if place is None:
        return None
    group = args[place]
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, ProcessGroup) else ProcessGroup.unbox(group)


def _bytes(data: Any) -> int:
    if isinstance(data, Tensor):
        return data.numel() * data.element_size()
    return sum(_bytes(one) for one in data)
