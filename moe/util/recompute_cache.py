"""Recomputation of a forward for its backward, some results of which selective checkpointing has kept.

Results that would be sent are then not needed: within `for_backward_alone` the code for them makes autograd's node,
keeps what backward needs, and skips the computation.

What is kept belongs to one layer of one forward: checkpointing makes a `Keeper` for each call of a layer, which the
call's graph holds, and makes it current only in that call and its recomputation. So it needs no place in the `Forward`
(see `moe.experts.forward`), and two forwards that wait for their backwards share none.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass
class Keeper:
    """The results that a forward keeps for its recomputation, with names, in the order of computation.

    is_replaying: whether this is the second run.
    """

    is_replaying: bool
    results: deque[tuple[str, Any]] = field(default_factory=deque)

    def keep(self, name: str, found: Any) -> None:
        # the tensor that is passed on will hold the graph that made it
        self.results.append((name, tree_map_only(Tensor, Tensor.detach, found)))

    def take(self, name: str) -> Any:
        """What was kept in the first run."""
        assert self.results, "what selective checkpointing kept serves one backward only"
        kept, found = self.results.popleft()
        assert kept == name, (kept, name)
        return found


KEEPER: ContextVar[Keeper | None] = ContextVar("KEEPER", default=None)
"""The keeper of the current forward; None where nothing of it is kept."""


def is_replaying() -> bool:
    """Whether this forward is a recomputation, with the rows kept that the all-to-alls brought."""
    keeper = KEEPER.get()
    return keeper is not None and keeper.is_replaying


def kept(name: str, compute: Callable[[], Any]) -> Any:
    """The result of `compute`, tensors without a graph; in a replay, its result of the first run."""
    keeper = KEEPER.get()
    if keeper is None:
        return compute()
    if keeper.is_replaying:
        return keeper.take(name)
    found = compute()
    keeper.keep(name, found)
    return found


_FOR_BACKWARD_ALONE: ContextVar[bool] = ContextVar("_FOR_BACKWARD_ALONE", default=False)


@contextmanager
def for_backward_alone(is_so: bool) -> Iterator[None]:
    """Sets whether nobody reads what autograd functions return within it: they serve for their shapes and their
    backwards. An operation that is composed of several of them may be within it only with its last."""
    token = _FOR_BACKWARD_ALONE.set(is_so)
    try:
        yield
    finally:
        _FOR_BACKWARD_ALONE.reset(token)


def result_of(compute: Callable[[], Tensor], like: Tensor, *shape: int) -> Tensor:
    """The result of `compute`, of that shape, in the dtype of `like`; within `for_backward_alone` a placeholder."""
    return placeholder(like, *shape) if _FOR_BACKWARD_ALONE.get() else compute()


def placeholder(like: Tensor, *shape: int) -> Tensor:
    """A placeholder for a result that is not read: of that shape, with the memory of a single element."""
    return like.new_zeros(()).expand(shape)
