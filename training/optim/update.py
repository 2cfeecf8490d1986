"""What one update of low-bit AdamW takes beside its tensors (see `training.optim.low_bit`)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """What one update of a parameter takes beside its tensors."""

    mean_share: float
    """Weight of the gradient in the new first moment: 1 - beta1."""
    square_share: float
    """Weight of the gradient's square in the second moment: 1 - beta2."""
    mean_correction: Tensor
    """1 - beta1^step, scalar, double: by which the first moment is divided."""
    square_correction: Tensor
    """1 - beta2^step, as above."""
    lr: float
    decay: float
    """1 - lr * weight decay: by which the weight is multiplied."""
    eps: float
