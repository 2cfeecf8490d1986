"""Muon for matrices that are cut over ranks, AdamW for everything else, as one optimizer.

Shape suffixes: R rows of a matrix, D its columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.checkpoints.hf.mapping import overlap
from expertmesh.moe.base.declared import StepPart
from expertmesh.sharding import Mesh, StateTensor, local_tensor

STEP_PART: StepPart = "optimizer step"

MOMENTUM, COEFFICIENTS, ITERATIONS, EPSILON = 0.95, (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Coefficients of Jordan et al. 2024 (kellerjordan.github.io/posts/muon), and torch.optim.Muon's defaults."""


@dataclass(frozen=True)
class Matrix:
    """A matrix that is orthogonalised as a whole: a parameter, or one expert's part of it.

    Attributes:
        parameter: sharded along dim 0.
        mine: where this rank's rows of the matrix lie in its local tensor.
        counts: how many of the matrix's rows each rank of its group holds, in row order.
    """

    parameter: Tensor
    mine: slice
    counts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.counts), self.parameter.shape[1]


def dense_matrix(part: StateTensor, mesh: Mesh) -> Matrix:
    """A parameter that is one matrix, over the ranks of `Mesh.dense_shards`."""
    parts = _parts(part, mesh)
    me = dist.get_rank(mesh.dense_shards.get_group())
    return Matrix(part.tensor, slice(0, len(parts[me])), tuple(len(rows) for rows in parts))


def expert_matrices(part: StateTensor, mesh: Mesh) -> list[Matrix]:
    """Those of this ep rank's experts in one of their parameters, over the ranks of `mesh.dp`."""
    assert part.expert is not None
    parts = _parts(part, mesh)
    mine = parts[dist.get_rank(mesh.dp.get_group())]
    width = part.expert.rows_an_expert
    matrices = []
    for start in range(parts[0].start, parts[0].start + part.num_rows // mesh.topology.ep_size, width):
        rows = range(start, start + width)
        here = overlap(rows, mine)
        local = slice(here.start - mine.start, here.stop - mine.start) if here else slice(0, 0)
        matrices.append(Matrix(part.tensor, local, tuple(len(overlap(rows, there)) for there in parts)))
    return matrices


def _parts(part: StateTensor, mesh: Mesh) -> list[range]:
    """The rows of a parameter that each rank of the group that shares it holds."""
    group = (mesh.dp if part.is_expert else mesh.dense_shards).get_group()
    return [mesh.topology.rows(part.num_rows, part.layout, rank) for rank in dist.get_process_group_ranks(group)]


class Muon(torch.optim.Optimizer):
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
        parameters = list(dict.fromkeys(matrix.parameter for matrix in (*dense, *experts)))
        super().__init__([{"params": parameters}], {"lr": lr, "weight_decay": weight_decay})
        self.matrix_group = self.param_groups[0]
        self.param_groups += adamw.param_groups
        adamw.state = self.state
        self.adamw = adamw
        self.dtype = dtype
        # gradients may lie in host memory; the matrices are multiplied where the model computes
        self.device = torch.device(mesh.grid.device_type)
        self.rounds = [
            *_rounds(dense, mesh.dense_shards.get_group()),
            *_rounds(experts, mesh.dp.get_group()),
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters. All ranks call it together."""
        assert closure is None
        trained = [parameter for parameter in self.matrix_group["params"] if parameter.grad is not None]
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in trained]
        if trained:
            torch._foreach_lerp_(momenta, [local_tensor(parameter.grad) for parameter in trained], 1 - MOMENTUM)
        for lot, group in self.rounds:
            # what nothing is learned of has no gradient on any rank
            matrices = [matrix for matrix in lot if matrix.parameter.grad is not None]
            if not matrices:
                continue
            directions = orthogonalize([self._direction(matrix) for matrix in matrices], matrices, group)
            for matrix, direction_RD in zip(matrices, directions, strict=True):
                self._update(matrix, direction_RD)
        self.adamw.step()

    def _direction(self, matrix: Matrix) -> Tensor:
        """Nesterov momentum of this rank's rows."""
        momentum_RD = local_tensor(self.state[matrix.parameter]["momentum_buffer"])[matrix.mine]
        grad_RD = local_tensor(matrix.parameter.grad)[matrix.mine]  # type: ignore[arg-type]
        return grad_RD.lerp(momentum_RD, MOMENTUM).to(self.device, self.dtype)

    def _update(self, matrix: Matrix, direction_RD: Tensor) -> None:
        lr, weight_decay = self.matrix_group["lr"], self.matrix_group["weight_decay"]
        weight_RD = local_tensor(matrix.parameter)[matrix.mine]
        weight_RD.mul_(1 - lr * weight_decay)
        # match_rms_adamw: an orthogonal matrix's elements have RMS 1/√(longer side), AdamW's updates about 0.2
        weight_RD.add_(direction_RD.to(weight_RD.device), alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


def _rounds(matrices: Sequence[Matrix], group: dist.ProcessGroup) -> list[tuple[list[Matrix], dist.ProcessGroup]]:
    """Matrices in lots of at most one per rank, like sizes together."""
    size = dist.get_world_size(group)
    in_order = sorted(matrices, key=lambda matrix: matrix.shape, reverse=True)
    return [(in_order[start : start + size], group) for start in range(0, len(in_order), size)]


def orthogonalize(pieces: Sequence[Tensor], matrices: Sequence[Matrix], group: dist.ProcessGroup) -> list[Tensor]:
    """Orthogonalise at most as many matrices as the group has ranks, each on one of them.

    Args:
        pieces: this rank's rows (R, D) of each matrix.
        matrices: which they are; the same on all ranks of the group.

    Returns:
        This rank's rows of each orthogonalised matrix.
    """
    me, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [piece.numel() for piece in pieces] + [0] * (size - len(pieces))
    received = [0] * size
    if me < len(matrices):
        received = [count * matrices[me].shape[1] for count in matrices[me].counts]
    whole = _all_to_all(torch.cat([piece.flatten() for piece in pieces]), sent, received, group)
    if me < len(matrices):
        whole = newton_schulz(whole.view(matrices[me].shape)).flatten()
    returned = _all_to_all(whole, received, sent, group)
    parts = returned.split(sent[: len(pieces)])
    return [part.view_as(piece) for part, piece in zip(parts, pieces, strict=True)]


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def newton_schulz(matrix_RD: Tensor) -> Tensor:
    """U·S'·Vᵀ of a matrix U·S·Vᵀ, with S' near 1: the quintic iteration of torch.optim.Muon, in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrix_RD.shape[0] > matrix_RD.shape[1]
    x = matrix_RD.T if is_tall else matrix_RD
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
