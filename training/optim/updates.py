"""What updates of weights are made of. On a GPU `torch.compile` makes one kernel of all that an update does to a
tensor, which reads and writes it once; on a CPU torch's own operators do so a dozen times."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.training_state.resuming import ResumableOptimizer
from ...moe.util.gpu import takes_triton

Queued = tuple[Tensor, Tensor] | tuple[None, None]
NOT_QUEUED: Queued = (None, None)


class QueuedUpdates(ResumableOptimizer):
    """Its updates take from `_queued` what divides the gradients, and what leaves all as it was where it is not 0."""

    _queued: Queued = NOT_QUEUED

    def queue_step(self, scale: Tensor, is_skipped: Tensor) -> None:
        """See `training.steps.step.QueuesStep`."""
        self._queued = (scale, is_skipped)
        try:
            self.step()
        finally:
            self._queued = NOT_QUEUED


class Compiled:
    """A function that changes tensors in place: on a GPU compiled to one kernel when it first runs there, for tensors
    of any size."""

    def __init__(self, fn: Callable[..., None]):
        self.fn = fn
        self.__doc__ = fn.__doc__
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        if takes_triton(args[0]):
            self.run(*args)
        else:
            self.fn(*args)

    def run(self, *args: Any) -> None:
        if self._compiled is None:
            self._compiled = torch.compile(self.fn, dynamic=True)
        self._compiled(*args)


def numbers_beside(tensor: Tensor, numbers: Sequence[float]) -> list[Any]:
    """Numbers that a `Compiled` takes beside a tensor: floats where torch's own operators compute, and fp32 scalars
    where it is compiled, as it would be anew for each learning rate."""
    if not takes_triton(tensor):
        return [*numbers]
    # filled there: the host would wait for a copy
    return [torch.full((), each, dtype=torch.float32, device=tensor.device) for each in numbers]


def put(new: Tensor, into: Tensor, is_skipped: Tensor | None) -> None:
    """Give a tensor new values, but where `is_skipped`, a scalar, is not 0."""
    into.copy_(new if is_skipped is None else torch.where(is_skipped.bool(), into, new))


def decayed_and_changed(weight: Tensor, change: Tensor, decay: Any, rate: Any) -> Tensor:
    """Weights times `decay`, less `rate` times their change: both as `numbers_beside` makes them."""
    weight = weight * decay
    return weight - change * rate if isinstance(rate, Tensor) else weight.sub_(change, alpha=rate)
