"""Supervised fine-tuning: the next tokens of the data."""

from ..config.train_config import TrainConfig
from ..data.batch import WEIGHT
from ..loss.objective import CROSS_ENTROPY, Objective
from .task import Task

WEIGHTED = Objective(
    lambda logprobs_N, batch: -(batch[WEIGHT] * logprobs_N).sum(), lambda batch: float(batch[WEIGHT].double().sum())
)
"""The cross-entropy of data that have weights: the sum of weight times loss, divided by the sum of weights."""


class NextTokens(Task):
    def objective(self, config: TrainConfig, is_weighted: bool = False) -> Objective:
        return WEIGHTED if is_weighted else CROSS_ENTROPY
