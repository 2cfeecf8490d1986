"""Direct preference optimization: losses of pairs of answers against a frozen reference.

Shape suffixes: N target tokens on this rank, P pairs that are counted on it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.train_config import TrainConfig
from ..data.batch import LossBatch
from .objective import Objective

FIGURES = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)
"""What is told of each step, under trl's names: means over pairs."""
REFERENCE, TARGETS, SFT = "reference", "targets", "sft"
"""Inputs by sample, chosen and rejected in turn: the reference's log-probability, target tokens, and the weight of a
target token in the SFT term."""


def preference_objective(config: TrainConfig) -> Objective | None:
    """What `--task` minimises; None: the cross-entropy.

    With b = --preference-beta and a pair's margin m, the chosen answer's log-probability less the reference's, less the
    same of the rejected one: `sigmoid` is -log sigmoid(b m) (DPO, arXiv 2305.18290, equation 7); `ipo` is (m - 1 / 2b)²
    of log-probabilities per target token (arXiv 2310.12036, equation 17, with the mean that its authors use, as in
    trl). --preference-sft-weight adds the mean cross-entropy of the chosen answers' tokens.
    """
    if config.task == "sft":
        return None
    beta, is_ipo, sft_weight = config.preference_beta, config.preference_loss == "ipo", config.preference_sft_weight

    def loss(logprobs_N: Tensor, batch: LossBatch) -> tuple[Tensor, ...]:
        logps = batch.sums(logprobs_N)
        ratios = logps - batch[REFERENCE]
        chosen_P, rejected_P = ratios.view(-1, 2).unbind(1)
        if is_ipo:
            of_token_P, rejected_of_token_P = (ratios / batch[TARGETS]).view(-1, 2).unbind(1)
            terms_P = (of_token_P - rejected_of_token_P - 1 / (2 * beta)).square()
        else:
            terms_P = -F.logsigmoid(beta * (chosen_P - rejected_P))
        total = terms_P.sum() - sft_weight * (batch[SFT] * logps).sum()
        with torch.no_grad():
            margins_P = beta * (chosen_P - rejected_P)
            figures = (
                *(beta * chosen_P.sum(), beta * rejected_P.sum(), margins_P.sum(), (margins_P > 0).double().sum()),
                *(part_P.sum() for part_P in logps.view(-1, 2).unbind(1)),
            )
        return total, *figures

    return Objective(loss, lambda batch: batch.num_samples / 2, FIGURES)
