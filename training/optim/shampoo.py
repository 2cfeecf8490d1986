"""Shampoo for matrices that are cut over ranks, AdamW for everything else, as one optimizer.

Shape suffixes: R rows of a block of a matrix, D its columns.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoints.training_state.resuming import StateLayout
from ...sharding.mesh import Mesh
from ...sharding.state import local_tensor
from .matrices import Matrix, MatrixOptimizer

RIDGE = 1e-5
"""Added to the eigenvalues of a factor before their root is taken, as a share of the largest one, as Anil et al. do,
who take 1e-6 of factors in fp32. Near that eigenvalues are rounding errors, which the root makes large: after 20 steps
weights then differ between parallel layouts by 1.6e-5, with 1e-5 by less than 1e-5."""

FACTORS = ("left", "right")


class Shampoo(MatrixOptimizer):
    """Distributed Shampoo (Shi et al. 2023, arXiv 2309.06497; Anil et al. 2021, arXiv 2002.09018) for matrices, its
    updates as large as AdamW's ("grafting"), and an AdamW for other parameters.

    A matrix is cut into blocks of at most `block_size` rows and columns. Of a block with gradients G, moving averages
    L of G·Gᵀ and R of Gᵀ·G (weight beta2, corrected for their beginning at zero) are kept, and from time to time
    L^(-1/4) and R^(-1/4). Its update has the direction of L^(-1/4)·M·R^(-1/4), where M is the first moment, and the
    Frobenius norm of AdamW's; until the first roots are taken it is AdamW's. Weight decay is AdamW's.

    A block's factors and roots are kept by its owner: the ranks share the memory.
    State of a matrix: `exp_avg` and `exp_avg_sq` of its shape, `step`; on a block's rank `left_N`, `right_N` and their
    roots `left_root_N`, `right_root_N`, in fp32; N numbers the blocks of a parameter. With square blocks 24 bytes per
    parameter in all.

    Args:
        dense, experts, adamw, mesh: see `MatrixOptimizer`.
        lr, betas, eps, weight_decay: of the matrices, as AdamW's.
        frequency: steps from one taking of roots to the next. start: the step at which they are first taken.
        block_size: the most rows and columns of a block.
    """

    def __init__(
        self,
        dense: Sequence[Matrix],
        experts: Sequence[Matrix],
        adamw: torch.optim.AdamW,
        mesh: Mesh,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        frequency: int,
        start: int,
        block_size: int,
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(dense, experts, adamw, mesh, settings, block_size)
        self.frequency, self.start = frequency, start
        self.mine = {
            (matrix.parameter, matrix.number)
            for lot, group in self.rounds
            for matrix in lot
            if matrix.owner == dist.get_rank(group)
        }

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def _count(self, trained: list[Tensor]) -> None:
        beta1, beta2 = self.matrix_group["betas"]
        for parameter in trained:
            state, grad = self.state[parameter], local_tensor(parameter.grad)  # type: ignore[arg-type]
            state["step"] += 1
            local_tensor(state["exp_avg"]).lerp_(grad, 1 - beta1)
            local_tensor(state["exp_avg_sq"]).lerp_(grad.square(), 1 - beta2)

    def _pieces(self, matrix: Matrix) -> list[Tensor]:
        """This rank's rows of a block's gradient, of its first moment, and of AdamW's change of it."""
        beta1, beta2 = self.matrix_group["betas"]
        state = self.state[matrix.parameter]
        step = int(state["step"])
        mean_RD = matrix.rows_of(state["exp_avg"]) / (1 - beta1**step)
        root_RD = (matrix.rows_of(state["exp_avg_sq"]) / (1 - beta2**step)).sqrt_().add_(self.matrix_group["eps"])
        grad_RD = matrix.rows_of(matrix.parameter.grad)  # type: ignore[arg-type]
        return [each.to(self.device, torch.float32) for each in (grad_RD, mean_RD, mean_RD / root_RD)]

    def _change(self, matrix: Matrix, whole: list[Tensor]) -> Tensor:
        """Keep up a block's factors; the change of the block, for a learning rate of 1."""
        grad_RD, mean_RD, adam_RD = whole
        beta2 = self.matrix_group["betas"][1]
        state, step = self.state[matrix.parameter], int(self.state[matrix.parameter]["step"])
        factors = [self._factor(state, f"{side}_{matrix.number}", matrix, side) for side in FACTORS]
        roots = [self._factor(state, f"{side}_root_{matrix.number}", matrix, side) for side in FACTORS]
        for factor, product in zip(factors, (grad_RD @ grad_RD.T, grad_RD.T @ grad_RD), strict=True):
            factor.lerp_(product, 1 - beta2)
        if step < self.start:
            return adam_RD
        if (step - self.start) % self.frequency == 0:
            for root, factor in zip(roots, factors, strict=True):
                root.copy_(inverse_fourth_root(factor / (1 - beta2**step)))
        change_RD = roots[0] @ mean_RD @ roots[1]
        return change_RD * (adam_RD.norm() / change_RD.norm().clamp(min=torch.finfo(torch.float32).tiny))

    def _factor(self, state: dict[str, Tensor], name: str, matrix: Matrix, side: str) -> Tensor:
        """A factor or root of a block on this rank; zeros if it is not there yet."""
        if name not in state:
            size = matrix.shape[FACTORS.index(side)]
            state[name] = torch.zeros(size, size, device=self.device)
        # resumed, it is where the parameter is, with --offload in host memory
        state[name] = state[name].to(self.device)
        return state[name]

    def state_layout(self, parameter: Tensor, key: str) -> StateLayout:
        """How a tensor of a parameter's state lies on the ranks: a factor or root on its block's alone."""
        name, _, number = key.rpartition("_")
        if name.removesuffix("_root") in FACTORS:
            return "whole" if (parameter, int(number)) in self.mine else "elsewhere"
        return super().state_layout(parameter, key)


def inverse_fourth_root(factor: Tensor) -> Tensor:
    """The power -1/4 of a symmetric matrix without negative eigenvalues, its ridge added, by its eigenvalues in double;
    an fp32 matrix. Of zeros, as of an expert that no token has reached, the identity: gradients that come later are
    not preconditioned."""
    values, vectors = torch.linalg.eigh(factor.double())
    if values[-1] > 0:
        powers = (values.clamp(min=0) + RIDGE * values[-1]).pow(-0.25)
        return (vectors * powers @ vectors.T).float()
    return torch.eye(len(factor), device=factor.device)
