"""Shared experts, computed while rows travel to the others.

Some families' blocks call a module of their own on the experts' tokens after the experts. With a `Beside` it is run
between the sending of the rows and their arrival, and what it gave is handed out when the block asks for it.
"""

from typing import Any

from torch import Tensor, nn


class Beside:
    """Of one layer. No `nn.Module`: the module stays where it is, under its own name.

    Args:
        block: that calls the module, and the experts.
    """

    def __init__(self, module: nn.Module, block: nn.Module):
        self.module: Any = module
        self._forward = module.forward
        self._is_ahead = False
        self._done: tuple[Tensor, Tensor] | None = None
        module.forward = self._take
        # what a checkpointed layer computes again ends, by an exception, as soon as backward has all that it needs: the
        # block has then not asked, and what is held would hold all that it was computed from
        block.register_forward_hook(self._forget, always_call=True)

    def compute(self, x_TD: Tensor) -> None:
        """Now, of the tokens that the experts were given."""
        self._is_ahead = True
        try:
            self._done = x_TD, self.module(x_TD)
        finally:
            self._is_ahead = False

    def _forget(self, *_: Any) -> None:
        self._done = None

    def _take(self, x: Tensor) -> Tensor:
        done, self._done = self._done, None
        if not self._is_ahead and done is not None and _are_the_same(x, done[0]):
            return done[1].view(*x.shape[:-1], -1)
        out: Tensor = self._forward(x)
        return out


def _are_the_same(x: Tensor, y: Tensor) -> bool:
    """Whether both are views of the same numbers."""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.numel(), t.is_contiguous()) for t in (x, y)]
    return places[0] == places[1] and places[0][3]
