"""Muon for matrices that are cut over ranks, AdamW for everything else, as one optimizer.

Shape suffixes: N matrices of a stack, R rows of a matrix or of several, D its columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...moe.util.step_parts import register_step_part, writes
from ...sharding.mesh import Mesh
from .adamw import AdamW
from .matrices import Matrix, MatrixOptimizer, RowRun
from .updates import Compiled, QueuedUpdates, put

register_step_part(
    __name__,
    "optimizer step",
    lasting=("Muon._begin",),
    kernels={"take_gradient": writes("nesterov_RD", updates=("momentum_RD",))},
)

NEWTON_SCHULZ_ITERATIONS = 5
MOMENTUM, COEFFICIENTS, EPSILON = 0.95, (3.4445, -4.7750, 2.0315), 1e-7
"""Coefficients of Jordan et al. 2024 (kellerjordan.github.io/posts/muon), and torch.optim.Muon's defaults."""


class Muon(QueuedUpdates, MatrixOptimizer):
    """Muon (`torch.optim.Muon`, its learning rate adjusted as `match_rms_adamw` does, so that AdamW's learning rate and
    weight decay carry over) for matrices, and an AdamW for other parameters.

    State of a matrix: `momentum_buffer`, of the parameter's shape; 4 bytes per parameter.

    Args:
        dense, experts, adamw, mesh: see `MatrixOptimizer`.
        lr: peak learning rate. weight_decay: of the matrices.
        dtype: of the Newton-Schulz iteration. torch takes bf16, whose roundings amplify the fp32 noise between parallel
            layouts; in fp32 they agree as closely as with AdamW.
    """

    def __init__(
        self,
        dense: Sequence[Matrix],
        experts: Sequence[Matrix],
        adamw: AdamW,
        mesh: Mesh,
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
    ):
        super().__init__(dense, experts, adamw, mesh, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    def _begin(self, parameter: Tensor) -> None:
        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _pieces(self, run: RowRun) -> list[Tensor]:
        """Nesterov momentum, once these rows' gradients are taken into it."""
        momentum_RD = run.rows_of(self.state[run.parameter]["momentum_buffer"])
        grad_RD = run.rows_of(run.parameter.grad)  # type: ignore[arg-type]
        nesterov_RD = torch.empty(grad_RD.shape, dtype=self.dtype, device=grad_RD.device)
        if grad_RD.numel() > 0:
            take_gradient(momentum_RD, grad_RD, nesterov_RD, *self._queued)
        return [nesterov_RD.to(self.device)]

    def _change(self, stack: Sequence[Matrix], whole: list[Tensor]) -> Tensor:
        return newton_schulz(*whole)

    def _rate(self, shape: tuple[int, int]) -> float:
        # match_rms_adamw: an orthogonal matrix's elements have RMS 1/√(longer side), AdamW's updates about 0.2
        return super()._rate(shape) * 0.2 * float(max(shape) ** 0.5)


@Compiled
def take_gradient(
    momentum_RD: Tensor, grad_RD: Tensor, nesterov_RD: Tensor, divisor: Tensor | None, is_skipped: Tensor | None
) -> None:
    """Take gradients into their momentum, and give Nesterov's.

    Args:
        divisor: of the gradients. is_skipped: where it is not 0, the momentum is left as it was. Scalars, of a step
            that is queued.
    """
    grad_RD = grad_RD if divisor is None else grad_RD / divisor
    new_RD = momentum_RD.lerp(grad_RD, 1 - MOMENTUM)
    nesterov_RD.copy_(grad_RD.lerp(new_RD, MOMENTUM))
    put(new_RD, momentum_RD, is_skipped)


def newton_schulz(stack_NRD: Tensor) -> Tensor:
    """U·S'·Vᵀ of each matrix U·S·Vᵀ of a stack, with S' near 1: the quintic iteration of torch.optim.Muon, in the
    stack's dtype."""
    a, b, c = COEFFICIENTS
    is_tall = stack_NRD.shape[1] > stack_NRD.shape[2]
    x = stack_NRD.mT if is_tall else stack_NRD
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=EPSILON)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
