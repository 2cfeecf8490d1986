"""torch's AdamW, whose step can be queued."""

import torch
from torch import Tensor

from ...checkpoints.training_state.resuming import ResumableOptimizer


class AdamW(torch.optim.AdamW, ResumableOptimizer):
    """torch's fused one, whose kernel divides gradients by a number on the device, and leaves all as it was where
    another one is not 0: as `torch.amp.GradScaler` has it do."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def queue_step(self, scale: Tensor, is_skipped: Tensor) -> None:
        """See `training.steps.step.QueuesStep`."""
        self.grad_scale, self.found_inf = scale, is_skipped
        try:
            self.step()
        finally:
            del self.grad_scale, self.found_inf
