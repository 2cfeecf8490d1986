"""What FSDP gathers and reduces at once, and how large it is on a rank: by the topology and the parameters' shapes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...config.optimizers import num_elements, stack_size
from ...model_setup.rates import Work
from .measured import BlockUpdate, Parameter


@dataclass(frozen=True)
class Unit:
    """An FSDP unit, in a rank's bytes. FSDP cuts each parameter by rows, and pads every rank's shard to the largest:
    padding is included.

    Attributes:
        ranks: over which the parameters are sharded.
        replicas: of that, over which gradients are summed up besides.
        stored: of the parameters, as they are held.
        computed: in the compute dtype.
        cast: of `computed`, those that are held in another dtype.
        trained: how many elements have a gradient; gradient: their bytes.
        state: of the optimizer.
        num_parameters, num_trained: how many parameters, and of these that have a gradient.
        blocks: of matrices that the optimizer takes, of all ranks.
        parts: elements of a rank's part of each parameter that has a gradient, and of a row of it.
        in_host: of `stored`, the bytes in host memory, from where they are copied to be gathered.
    """

    ranks: int
    replicas: int
    stored: int
    computed: int
    cast: int
    trained: int
    gradient: int
    state: float
    num_parameters: int
    num_trained: int
    blocks: tuple[BlockUpdate, ...]
    parts: tuple[tuple[int, int], ...]
    in_host: int = 0

    @property
    def gathered(self) -> int:
        """Bytes of all ranks' shards together."""
        return self.computed * self.ranks


def unit(
    parameters: Iterable[Parameter], ranks: int, replicas: int = 1, ep_size: int = 1, frozen_in_host: bool = False
) -> Unit:
    """The unit of these parameters. ep_size: over which their rows are cut before."""
    stored = computed = cast = trained = gradient = num_parameters = num_trained = in_host = 0
    state = 0.0
    blocks: list[BlockUpdate] = []
    parts: list[tuple[int, int]] = []
    for parameter in parameters:
        numbers = -(-parameter.rows // ep_size // ranks) * parameter.row
        stored += numbers * parameter.stored
        computed += numbers * parameter.computed
        cast += numbers * parameter.computed if parameter.stored != parameter.computed else 0
        in_host += numbers * parameter.stored * (frozen_in_host and not parameter.is_trained)
        num_parameters += 1
        if parameter.is_trained:
            trained += numbers
            gradient += numbers * parameter.stored
            state += numbers * parameter.state
            num_trained += 1
            parts.append((numbers, parameter.row))
            if parameter.matrix:
                rows = parameter.matrix // parameter.row
                for block in parameter.blocks:
                    number = parameter.rows // ep_size // rows * block.number
                    # blocks that fill a matrix's rows follow one another from one matrix to the next
                    columns, rest = divmod(block.number * block.shape[0], rows)
                    runs = -(-number // ranks) if rest else columns
                    blocks.append(replace(block, number=number, runs=runs))
    held = (stored, computed, cast, trained, gradient, state)
    return Unit(ranks, replicas, *held, num_parameters, num_trained, tuple(blocks), tuple(parts), in_host)


@dataclass(frozen=True)
class Stacks:
    """Blocks of one shape that an optimizer of matrices takes, of a group's first rank, which has the largest of each
    lot (see `training.optim.matrices.lots_of`).

    Attributes:
        elements: of a stack, or of its larger factors. kernels: of one block (see `BlockUpdate`).
        size: blocks of a stack, at the most. number: of stacks. blocks: of all of them together.
        runs: of all such blocks' rows, whichever rank computes with them.
        is_exchanged: whether other ranks hold some of these rows.
    """

    elements: int
    kernels: tuple[tuple[float, Work, float], ...]
    size: int
    number: int
    blocks: int
    runs: int
    is_exchanged: bool


def stacks_of(blocks: Iterable[BlockUpdate], ranks: int, has_factors: bool) -> list[Stacks]:
    """The stacks of blocks that these ranks share."""
    by_shape: dict[tuple[int, int], list[BlockUpdate]] = {}
    for block in blocks:
        by_shape.setdefault(block.shape, []).append(block)
    found, before = [], 0
    for shape, alike in sorted(by_shape.items(), reverse=True):
        number = sum(block.number for block in alike)
        elements = num_elements(shape, has_factors)
        size = stack_size(elements, number, ranks)
        in_all = -(-number // size)
        mine = range(-before % ranks, in_all, ranks)
        missing = size * in_all - number if in_all - 1 in mine else 0
        runs = sum(block.runs for block in alike)
        # where a lot ends, so does a run; with other ranks there is one in every lot, if only without rows
        runs = max(runs, len(mine)) if ranks > 1 else min(runs + len(mine) - 1, number)
        blocks_here = size * len(mine) - missing
        found.append(Stacks(size * elements, alike[0].kernels, size, len(mine), blocks_here, runs, ranks > 1))
        before += in_all
    return found
