"""Matrices that are cut over ranks, and what an optimizer computes of a whole one, on one rank of their group.

Shape suffixes: R rows of a matrix, D its columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoints.files.tensors import overlap
from ...checkpoints.training_state.resuming import ResumableOptimizer
from ...sharding.mesh import Mesh
from ...sharding.state import StateTensor, local_tensor


@dataclass(frozen=True)
class Matrix:
    """A matrix of which an optimizer needs the whole: a parameter, one expert's part of it, or a block of either.

    Attributes:
        parameter: sharded along dim 0.
        mine: where this rank's rows of the matrix lie in its local tensor.
        held: the matrix's rows that each rank of its group holds.
        columns: which of the parameter's.
        number: of the matrix among those of its parameter, over all ranks.
        owner: the rank of its group that computes with the whole of it (see `rounds_of`).
    """

    parameter: Tensor
    mine: slice
    held: tuple[range, ...]
    columns: range
    number: int = 0
    owner: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.held)), len(self.columns)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """This rank's rows (R, D) of the matrix in a tensor that is sharded like the parameter, sharing its memory."""
        return local_tensor(tensor)[self.mine, self.columns.start : self.columns.stop]


def dense_matrix(part: StateTensor, mesh: Mesh) -> Matrix:
    """A parameter that is one matrix, over the ranks of `Mesh.dense_shards`."""
    parts = _parts(part, mesh)
    me = dist.get_rank(mesh.dense_shards.get_group())
    return Matrix(part.tensor, slice(0, len(parts[me])), tuple(parts), range(part.tensor.shape[1]))


def expert_matrices(part: StateTensor, mesh: Mesh) -> list[Matrix]:
    """Those of this ep rank's experts in one of their parameters, over the ranks of `mesh.dp`."""
    assert part.expert is not None
    parts = _parts(part, mesh)
    mine = parts[dist.get_rank(mesh.dp.get_group())]
    width = part.expert.rows_an_expert
    columns = range(part.tensor.shape[1])
    matrices = []
    for start in range(parts[0].start, parts[0].start + part.num_rows // mesh.topology.ep_size, width):
        rows = range(start, start + width)
        here = overlap(rows, mine)
        local = slice(here.start - mine.start, here.stop - mine.start) if here else slice(0, 0)
        held = tuple(_within(rows, there) for there in parts)
        matrices.append(Matrix(part.tensor, local, held, columns, start // width))
    return matrices


def _parts(part: StateTensor, mesh: Mesh) -> list[range]:
    """The rows of a parameter that each rank of the group that shares it holds."""
    group = (mesh.dp if part.is_expert else mesh.dense_shards).get_group()
    return [mesh.topology.rows(part.num_rows, part.layout, rank) for rank in dist.get_process_group_ranks(group)]


def _within(rows: range, there: range) -> range:
    """What some rows share with others, counted from the first of them."""
    here = overlap(rows, there)
    return range(here.start - rows.start, here.stop - rows.start) if here else range(0)


def blocks_of(matrix: Matrix, size: int, me: int) -> list[Matrix]:
    """A matrix cut into blocks of at most `size` rows and columns, each a matrix with a number of its own.

    me: this rank, in the group that shares the matrix.
    """
    num_rows, num_columns = matrix.shape
    held = matrix.held
    row_blocks = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    column_blocks = [range(start, min(start + size, num_columns)) for start in range(0, num_columns, size)]
    first = matrix.number * len(row_blocks) * len(column_blocks)
    blocks: list[Matrix] = []
    for rows in row_blocks:
        here = overlap(rows, held[me])
        start = matrix.mine.start + (here.start - held[me].start if here else 0)
        cut = replace(
            matrix,
            mine=slice(start, start + len(here)),
            held=tuple(_within(rows, there) for there in held),
        )
        for columns in column_blocks:
            blocks.append(replace(cut, columns=columns, number=first + len(blocks)))
    return blocks


def rounds_of(matrices: Sequence[Matrix], size: int) -> list[list[Matrix]]:
    """Matrices in lots of at most one for each of the `size` ranks of their group, its owner; like shapes together."""
    in_order = sorted(matrices, key=lambda matrix: matrix.shape, reverse=True)
    lots = [in_order[start : start + size] for start in range(0, len(in_order), size)]
    return [[replace(matrix, owner=owner) for owner, matrix in enumerate(lot)] for lot in lots]


def on_owners(
    pieces: Sequence[Sequence[Tensor]],
    lot: Sequence[Matrix],
    group: dist.ProcessGroup,
    compute: Callable[[Matrix, list[Tensor]], Tensor],
) -> list[Tensor]:
    """Bring each matrix of a lot together on its owner, have that compute another of its shape, and send this back.

    Args:
        pieces: for each matrix this rank's rows (R, D), of one or more tensors of its shape and of one dtype.
        lot: the matrices, the same on all ranks of the group, by rising owners.
        compute: called on a matrix's owner with the whole tensors.

    Returns:
        This rank's rows of each result.
    """
    me, number = dist.get_rank(group), len(pieces[0])
    mine = next((matrix for matrix in lot if matrix.owner == me), None)
    sent = [0] * dist.get_world_size(group)
    for matrix, piece in zip(lot, pieces, strict=True):
        sent[matrix.owner] = piece[0].numel()
    received = [0] * len(sent) if mine is None else [len(rows) * mine.shape[1] for rows in mine.held]
    whole = _all_to_all(
        torch.cat([each.flatten() for piece in pieces for each in piece]),
        [number * count for count in sent],
        [number * count for count in received],
        group,
    )
    if mine is not None:
        by_rank = [part.view(number, -1) for part in whole.split([number * count for count in received])]
        # with tensor parallelism the ranks' rows do not lie in the order of the ranks
        order = sorted(range(len(by_rank)), key=lambda rank: mine.held[rank].start)
        in_order = [by_rank[rank] for rank in order]
        computed = compute(mine, [torch.cat(rows).view(mine.shape) for rows in zip(*in_order, strict=True)])
        parts = computed.flatten().split([received[rank] for rank in order])
        whole = torch.cat([parts[order.index(rank)] for rank in range(len(order))])
    returned = _all_to_all(whole, received, sent, group).split([sent[matrix.owner] for matrix in lot])
    return [part.view_as(piece[0]) for part, piece in zip(returned, pieces, strict=True)]


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class MatrixOptimizer(ResumableOptimizer):
    """What optimizers of matrices, with an AdamW for other parameters, have in common.

    Each matrix, or block of one, is gathered on one rank of the group that holds its rows, its change is computed there
    and sent back: the result does not depend on how it is cut, the ranks share the work, and none holds more than one.

    Args:
        dense: the matrices over `mesh.dense_shards`.
        experts: those over `mesh.dp`.
        adamw: the optimizer of all other parameters; its groups and state become this one's.
        mesh: the ranks.
        settings: of the matrices.
        block_size: the most rows and columns of what is computed as one matrix; None: matrices are not cut.

    Attributes:
        matrix_group: the matrices' parameters and settings.
        rounds: the matrices in lots, with the group of ranks that shares each lot.
        device: where the model computes, and so these matrices; gradients may lie in host memory.
    """

    def __init__(
        self,
        dense: Sequence[Matrix],
        experts: Sequence[Matrix],
        adamw: torch.optim.AdamW,
        mesh: Mesh,
        settings: dict[str, Any],
        block_size: int | None = None,
    ):
        parameters = list(dict.fromkeys(matrix.parameter for matrix in (*dense, *experts)))
        super().__init__([{"params": parameters}], settings)
        self.matrix_group = self.param_groups[0]
        self.param_groups += adamw.param_groups
        adamw.state = self.state
        self.adamw = adamw
        self.device = torch.device(mesh.grid.device_type)
        self.rounds: list[tuple[list[Matrix], dist.ProcessGroup]] = []
        for matrices, group in ((dense, mesh.dense_shards.get_group()), (experts, mesh.dp.get_group())):
            if block_size is not None:
                me = dist.get_rank(group)
                matrices = [block for matrix in matrices for block in blocks_of(matrix, block_size, me)]
            self.rounds += [(lot, group) for lot in rounds_of(matrices, dist.get_world_size(group))]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters. All ranks call it together."""
        assert closure is None
        # what has no gradient has none on any rank
        trained = [parameter for parameter in self.matrix_group["params"] if parameter.grad is not None]
        for parameter in trained:
            if not self.state[parameter]:
                self._begin(parameter)
        if trained:
            self._count(trained)
        weight_decay = self.matrix_group["weight_decay"]
        for all_of_lot, group in self.rounds:
            lot = [matrix for matrix in all_of_lot if matrix.parameter.grad is not None]
            if not lot:
                continue
            changes = on_owners([self._pieces(matrix) for matrix in lot], lot, group, self._change)
            for matrix, change_RD in zip(lot, changes, strict=True):
                weight_RD = matrix.rows_of(matrix.parameter)
                weight_RD.mul_(1 - self.matrix_group["lr"] * weight_decay)
                weight_RD.add_(change_RD.to(weight_RD.device), alpha=-self._rate(matrix))
        self.adamw.step()

    def _begin(self, parameter: Tensor) -> None:
        """Make a parameter's state before its first step."""
        raise NotImplementedError

    def _count(self, trained: list[Tensor]) -> None:
        """Take the new gradients into the parameters' moments."""
        raise NotImplementedError

    def _pieces(self, matrix: Matrix) -> list[Tensor]:
        """This rank's rows of what a change is computed of."""
        raise NotImplementedError

    def _change(self, matrix: Matrix, whole: list[Tensor]) -> Tensor:
        """Of the complete pieces: what is subtracted from the matrix, times its rate."""
        raise NotImplementedError

    def _rate(self, matrix: Matrix) -> float:
        """The learning rate of a matrix."""
        rate: float = self.matrix_group["lr"]
        return rate
