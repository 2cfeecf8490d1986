"""Distillation: the loss of a student against a teacher's predictions.

Shape suffixes: N target tokens on this rank, K of the teacher's most likely tokens at each of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.train_config import TrainConfig
from ..data.batch import LossBatch
from .objective import Objective

FIGURES = ("teacher_kl", "cross_entropy")
"""What is told of each step: means over target tokens."""
TEACHER = "teacher"
"""Input by target, (N, K) fp32: the teacher's log-probabilities of the candidates."""


def distillation_objective(config: TrainConfig) -> Objective | None:
    """What `--teacher` minimises in place of the cross-entropy; None: there is no teacher.

    With w = --teacher-weight it is w times the Kullback-Leibler divergence of the student's prediction from the
    teacher's, and 1 - w times the cross-entropy of the data's tokens (Hinton et al., arXiv 1503.02531, at temperature
    1). The divergence is of the teacher's K most likely tokens and of all others together, as one more outcome: it is 0
    where the student agrees, and never more than the divergence over the vocabulary.
    """
    if not config.teacher:
        return None
    weight = config.teacher_weight

    def loss(logprobs_NJ: Tensor, batch: LossBatch) -> tuple[Tensor, ...]:
        # of the target, then of the K candidates
        cross_entropy = -logprobs_NJ[:, 0].sum()
        student, teacher = with_rest(logprobs_NJ[:, 1:]), with_rest(batch[TEACHER])
        divergence = F.kl_div(student, teacher, reduction="sum", log_target=True)
        total = weight * divergence + (1 - weight) * cross_entropy
        return total, divergence.detach(), cross_entropy.detach()

    return Objective(loss, figures=FIGURES)


def with_rest(logprobs_NK: Tensor) -> Tensor:
    """(N, K + 1), with the log-probability of all other tokens together."""
    # in fp32 a sum may exceed 1, or be 1 where a little is left
    sum_N1 = logprobs_NK.logsumexp(dim=1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([logprobs_NK, torch.log(-torch.expm1(sum_N1))], dim=1)
