"""Losses of answers against a frozen reference: of pairs (direct preference optimization), and of labelled answers
(Kahneman-Tversky optimization).

Shape suffixes: N target tokens on this rank, P pairs and A answers that are counted on it.
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
"""What is told of each step of pairs, under trl's names: means over pairs."""
REFERENCE, TARGETS, SFT = "reference", "targets", "sft"
"""Inputs by sample, chosen and rejected in turn: the reference's log-probability, target tokens, and the weight of a
target token in the SFT term."""
DESIRABLE, KL = "desirable", "kl"
"""Inputs by labelled answer: 1 where it is desirable, else 0, and the estimate of the divergence."""


def preference_objective(config: TrainConfig) -> Objective | None:
    """What `--task` minimises; None: the cross-entropy.

    With b = --preference-beta and a pair's margin m, the chosen answer's log-probability less the reference's, less the
    same of the rejected one: `sigmoid` is -log sigmoid(b m) (DPO, arXiv 2305.18290, equation 7); `ipo` is (m - 1 / 2b)²
    of log-probabilities per target token (arXiv 2310.12036, equation 17, with the mean that its authors use, as in
    trl). --preference-sft-weight adds the mean cross-entropy of the chosen answers' tokens.
    """
    if config.task == "sft":
        return None
    if config.task == "kto":
        return _of_labelled(config)
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


def _of_labelled(config: TrainConfig) -> Objective:
    """With b = --preference-beta, z the divergence (see `training.divergence`) and r an answer's log-probability less
    the reference's: 1 - sigmoid(b (r - z)) of a desirable answer, 1 - sigmoid(b (z - r)) of another one, each times its
    weight (arXiv 2402.01306, equations 7 and 8). `apo_zero_unpaired` has 0 in the place of z (arXiv 2408.06266).

    Figures of chosen and rejected answers are sums over them, divided by all answers, as is the number of each: see
    `training.metrics.of_preferences`.
    """
    beta, estimates = config.preference_beta, config.estimates_divergence

    def loss(logprobs_N: Tensor, batch: LossBatch) -> tuple[Tensor, ...]:
        logps_A = batch.sums(logprobs_N)
        ratios_A, desirable_A = logps_A - batch[REFERENCE], batch[DESIRABLE]
        kl_A = batch[KL] if estimates else torch.zeros_like(ratios_A)
        signs_A = 2 * desirable_A - 1
        weights_A = torch.where(signs_A > 0, config.desirable_weight, config.undesirable_weight)
        total = (weights_A * (1 - F.sigmoid(beta * signs_A * (ratios_A - kl_A)))).sum()
        with torch.no_grad():
            sides = (desirable_A, 1 - desirable_A)
            sums = [(side_A * x_A).sum() for x_A in (beta * ratios_A, logps_A) for side_A in sides]
            return total, *sums, *(side_A.sum() for side_A in sides), kl_A.sum()

    figures = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "chosen", "rejected", "kl")
    return Objective(loss, lambda batch: batch.num_samples, figures)
