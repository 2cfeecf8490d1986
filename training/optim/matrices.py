"""Matrices that are cut over ranks, and what an optimizer computes of a whole one, on one rank of their group.

Shape suffixes: N matrices of a stack, R rows of a matrix or of several, D its columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoints.files.tensors import overlap
from ...checkpoints.training_state.resuming import ResumableOptimizer
from ...moe.util.step_parts import register_step_part, writes
from ...sharding.collectives.warm_up import warm_up
from ...sharding.mesh import Mesh
from ...sharding.state import StateTensor, local_tensor
from .adamw import AdamW
from .updates import NOT_QUEUED, Compiled, Queued, decayed_and_changed, numbers_beside, put

register_step_part(__name__, "optimizer step", kernels={"change_weight": writes(updates=("weight_RD",))})

STACK_ELEMENTS = 2**23
"""Of the matrices of one shape that an optimizer computes with as one tensor, if it is not more in one of them: enough
for kernels that take longer than their launch, and no more than a matrix of attention has, as 4,096 x 2,048."""


def stack_size(elements: int, number: int, ranks: int) -> int:
    """Of so many matrices that these ranks share, each of as many elements, how many one of them computes with at once:
    all have about as many, in as few rounds as `STACK_ELEMENTS` allows."""
    rounds = -(-number // (max(1, STACK_ELEMENTS // elements) * ranks))
    return -(-number // (rounds * ranks))


def num_elements(shape: tuple[int, int], has_factors: bool) -> int:
    """Of a matrix, or of its larger factor (see `lots_of`)."""
    return max(shape) ** 2 if has_factors else shape[0] * shape[1]


@dataclass(frozen=True)
class Matrix:
    """A matrix of which an optimizer needs the whole: a parameter, one expert's part of it, or a block of either.

    Attributes:
        parameter: sharded along dim 0.
        mine: where this rank's rows of the matrix lie in its local tensor.
        held: the matrix's rows that each rank of its group holds.
        columns: which of the parameter's.
        number: of the matrix among those of its parameter, over all ranks.
    """

    parameter: Tensor
    mine: slice
    held: tuple[range, ...]
    columns: range
    number: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.held)), len(self.columns)


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


def blocks_of_matrix(matrix: Matrix, size: int, me: int) -> list[Matrix]:
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


@dataclass(frozen=True)
class RowRun:
    """Rows of this rank that follow one another in a parameter, of one matrix or of several of one shape."""

    parameter: Tensor
    rows: slice
    columns: range
    shape: tuple[int, int]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """These rows (R, D) in a tensor that is sharded like the parameter, sharing its memory."""
        rows_RD = local_tensor(tensor)[self.rows]
        is_whole = len(self.columns) == rows_RD.shape[1]
        return rows_RD if is_whole else rows_RD[:, self.columns.start : self.columns.stop]


class Lot:
    """Matrices that are brought together on their owners, computed with and sent back at once.

    Args:
        stacks: by owner, the ranks of the group in their order, of whom the last may have none: its matrices, of one
            shape, with which it computes as one tensor.
        group: the ranks that share the matrices.

    Attributes:
        mine: this rank's stack.
        runs: where this rank's rows of all the matrices lie, in their order.
    """

    def __init__(self, stacks: Sequence[Sequence[Matrix]], group: dist.ProcessGroup):
        self.stacks, self.group = stacks, group
        me, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.mine = stacks[me] if me < len(stacks) else []
        matrices = [matrix for stack in stacks for matrix in stack]
        self.parameters = list(dict.fromkeys(matrix.parameter for matrix in matrices))
        self.runs = _runs(matrices)
        self._sent = [sum(_elements(matrix, me) for matrix in stack) for stack in stacks]
        self._sent += [0] * (self._size - len(stacks))
        # what comes from a rank: its rows of each matrix of the stack
        self._pieces = [[_elements(matrix, rank) for matrix in self.mine] for rank in range(self._size)]
        self._received = [sum(pieces) for pieces in self._pieces]
        order = [(rank, each) for rank, pieces in enumerate(self._pieces) for each, size in enumerate(pieces) if size]
        # with tensor parallelism the ranks' rows do not lie in the order of the ranks
        self._order = sorted(order, key=lambda piece: (piece[1], self.mine[piece[1]].held[piece[0]].start))
        self._is_in_order = self._order == order
        if self._is_in_order:
            # each rank's follow one another in the stack, as in an expert parameter
            self._pieces = [[size] for size in self._received]
            self._order = [(rank, 0) for rank in range(self._size)]

    def parts(self, kind: Callable[[Tensor], int | None]) -> "list[Lot]":
        """The lot by what is said of its parameters, without those of which None is said. All ranks say the same, and
        almost always one thing of all parameters."""
        kinds = {parameter: kind(parameter) for parameter in self.parameters}
        found = {each for each in kinds.values() if each is not None}
        if len(set(kinds.values())) == 1:
            return [self] if found else []
        of_kinds = [
            [[m for m in stack if kinds[m.parameter] == each] for stack in self.stacks] for each in sorted(found)
        ]
        return [Lot(stacks, self.group) for stacks in of_kinds]

    def on_owners(
        self, tensors: Sequence[Sequence[Tensor]], compute: Callable[[Sequence[Matrix], list[Tensor]], Tensor]
    ) -> list[Tensor]:
        """Have each owner compute, of the whole of its matrices, others of their shape, and send these back.

        Args:
            tensors: one or more, of one dtype, each by this rank's runs (R, D).
            compute: called on an owner with its stack and these tensors of it (N, R, D).

        Returns:
            The result by this rank's runs: (R, D), or (N, R, D) of a group of one rank, where nothing is exchanged.
        """
        if self._size == 1:
            shape = self.mine[0].shape
            by_run = [[run_RD.view(-1, *shape) for run_RD in runs] for runs in tensors]
            computed_NRD = compute(self.mine, [runs[0] if len(runs) == 1 else torch.cat(runs) for runs in by_run])
            return list(computed_NRD.split([len(run_NRD) for run_NRD in by_run[0]]))
        number = len(tensors)
        flat = [torch.cat([run_RD.flatten() for run_RD in runs]) for runs in tensors]
        del tensors  # each of them is as large as a stack
        if number > 1:
            by_owner = zip(*(each.split(self._sent) for each in flat), strict=True)
            flat = [torch.cat([part for parts in by_owner for part in parts])]
            del by_owner
        whole = self._exchange(flat.pop(), self._sent, self._received, number)
        if self.mine:
            stacks = self._together(whole, number)
            del whole
            whole = self._apart(compute(self.mine, stacks))
            del stacks
        sizes = [(run.rows.stop - run.rows.start) * len(run.columns) for run in self.runs]
        returned = self._exchange(whole, self._received, self._sent, 1).split(sizes)
        return [part.view(-1, len(run.columns)) for part, run in zip(returned, self.runs, strict=True)]

    def _exchange(self, x: Tensor, sent: list[int], received: list[int], number: int) -> Tensor:
        out = x.new_empty(number * sum(received))
        to_ranks, from_ranks = ([number * count for count in counts] for counts in (sent, received))
        dist.all_to_all_single(out, x, from_ranks, to_ranks, group=self.group)
        return out

    def _together(self, x: Tensor, number: int) -> list[Tensor]:
        """So many tensors of the stack (N, R, D), of what all ranks have sent of them."""
        shape = (len(self.mine), *self.mine[0].shape)
        if number == 1 and self._is_in_order:
            return [x.view(shape)]
        parts = x.split([size for pieces in self._pieces for _ in range(number) for size in pieces])
        # of a rank that sends nothing as of the others
        width = len(self._pieces[0])
        places = [[(rank * number + each) * width + piece for rank, piece in self._order] for each in range(number)]
        return [torch.cat([parts[place] for place in mine]).view(shape) for mine in places]

    def _apart(self, computed_NRD: Tensor) -> Tensor:
        """What goes back to the ranks, in their order."""
        if self._is_in_order:
            return computed_NRD.flatten()
        parts = computed_NRD.flatten().split([self._pieces[rank][piece] for rank, piece in self._order])
        return torch.cat([parts[place] for place in sorted(range(len(parts)), key=self._order.__getitem__)])


def _elements(matrix: Matrix, rank: int) -> int:
    """How many of a matrix's a rank of its group holds."""
    return len(matrix.held[rank]) * len(matrix.columns)


def _runs(matrices: Sequence[Matrix]) -> list[RowRun]:
    """This rank's rows of matrices in their order; one without rows, if it has none."""
    runs: list[RowRun] = []
    for matrix in matrices:
        if matrix.mine.start == matrix.mine.stop:
            continue
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.parameter is matrix.parameter
            and (last.columns, last.shape) == (matrix.columns, matrix.shape)
            and last.rows.stop == matrix.mine.start
        ):
            runs[-1] = replace(last, rows=slice(last.rows.start, matrix.mine.stop))
        else:
            runs.append(RowRun(matrix.parameter, matrix.mine, matrix.columns, matrix.shape))
    return runs or [RowRun(matrices[0].parameter, slice(0, 0), matrices[0].columns, matrices[0].shape)]


def lots_of(matrices: Sequence[Matrix], group: dist.ProcessGroup, has_factors: bool) -> list[Lot]:
    """Matrices in stacks of one shape (see `stack_size`), and these in lots of at most one for each rank of the group,
    the largest matrices first. In a stack those follow one another that do so in a parameter, with the same columns."""
    size = dist.get_world_size(group)
    numbers: dict[Tensor, int] = {}
    for matrix in matrices:
        numbers.setdefault(matrix.parameter, len(numbers))
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in sorted(matrices, key=lambda each: (numbers[each.parameter], each.columns.start)):
        by_shape.setdefault(matrix.shape, []).append(matrix)
    stacks: list[list[Matrix]] = []
    for shape, alike in sorted(by_shape.items(), reverse=True):
        step = stack_size(num_elements(shape, has_factors), len(alike), size)
        stacks += [alike[start : start + step] for start in range(0, len(alike), step)]
    return [Lot(stacks[start : start + size], group) for start in range(0, len(stacks), size)]


@Compiled
def change_weight(weight_RD: Tensor, change_RD: Tensor, decay: Any, rate: Any, is_skipped: Tensor | None) -> None:
    """One update of weights (see `decayed_and_changed`), but where `is_skipped`, a scalar, is not 0."""
    put(decayed_and_changed(weight_RD, change_RD, decay, rate), weight_RD, is_skipped)


class MatrixOptimizer(ResumableOptimizer):
    """What optimizers of matrices, with an AdamW for other parameters, have in common.

    Each matrix, or block of one, is gathered on one rank of the group that holds its rows, its change is computed there
    beside those of others of its shape, and sent back: the result does not depend on how it is cut, and the ranks share
    the work.

    Args:
        dense: the matrices over `mesh.dense_shards`.
        experts: those over `mesh.dp`.
        adamw: the optimizer of all other parameters; its groups and state become this one's.
        mesh: the ranks.
        settings: of the matrices.
        block_size: the most rows and columns of what is computed as one matrix and has factors; None: matrices are not
            cut.

    Attributes:
        matrix_group: the matrices' parameters and settings.
        lots: the matrices, in the order of their updates.
        device: where the model computes, and so these matrices; gradients may lie in host memory.
    """

    _queued: Queued = NOT_QUEUED

    def __init__(
        self,
        dense: Sequence[Matrix],
        experts: Sequence[Matrix],
        adamw: AdamW,
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
        self.lots: list[Lot] = []
        groups = mesh.dense_shards.get_group(), mesh.dp.get_group()
        warm_up([], groups, mesh.grid.device_type)
        for matrices, group in zip((dense, experts), groups, strict=True):
            if block_size is not None:
                me = dist.get_rank(group)
                matrices = [block for matrix in matrices for block in blocks_of_matrix(matrix, block_size, me)]
            self.lots += lots_of(matrices, group, has_factors=block_size is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters. All ranks call it together."""
        assert closure is None
        # what has no gradient has none on any rank
        trained = [parameter for parameter in self.matrix_group["params"] if parameter.grad is not None]
        if trained:
            self._update(trained)
        scale, is_skipped = self._queued
        if scale is None or is_skipped is None:
            self.adamw.step()
        else:
            self.adamw.queue_step(scale, is_skipped)

    def _update(self, trained: list[Tensor]) -> None:
        """One update of the matrices of these parameters."""
        for parameter in trained:
            if not self.state[parameter]:
                self._begin(parameter)
        self._count(trained)
        decay = 1 - self.matrix_group["lr"] * self.matrix_group["weight_decay"]
        shapes = {run.shape for lot in self.lots for run in lot.runs}
        numbers = {shape: numbers_beside(local_tensor(trained[0]), (decay, self._rate(shape))) for shape in shapes}
        for lot in self.lots:
            for part in lot.parts(lambda parameter: None if parameter.grad is None else self._kind(parameter)):
                pieces = (self._pieces(run) for run in part.runs)
                changes = part.on_owners(list(zip(*pieces, strict=True)), self._change)
                for run, change in zip(part.runs, changes, strict=True):
                    # a compiler takes what is a parameter to have one shape only
                    weight_RD = run.rows_of(run.parameter).detach()
                    if weight_RD.numel() > 0:
                        change_RD = change.to(weight_RD.device).reshape(weight_RD.shape)
                        change_weight(weight_RD, change_RD, *numbers[run.shape], self._queued[1])

    def _begin(self, parameter: Tensor) -> None:
        """Make a parameter's state before its first step."""
        raise NotImplementedError

    def _count(self, trained: list[Tensor]) -> None:
        """What comes before the first of the changes."""

    def _kind(self, parameter: Tensor) -> int:
        """A number that matrices have in common whose changes are computed together."""
        return 0

    def _pieces(self, run: RowRun) -> list[Tensor]:
        """These rows of what a change is computed of."""
        raise NotImplementedError

    def _change(self, stack: Sequence[Matrix], whole: list[Tensor]) -> Tensor:
        """Of the complete pieces (N, R, D): what is subtracted from the matrices, times their rate."""
        raise NotImplementedError

    def _rate(self, shape: tuple[int, int]) -> float:
        """The learning rate of matrices of a shape."""
        rate: float = self.matrix_group["lr"]
        return rate
