"""Distillation: a student against a teacher's predictions of the data's target tokens.

Shape suffixes: N target tokens on this rank, K of the teacher's most likely tokens at each of them.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checkpoints.hf.source import ModelSource
from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks, raise_together
from ..config.train_config import TrainConfig
from ..data.batch import CANDIDATES, LossBatch
from ..loss.objective import Objective
from ..start.consistency import compare_teachers
from ..start.fingerprints import Facts
from ..start.inputs import Inputs
from .task import DataTraits, Preparation, Task, TaskInputs
from .teacher import TEACHER, be_taught, open_teacher

FIGURES = ("teacher_kl", "cross_entropy")
"""What is told of each step: means over target tokens."""


def distillation_objective(config: TrainConfig) -> Objective:
    """What `--teacher` minimises in place of the cross-entropy.

    With w = --teacher-weight it is w times the Kullback-Leibler divergence of the student's prediction from the
    teacher's, and 1 - w times the cross-entropy of the data's tokens (Hinton et al., arXiv 1503.02531, at temperature
    1). The divergence is of the teacher's K most likely tokens and of all others together, as one more outcome: it is 0
    where the student agrees, and never more than the divergence over the vocabulary.
    """
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


class Distillation(Task):
    _teacher: ModelSource
    _inputs: TaskInputs | None = None

    def objective(self, config: TrainConfig, data: DataTraits) -> Objective:
        return distillation_objective(config)

    def example_inputs(self, config: TrainConfig, samples: int, targets: int) -> Mapping[str, Tensor]:
        top_k = config.teacher_top_k
        return {CANDIDATES: torch.zeros(targets, top_k, dtype=torch.int64), TEACHER: torch.zeros(targets, top_k)}

    def check_weighted(self, config: TrainConfig) -> None:
        super().check_weighted(config)
        raise ExpertMeshError("--teacher: all its target tokens count alike; leave out the weights of the data")

    def open(self, config: TrainConfig, student: ModelSource, inputs: Inputs, ranks: Ranks) -> Facts:
        with raise_together(patient=ranks):
            self._teacher = open_teacher(config, inputs.tokenizer, student)
        return {"teacher": compare_teachers(self._teacher.path, ranks)}

    def before_loading(self, run: Preparation) -> None:
        if run.num_steps == 0:
            return
        run.at("the teacher's predictions")
        self._inputs = be_taught(run, self._teacher)

    def inputs(self, run: Preparation) -> TaskInputs:
        return self._inputs or super().inputs(run)
