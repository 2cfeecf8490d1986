"""Shampoo for matrices that are cut over ranks, AdamW for everything else, as one optimizer.

Shape suffixes: N blocks of a stack, R rows of a block of a matrix or of several, D its columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...checkpoints.training_state.resuming import StateLayout
from ...moe.util.step_parts import register_step_part
from ...sharding.mesh import Mesh
from ...sharding.state import local_tensor
from .adamw import AdamW
from .matrices import Matrix, MatrixOptimizer, RowRun

register_step_part(__name__, "optimizer step", lasting=("Shampoo._begin", "Shampoo._new_stack"))

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
        adamw: AdamW,
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
        self.steps: dict[Tensor, int] = {}
        self.mine = {(block.parameter, block.number) for lot in self.lots for block in lot.mine}

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def _count(self, trained: list[Tensor]) -> None:
        """Take the new gradients into the parameters' moments."""
        beta1, beta2 = self.matrix_group["betas"]
        for parameter in trained:
            state, grad = self.state[parameter], local_tensor(parameter.grad)  # type: ignore[arg-type]
            state["step"] += 1
            self.steps[parameter] = int(state["step"])
            local_tensor(state["exp_avg"]).lerp_(grad, 1 - beta1)
            local_tensor(state["exp_avg_sq"]).lerp_(grad.square(), 1 - beta2)

    def _kind(self, parameter: Tensor) -> int:
        """Its step, by which moments are corrected and roots taken."""
        return self.steps[parameter]

    def _pieces(self, run: RowRun) -> list[Tensor]:
        """These rows of blocks' gradients, of their first moments, and of AdamW's changes of them."""
        beta1, beta2 = self.matrix_group["betas"]
        state, step = self.state[run.parameter], self.steps[run.parameter]
        mean_RD = run.rows_of(state["exp_avg"]) / (1 - beta1**step)
        root_RD = (run.rows_of(state["exp_avg_sq"]) / (1 - beta2**step)).sqrt_().add_(self.matrix_group["eps"])
        grad_RD = run.rows_of(run.parameter.grad)  # type: ignore[arg-type]
        return [each.to(self.device, torch.float32) for each in (grad_RD, mean_RD, mean_RD / root_RD)]

    def _change(self, stack: Sequence[Matrix], whole: list[Tensor]) -> Tensor:
        """Keep up the factors of blocks; the change of these, for a learning rate of 1."""
        grad_NRD, mean_NRD, adam_NRD = whole
        step = self.steps[stack[0].parameter]
        beta2 = self.matrix_group["betas"][1]
        factors = [self._stacked(stack, side, side) for side in FACTORS]
        roots = [self._stacked(stack, side, f"{side}_root") for side in FACTORS]
        for factor, a, b in zip(factors, (grad_NRD, grad_NRD.mT), (grad_NRD.mT, grad_NRD), strict=True):
            factor.lerp_(torch.bmm(a, b), 1 - beta2)
        if step < self.start:
            return adam_NRD
        if (step - self.start) % self.frequency == 0:
            for root, factor in zip(roots, factors, strict=True):
                root.copy_(inverse_fourth_roots(factor / (1 - beta2**step)))
        change_NRD = torch.bmm(torch.bmm(roots[0], mean_NRD), roots[1])
        norms = [torch.linalg.vector_norm(each, dim=(1, 2), keepdim=True) for each in (adam_NRD, change_NRD)]
        return change_NRD * (norms[0] / norms[1].clamp(min=torch.finfo(torch.float32).tiny))

    def _stacked(self, blocks: Sequence[Matrix], side: str, name: str) -> Tensor:
        """The factors or roots of a stack's blocks on this rank, as one tensor of which the state of each is a view."""
        size = blocks[0].shape[FACTORS.index(side)]
        held = [self.state[block.parameter].get(f"{name}_{block.number}") for block in blocks]
        stack = None if held[0] is None else held[0]._base
        places = [None if each is None or each._base is not stack else each.storage_offset() for each in held]
        if stack is not None and places == list(range(0, stack.numel(), size**2)):
            return stack
        return self._new_stack(blocks, name, size)

    def _new_stack(self, blocks: Sequence[Matrix], name: str, size: int) -> Tensor:
        """The same where they are not there yet, as zeros, or lie elsewhere: resumed, each by itself and where the
        parameter is, with --offload in host memory."""
        stack = torch.zeros(len(blocks), size, size, device=self.device)
        for block, view in zip(blocks, stack.unbind(), strict=True):
            state, key = self.state[block.parameter], f"{name}_{block.number}"
            if key in state:
                view.copy_(state[key])
            state[key] = view
        return stack

    def state_layout(self, parameter: Tensor, key: str) -> StateLayout:
        """How a tensor of a parameter's state lies on the ranks: a factor or root on its block's alone."""
        name, _, number = key.rpartition("_")
        if name.removesuffix("_root") in FACTORS:
            return "whole" if (parameter, int(number)) in self.mine else "elsewhere"
        return super().state_layout(parameter, key)


def inverse_fourth_roots(factors: Tensor) -> Tensor:
    """The power -1/4 of symmetric matrices (N, R, R) without negative eigenvalues, their ridge added, by their
    eigenvalues in double; in fp32. Of zeros, as of an expert that no token has reached, the identity: gradients that
    come later are not preconditioned."""
    values, vectors = torch.linalg.eigh(factors.double())
    largest = values[:, -1:]
    powers = torch.where(largest > 0, values.clamp(min=0) + RIDGE * largest, 1).pow_(-0.25)
    return torch.bmm(vectors * powers[:, None], vectors.mT).float()
