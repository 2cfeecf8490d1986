"""Kahneman-Tversky optimization: labelled answers against a frozen reference.

Rewards are measured from a point z, the KL divergence of the policy from the reference, which is estimated without
gradients as the mean log-probability ratio of answers behind other prompts, or 0 where that is negative (arXiv
2402.01306, section 4.2). Here the mean is over all samples of a step, or of an evaluation, which no layout changes; trl
has one for each micro-batch of all ranks.

Shape suffixes: N target tokens on this rank, A answers that are counted on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig
from ..data.batch import Batch, LossBatch, LossInputs
from ..data.samples import Labelled, Sample, Samples
from ..data.sequences import Rows
from ..loss.objective import Completion, Objective, as_they_are
from ..steps.evaluate import head_outputs, inference
from .reference_logprobs import REFERENCE, ReferencePass, references
from .task import DataTraits, InputsOf, Preparation, Task, TaskInputs, samples_in

DESIRABLE, KL = "desirable", "kl"
"""Inputs by answer: 1 where it is desirable, else 0, and the estimate of the divergence."""


def answer_objective(config: TrainConfig) -> Objective:
    """With b = --preference-beta, z the divergence and r an answer's log-probability less the reference's: 1 -
    sigmoid(b (r - z)) of a desirable answer, 1 - sigmoid(b (z - r)) of another one, each times its weight (arXiv
    2402.01306, equations 7 and 8). `apo_zero_unpaired` has 0 in the place of z (arXiv 2408.06266).

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
    complete = with_divergence if estimates else as_they_are
    return Objective(loss, lambda batch: batch.num_samples, figures, complete)


class LabelledAnswers(Task):
    def objective(self, config: TrainConfig, data: DataTraits) -> Objective:
        return answer_objective(config)

    def example_inputs(self, config: TrainConfig, samples: int, targets: int) -> Mapping[str, Tensor]:
        return {name: torch.ones(samples, dtype=torch.float64) for name in (REFERENCE, DESIRABLE, KL)}

    def check(self, config: TrainConfig, training: Samples, evaluation: Samples | None) -> None:
        super().check(config, training, evaluation)
        if not config.estimates_divergence:
            return
        for part in (training, evaluation):
            if isinstance(part, Labelled) and part.shift == len(part):
                raise ExpertMeshError(
                    f"--task kto sets answers behind other prompts, but all {len(part)} samples "
                    f"{'to train on' if part is training else 'held out'} have one; add others, or give "
                    "--preference-loss apo_zero_unpaired"
                )

    def inputs(self, run: Preparation) -> TaskInputs:
        config = run.config

        def mismatched(rows: Rows) -> MismatchedRows | None:
            return MismatchedRows(rows, config.max_seq_length) if config.estimates_divergence else None

        def of_answers(reference: ReferencePass, rows: Rows) -> Tensor:
            """Of each answer, and of the one behind the same prompt in its place, where that is needed."""
            known, others = reference.computed(rows), mismatched(rows)
            return torch.cat([known, reference.computed(others) if others else torch.zeros_like(known)], dim=1)

        def inputs(rows: Rows, reference_A2: Tensor) -> LabelledInputs:
            assert isinstance(rows.samples, Labelled)
            return LabelledInputs(rows.samples.is_desirable.double(), reference_A2, mismatched(rows))

        return references(run, "labelled answers", of_answers, inputs)


class MismatchedRows(Rows):
    """Entries of the same numbers, with another answer behind each prompt (see `Labelled.mismatched`)."""

    samples: Labelled

    def __init__(self, rows: Rows, max_seq_length: int):
        super().__init__(rows.samples, rows.groups)
        self.max_seq_length = max_seq_length

    def __getitem__(self, index: Any) -> Any:
        samples = [self.samples.mismatched(number) for number in self.numbers(index)]
        limit = self.max_seq_length
        return [Sample(sample.tokens[:limit], sample.is_trained[:limit]) for sample in samples]


@dataclass(frozen=True)
class LabelledInputs:
    """What the loss of labelled answers needs beside log-probabilities.

    desirable_A: 1 for a desirable answer, else 0, fp64. reference_A2: log-probabilities by the reference of each
    answer, and of the one behind the same prompt in its place, fp64. mismatched: the latter, where the loss needs them.
    """

    desirable_A: Tensor
    reference_A2: Tensor
    mismatched: Rows | None

    def within(self, rows: Rows, together: Sequence[int]) -> InputsOf:
        """See `BatchInputs`."""

        def inputs(numbers: list[int]) -> LossInputs:
            here = samples_in(rows, numbers)
            known, others = self.reference_A2[here].unbind(1)
            mismatched = None if self.mismatched is None else (self.mismatched, LossInputs({REFERENCE: others}))
            return LossInputs({REFERENCE: known, DESIRABLE: self.desirable_A[here]}, mismatched=mismatched)

        return inputs


def with_divergence(model: Any, batches: Iterable[Batch], device: torch.device) -> Completion:
    """What gives the divergence to the losses of micro-batches, of which it is estimated: all of a step, or of an
    evaluation. All ranks call it together, with equally many."""
    others = (batch.mismatched for batch in batches if batch.mismatched is not None)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with inference(model):
        for several, heads in head_outputs(model, others, device, by_token=True):
            for batch, logprobs_N in zip(several, heads, strict=False):  # a pipeline's last stage may be elsewhere
                loss_batch = batch.of_loss
                sums[0] += (loss_batch.sums(logprobs_N) - loss_batch[REFERENCE]).sum()
                sums[1] += loss_batch.num_samples
    dist.all_reduce(sums)
    found = (sums[0] / sums[1]).clamp(min=0)

    def complete(batch: Batch) -> Batch:
        loss_batch = batch.of_loss
        inputs = {**loss_batch.inputs, KL: found.to(loss_batch.tokens_N.device).expand(loss_batch.num_samples)}
        return replace(batch, for_loss=replace(loss_batch, inputs=inputs), mismatched=None)

    return complete
