"""Shared experts, computed during the all-to-alls of the routed ones.

Some families' blocks call a module of their own on the experts' tokens after the experts. With a `Beside` it is run
between the sending of the rows and their arrival, and its result is returned when the block calls it.
"""

from typing import Any

from torch import Tensor, nn

from .forward import Forward, current_forward


class Beside:
    """The module of one layer that is computed so. No `nn.Module`: the module stays where it is, under its own name."""

    def __init__(self, module: nn.Module):
        self.module: Any = module
        self._forward = module.forward
        module.forward = self._take

    def compute(self, x_TD: Tensor, forward: Forward) -> None:
        """Run the module now, on the tokens that the experts got."""
        forward.ahead_TD[self] = x_TD, self.module(x_TD)

    def _take(self, x: Tensor) -> Tensor:
        forward = current_forward()
        done = None if forward is None else forward.ahead_TD.pop(self, None)
        if done is not None and _are_the_same(x, done[0]):
            return done[1].view(*x.shape[:-1], -1)
        out: Tensor = self._forward(x)
        return out


def _are_the_same(x: Tensor, y: Tensor) -> bool:
    """Whether both are views of the same elements."""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.numel(), t.is_contiguous()) for t in (x, y)]
    return places[0] == places[1] and places[0][3]
