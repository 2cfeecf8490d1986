"""Muon for matrices that are cut over ranks, AdamW for everything else, as one optimizer.

Shape suffixes: N matrices of a stack, R rows of a matrix or of several, D its columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...moe.util.step_parts import register_step_part
from ...sharding.mesh import Mesh
from ...sharding.state import local_tensor
from .matrices import Matrix, MatrixOptimizer, RowRun

register_step_part(__name__, "optimizer step", lasting=("Muon._begin",))

NEWTON_SCHULZ_ITERATIONS = 5
MOMENTUM, COEFFICIENTS, EPSILON = 0.95, (3.4445, -4.7750, 2.0315), 1e-7
"""Coefficients of Jordan et al. 2024 (kellerjordan.github.io/posts/muon), and torch.optim.Muon's defaults."""


class Muon(MatrixOptimizer):
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
        adamw: torch.optim.AdamW,
        mesh: Mesh,
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
    ):
        super().__init__(dense, experts, adamw, mesh, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    def _begin(self, parameter: Tensor) -> None:
        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _count(self, trained: list[Tensor]) -> None:
        momenta = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in trained]
        torch._foreach_lerp_(momenta, [local_tensor(parameter.grad) for parameter in trained], 1 - MOMENTUM)  # type: ignore[arg-type]

    def _pieces(self, run: RowRun) -> list[Tensor]:
        """Nesterov momentum."""
        momentum_RD = run.rows_of(self.state[run.parameter]["momentum_buffer"])
        grad_RD = run.rows_of(run.parameter.grad)  # type: ignore[arg-type]
        return [grad_RD.lerp(momentum_RD, MOMENTUM).to(self.device, self.dtype)]

    def _change(self, stack: Sequence[Matrix], whole: list[Tensor]) -> Tensor:
        return newton_schulz(*whole)

    def _rate(self, shape: tuple[int, int]) -> float:
        # match_rms_adamw: an orthogonal matrix's elements have RMS 1/√(longer side), AdamW's updates about 0.2
        return super()._rate(shape) * 0.2 * float(max(shape) ** 0.5)


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
