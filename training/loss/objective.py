"""A loss of one's own, over the log-probabilities of target tokens.

Shape suffixes: N target tokens on this rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from ..data.batch import WEIGHT, Batch, LossBatch

LossFunction = Callable[[Tensor, LossBatch], Tensor | tuple[Tensor, ...]]
"""Of (logprobs_N, batch), gives a sum: over this rank's targets, over its samples, or both; with `figures` a tuple of
it and of their sums."""


@dataclass(frozen=True)
class Objective:
    """What a step minimises in place of the cross-entropy: the sum of `loss` over all ranks and micro-batches, divided
    by the sum of `count`.

    Attributes:
        loss: see `LossFunction`; logprobs_N are fp32, with gradients.
        count: what a micro-batch counts for on this rank; None: its target tokens.
        figures: names of further sums that `loss` gives, reported after the same division; they have no gradient.
    """

    loss: LossFunction
    count: Callable[[LossBatch], float] | None = None
    figures: tuple[str, ...] = ()

    def counted(self, batches: Sequence[Batch]) -> float:
        """What micro-batches count for on this rank.

        Raises:
            ExpertMeshError: `count` gives no number of 0 or more.
        """
        if self.count is None:
            return float(sum(batch.num_targets for batch in batches))
        found = [self.count(_told(batch)) for batch in batches]
        for gave in found:
            is_number = isinstance(gave, int | float) or (isinstance(gave, Tensor) and gave.numel() == 1)
            if not is_number or not 0 <= float(gave) < math.inf:
                said = repr(gave) if isinstance(gave, int | float) else _described(gave)
                raise ExpertMeshError(f"count gave {said}; it must give a number, 0 or more, for each micro-batch")
        return float(sum(found))

    def sums(self, logprobs_N: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(the loss, an fp32 scalar; the figures, (figures,) fp32 without gradients) of a micro-batch on this rank, not
        yet divided.

        Raises:
            ExpertMeshError: the function gives something else than sums.
        """
        gave = self.loss(logprobs_N, _told(batch))
        parts = gave if isinstance(gave, tuple) else (gave,)
        names = ("loss", *self.figures)
        are_scalars = all(isinstance(part, Tensor) and part.numel() == 1 for part in parts)
        if len(parts) != len(names) or not are_scalars:
            raise ExpertMeshError(
                f"the loss function gave {_described(gave)}; it must give one number for each of {', '.join(names)}: "
                "a tensor of one element, a sum over this rank's targets or samples"
            )
        loss, *figures = (part.reshape(()).float() for part in parts)
        # whatever it is made of, backward must come through the model on every rank
        loss = loss + 0.0 * logprobs_N.sum()
        return loss, torch.stack(figures).detach() if figures else loss.new_zeros(0)


WEIGHTED = Objective(
    lambda logprobs_N, batch: -(batch[WEIGHT] * logprobs_N).sum(), lambda batch: float(batch[WEIGHT].double().sum())
)
"""The cross-entropy of data that have weights: the sum of weight times loss, divided by the sum of weights."""


def _told(batch: Batch) -> LossBatch:
    assert batch.for_loss is not None, "it was made without what a loss of one's own needs"
    return batch.for_loss


def _described(gave: object) -> str:
    if isinstance(gave, tuple):
        return "a tuple of " + (", ".join(map(_described, gave)) or "nothing")
    return f"a tensor of shape {tuple(gave.shape)}" if isinstance(gave, Tensor) else f"a {type(gave).__name__}"
