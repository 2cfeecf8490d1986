"""A forward that is run again for its backward, of which selective checkpointing has kept some results.

What would be sent is then of use to nobody: whoever computes it makes autograd's node, keeps what backward needs, and
leaves out the computing.
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
    """What a forward has kept for when it is run again: names and results, in the order of their making.

    is_replaying: whether this is the second run.
    """

    is_replaying: bool
    results: deque[tuple[str, Any]] = field(default_factory=deque)

    def keep(self, name: str, found: Any) -> None:
        # the tensor that goes on will hold the graph that made it
        self.results.append((name, tree_map_only(Tensor, Tensor.detach, found)))

    def take(self, name: str) -> Any:
        """What was kept in the first run."""
        assert self.results, "what selective checkpointing kept serves one backward only"
        kept, found = self.results.popleft()
        assert kept == name, (kept, name)
        return found


KEEPER: ContextVar[Keeper | None] = ContextVar("KEEPER", default=None)
"""Of the forward that is being run; None where nothing of it is kept."""


_PRODUCTS_ARE_KEPT: ContextVar[bool] = ContextVar("_PRODUCTS_ARE_KEPT", default=False)


def is_replaying() -> bool:
    """Whether this forward is run again, with the rows at hand that the all-to-alls brought."""
    keeper = KEEPER.get()
    return keeper is not None and keeper.is_replaying


def kept(name: str, compute: Callable[[], Any]) -> Any:
    """What `compute` gives, tensors without a graph; in a replay, what it gave in the first run."""
    keeper = KEEPER.get()
    if keeper is None:
        return compute()
    if keeper.is_replaying:
        return keeper.take(name)
    found = compute()
    keeper.keep(name, found)
    return found


@contextmanager
def keeping_products(are_kept: bool) -> Iterator[None]:
    """Whether what is computed within it by `kept_product` is kept."""
    token = _PRODUCTS_ARE_KEPT.set(are_kept)
    try:
        yield
    finally:
        _PRODUCTS_ARE_KEPT.reset(token)


def kept_product(compute: Callable[[], Any]) -> Any:
    """As `kept`, within `keeping_products`. Of a product that is made of others the whole alone."""

    def product() -> Any:
        with keeping_products(False):
            return compute()

    return kept("product", product) if _PRODUCTS_ARE_KEPT.get() else compute()


def placeholder(like: Tensor, *shape: int) -> Tensor:
    """Stands in for a result that nobody reads: of that shape, with the memory of a single number."""
    return like.new_zeros(()).expand(shape)
