"""What a step minimises: the cross-entropy of target tokens, or a loss over their log-probabilities.

Shape suffixes: N target tokens on this rank.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from ..data.batch import Batch, LossBatch

LossFunction = Callable[[Tensor, LossBatch], Tensor | tuple[Tensor, ...]]
"""Of (logprobs_N, batch), gives a sum: over this rank's targets, over its samples, or both; with `figures` a tuple of
it and of their sums."""


Completion = Callable[[Batch], Batch]
"""Gives a micro-batch what its loss must know of all those that are together in a step, or in an evaluation."""


def as_they_are(model: Any, batches: Iterable[Batch], device: torch.device) -> Completion:
    """Of a loss that needs nothing of other micro-batches."""
    return lambda batch: batch


@dataclass(frozen=True)
class Objective:
    """What a step minimises: the sum of `loss` over all ranks and micro-batches, divided by the sum of `count`.

    Attributes:
        loss: see `LossFunction`; logprobs_N are fp32, with gradients.
        count: what a micro-batch counts for on this rank; None: its target tokens.
        figures: names of further sums that `loss` gives, reported after the same division; they have no gradient.
        complete: of a model, this rank's micro-batches of a step or an evaluation, and the device, what completes each
            of them; all ranks call it together.
    """

    loss: LossFunction
    count: Callable[[LossBatch], float] | None = None
    figures: tuple[str, ...] = ()
    complete: Callable[[Any, Iterable[Batch], torch.device], Completion] = as_they_are

    by_token: ClassVar[bool] = True
    """Whether it is a function of each target's log-probability, for which a batch has a `LossBatch`."""

    def counted(self, batches: Sequence[Batch]) -> float:
        """What micro-batches count for on this rank.

        Raises:
            ExpertMeshError: `count` gives no number of 0 or more.
        """
        if self.count is None:
            return float(sum(batch.num_targets for batch in batches))
        found = [self.count(batch.of_loss) for batch in batches]
        for gave in found:
            is_number = isinstance(gave, int | float) or (isinstance(gave, Tensor) and gave.numel() == 1)
            if not is_number or not 0 <= float(gave) < math.inf:
                said = repr(gave) if isinstance(gave, int | float) else _described(gave)
                raise ExpertMeshError(f"count gave {said}; it must give a number, 0 or more, for each micro-batch")
        return float(sum(found))

    def sums(self, logprobs_N: Tensor, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(the loss; the figures, without gradients) of a micro-batch on this rank, fp32 scalars, not yet divided.

        Raises:
            ExpertMeshError: the function gives something else than sums.
        """
        gave = self.loss(logprobs_N, batch.of_loss)
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
        return loss, tuple(figure.detach() for figure in figures)


class CrossEntropy(Objective):
    """Its fast way: the head sums up losses, with the batch's weights, and no token's log-probability is kept."""

    by_token = False

    def sums(self, logprobs_N: Tensor, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        return logprobs_N, ()  # their sum, negated


CROSS_ENTROPY = CrossEntropy(lambda logprobs_N, batch: -logprobs_N.sum())
"""The mean cross-entropy of the target tokens."""


def _described(gave: object) -> str:
    if isinstance(gave, tuple):
        return "a tuple of " + (", ".join(map(_described, gave)) or "nothing")
    return f"a tensor of shape {tuple(gave.shape)}" if isinstance(gave, Tensor) else f"a {type(gave).__name__}"
