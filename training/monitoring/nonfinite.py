"""What becomes of a step whose loss or gradient norm is not finite (--on-nonfinite)."""

from collections.abc import Callable
from typing import Any

from ...moe.util.errors import ExpertMeshError
from ..config.train_config import TrainConfig
from ..steps.step import NO_TARGETS, StepResult
from .anomaly import AnomalyDetector

MAX_SKIPPED_IN_A_ROW = 10
"""One batch may be bad; after so many in a row the weights are, and a run would skip all that is left of it."""


class NonFiniteGuard:
    """Judges every step after its gradients and before the next.

    It sees figures of all ranks together, so all ranks decide alike. How many steps were skipped in a row is not saved:
    a resumed run counts anew.

    Args:
        tell: is told of each step that is skipped, in a line.
    """

    def __init__(self, config: TrainConfig, model: Any, tell: Callable[[str], object]):
        self.config = config
        self.tell = tell
        self.detector = AnomalyDetector(model) if config.detect_anomaly else None
        self.skipped_in_a_row = 0

    def check(self, step: int, result: StepResult) -> None:
        """
        Raises:
            ExpertMeshError: on all ranks, when the step's figures are not finite and --on-nonfinite says stop, or when
                MAX_SKIPPED_IN_A_ROW steps were skipped one after the other.
        """
        if result.is_finite:
            self.skipped_in_a_row = 0
        else:
            self._take_in(step, result)
        if self.detector is not None:
            self.detector.forget()

    def _take_in(self, step: int, result: StepResult) -> None:
        if result.targets == 0:
            self._without_targets(step)
            return
        what = f"the loss is {result.loss} and the gradient norm {result.grad_norm}"
        where = "--detect-anomaly names the first tensor that is not finite"
        if self.detector is not None:
            where = self.detector.first_nonfinite()
        if self.config.on_nonfinite == "stop":
            raise ExpertMeshError(
                f"step {step}: {what}: training has diverged; the optimizer step was skipped; {where}; "
                "try a lower --learning-rate, more --warmup-steps, or --max-grad-norm 1; to skip such "
                "steps, give --on-nonfinite skip"
            )
        self.skipped_in_a_row += 1
        self.tell(f"warning: step {step} is skipped: {what}; {where}")
        if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise ExpertMeshError(
                f"--on-nonfinite skip: steps {step - MAX_SKIPPED_IN_A_ROW + 1} to {step} were all "
                f"skipped, the last as {what}: training has diverged; {where}; resume an earlier "
                "checkpoint with --resume PATH, and a lower --learning-rate, or with --max-grad-norm 1"
            )

    def _without_targets(self, step: int) -> None:
        """Of a step that nothing is wrong with but its data: it is skipped whatever --on-nonfinite says."""
        self.skipped_in_a_row += 1
        self.tell(f"warning: step {step} is skipped: {NO_TARGETS}")
        if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise ExpertMeshError(
                f"steps {step - MAX_SKIPPED_IN_A_ROW + 1} to {step} were all skipped, the last as "
                f"{NO_TARGETS}; check the labels of the data"
            )
