"""Supervised fine-tuning: the next tokens of the data.

Shape suffixes: N target tokens on this rank, A samples that are counted on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig
from ..data.batch import WEIGHT, LossBatch, LossInputs
from ..data.sequences import Rows
from ..loss.objective import CROSS_ENTROPY, CrossEntropy, Objective
from ..metrics import LOSS_OF, SHARE_OF
from .task import DataTraits, InputsOf, Preparation, Task, TaskInputs, samples_in

WEIGHTED = CrossEntropy(
    lambda logprobs_N, batch: -(batch[WEIGHT] * logprobs_N).sum(), lambda batch: float(batch[WEIGHT].double().sum())
)
"""The cross-entropy of data that have weights: the sum of weight times loss, divided by the sum of weights."""
DATASET = "dataset"
"""Input by sample: the number of its data set."""


def by_sample(of_sample: bool, is_weighted: bool, datasets: Sequence[str]) -> Objective:
    """The mean cross-entropy, of samples' losses.

    Args:
        of_sample: whether each sample counts alike: the mean over samples of the mean over its target tokens. Else each
            target token does, or as much as its weight says.
        datasets: data sets of which the loss is told: figures are the sum and the number of what the loss is a mean of,
            divided by the number in all (see `training.metrics`).
    """

    def loss(logprobs_N: Tensor, batch: LossBatch) -> tuple[Tensor, ...]:
        weights_N = batch[WEIGHT] if is_weighted else torch.ones_like(logprobs_N)
        losses_A, weights_A = batch.sums(-weights_N * logprobs_N), batch.sums(weights_N)
        if of_sample:
            losses_A, weights_A = losses_A / weights_A, torch.ones_like(weights_A)
        are_of = [batch[DATASET] == number for number in range(len(datasets))]
        return losses_A.sum(), *((x_A * are_A).sum() for are_A in are_of for x_A in (losses_A.detach(), weights_A))

    count = (lambda batch: batch.num_samples) if of_sample else WEIGHTED.count if is_weighted else None
    return Objective(loss, count, tuple(of + name for name in datasets for of in (LOSS_OF, SHARE_OF)))


@dataclass(frozen=True)
class DatasetInputs:
    """number_A: of each sample's data set."""

    number_A: Tensor

    def within(self, rows: Rows, together: Sequence[int]) -> InputsOf:
        return lambda numbers: LossInputs({DATASET: self.number_A[samples_in(rows, numbers)]})


class NextTokens(Task):
    def objective(self, config: TrainConfig, data: DataTraits) -> Objective:
        of_sample, datasets = config.loss_average == "sample", data.datasets if config.loss_by_dataset else ()
        if of_sample or datasets:
            return by_sample(of_sample, data.is_weighted, datasets)
        return WEIGHTED if data.is_weighted else CROSS_ENTROPY

    def example_inputs(self, config: TrainConfig, samples: int, targets: int) -> Mapping[str, Tensor]:
        return {DATASET: torch.ones(samples, dtype=torch.int64)}

    def check_weighted(self, config: TrainConfig) -> None:
        super().check_weighted(config)
        if config.loss_average == "sample":
            raise ExpertMeshError(
                "--loss-average sample: each sample counts alike, which weights of the data contradict; leave out one "
                "of them"
            )

    def inputs(self, run: Preparation) -> TaskInputs:
        if not run.config.loss_by_dataset:
            return super().inputs(run)
        return TaskInputs.of({name: DatasetInputs(rows.samples.sources) for name, rows in run.rows.items()})
