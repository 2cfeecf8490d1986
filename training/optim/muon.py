"""Muon for matrices that are cut over ranks, AdamW for everything else, as one optimizer.

Shape suffixes: R rows of a matrix, D its columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...sharding.mesh import Mesh
from ...sharding.state import local_tensor
from ..config.optimizers import NEWTON_SCHULZ_ITERATIONS
from .matrices import Matrix, MatrixOptimizer, on_owners, with_gradients

MOMENTUM, COEFFICIENTS, EPSILON = 0.95, (3.4445, -4.7750, 2.0315), 1e-7
"""Coefficients of Jordan et al. 2024 (kellerjordan.github.io/posts/muon), and torch.optim.Muon's defaults."""


class Muon(MatrixOptimizer):
    """Muon (`torch.optim.Muon`, its learning rate adjusted as `match_rms_adamw` does, so that AdamW's learning rate and
    weight decay carry over) for matrices, and an AdamW for other parameters.

    Each matrix is gathered on one rank of the group that holds its rows, orthogonalised there, and sent back: the
    result does not depend on how it is cut, the ranks share the work, and none holds more than one full matrix.
    State of a matrix: `momentum_buffer`, of the parameter's shape; 4 bytes per parameter.

    Args:
        dense: the matrices over `mesh.dense_shards`.
        experts: those over `mesh.dp`.
        adamw: the optimizer of all other parameters; its groups and state become this one's.
        mesh: the ranks.
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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters. All ranks call it together."""
        assert closure is None
        trained = [parameter for parameter in self.matrix_group["params"] if parameter.grad is not None]
        for parameter in trained:
            if not self.state[parameter]:
                self._begin(parameter)
        momenta = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in trained]
        if trained:
            torch._foreach_lerp_(momenta, [local_tensor(parameter.grad) for parameter in trained], 1 - MOMENTUM)
        for lot, group in self.rounds:
            trained_of_lot = with_gradients(lot)
            if not trained_of_lot:
                continue
            pieces = [[self._direction(owned.matrix)] for owned in trained_of_lot]
            directions = on_owners(pieces, trained_of_lot, group, lambda matrix, whole: newton_schulz(*whole))
            for owned, direction_RD in zip(trained_of_lot, directions, strict=True):
                self._update(owned.matrix, direction_RD)
        self.adamw.step()

    def _begin(self, parameter: Tensor) -> None:
        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _direction(self, matrix: Matrix) -> Tensor:
        """Nesterov momentum of this rank's rows."""
        momentum_RD = matrix.rows_of(self.state[matrix.parameter]["momentum_buffer"])
        grad_RD = matrix.rows_of(matrix.parameter.grad)  # type: ignore[arg-type]
        return grad_RD.lerp(momentum_RD, MOMENTUM).to(self.device, self.dtype)

    def _update(self, matrix: Matrix, direction_RD: Tensor) -> None:
        lr, weight_decay = self.matrix_group["lr"], self.matrix_group["weight_decay"]
        weight_RD = matrix.rows_of(matrix.parameter)
        weight_RD.mul_(1 - lr * weight_decay)
        # match_rms_adamw: an orthogonal matrix's elements have RMS 1/√(longer side), AdamW's updates about 0.2
        weight_RD.add_(direction_RD.to(weight_RD.device), alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


def newton_schulz(matrix_RD: Tensor) -> Tensor:
    """U·S'·Vᵀ of a matrix U·S·Vᵀ, with S' near 1: the quintic iteration of torch.optim.Muon, in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrix_RD.shape[0] > matrix_RD.shape[1]
    x = matrix_RD.T if is_tall else matrix_RD
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
