"""Direct preference optimization: pairs of answers against a frozen reference.

Shape suffixes: N target tokens on this rank, P pairs that are counted on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.train_config import TrainConfig
from ..data.batch import LossBatch, LossInputs
from ..data.samples import Pairs
from ..data.sequences import Rows
from ..loss.objective import Objective
from .reference_logprobs import REFERENCE, ReferencePass, references
from .task import DataTraits, InputsOf, Preparation, Task, TaskInputs, samples_in

FIGURES = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)
"""What is told of each step, under trl's names: means over pairs."""
TARGETS, SFT = "targets", "sft"
"""Inputs by sample, chosen and rejected in turn: target tokens, and the weight of a target token in the SFT term."""


def pair_objective(beta: float, is_ipo: bool = False, sft_weight: float = 0.0) -> Objective:
    """With b = --preference-beta and a pair's margin m, the chosen answer's log-probability less the reference's, less
    the same of the rejected one: -log sigmoid(b m) (DPO, arXiv 2305.18290, equation 7); `ipo` is (m - 1 / 2b)² of
    log-probabilities per target token (arXiv 2310.12036, equation 17, with the mean that its authors use, as in trl).
    `sft_weight` adds the mean cross-entropy of the chosen answers' tokens.
    """

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


class PreferencePairs(Task):
    def objective(self, config: TrainConfig, data: DataTraits) -> Objective:
        return pair_objective(config.preference_beta, config.preference_loss == "ipo", config.preference_sft_weight)

    def example_inputs(self, config: TrainConfig, samples: int, targets: int) -> Mapping[str, Tensor]:
        return {name: torch.ones(samples, dtype=torch.float64) for name in (REFERENCE, TARGETS, SFT)}

    def inputs(self, run: Preparation) -> TaskInputs:
        def inputs(rows: Rows, reference_P2: Tensor) -> PairInputs:
            assert isinstance(rows.samples, Pairs)
            return PairInputs(rows.samples.targets_P2, reference_P2)

        return references(run, "pairs", ReferencePass.computed, inputs)


@dataclass(frozen=True)
class PairInputs:
    """What the loss of preference pairs needs beside log-probabilities.

    targets_P2: target tokens of the chosen and of the rejected one of each pair. reference_P2: their log-probabilities
    by the reference, fp64.
    """

    targets_P2: Tensor
    reference_P2: Tensor

    def within(self, rows: Rows, together: Sequence[int]) -> InputsOf:
        """What makes the inputs of a batch from the numbers of its entries of `rows`.

        Args:
            together: the entries whose loss is one mean: those of a step, or of an evaluation.
        """
        pairs = samples_in(rows, together)
        # by which a target token's share in the mean of their chosen answers becomes one in a mean over pairs
        share = len(pairs) / max(int(self.targets_P2[pairs, 0].sum()), 1)

        def inputs(numbers: list[int]) -> LossInputs:
            here = samples_in(rows, numbers)
            sft_P2 = torch.tensor([share, 0.0], dtype=torch.float64).expand(len(here), 2)
            by_sample = {REFERENCE: self.reference_P2[here], TARGETS: self.targets_P2[here].double(), SFT: sft_P2}
            return LossInputs({name: values.flatten() for name, values in by_sample.items()})

        return inputs
