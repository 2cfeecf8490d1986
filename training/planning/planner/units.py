"""What FSDP gathers and reduces at once, and how large it is on a rank: by the topology and the parameters' shapes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

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

    @property
    def gathered(self) -> int:
        """Bytes of all ranks' shards together."""
        return self.computed * self.ranks


def unit(parameters: Iterable[Parameter], ranks: int, replicas: int = 1, ep_size: int = 1) -> Unit:
    """The unit of these parameters. ep_size: over which their rows are cut before."""
    stored = computed = cast = trained = gradient = num_parameters = num_trained = 0
    state = 0.0
    blocks: list[BlockUpdate] = []
    for parameter in parameters:
        numbers = -(-parameter.rows // ep_size // ranks) * parameter.row
        stored += numbers * parameter.stored
        computed += numbers * parameter.computed
        cast += numbers * parameter.computed if parameter.stored != parameter.computed else 0
        num_parameters += 1
        if parameter.is_trained:
            trained += numbers
            gradient += numbers * parameter.stored
            state += numbers * parameter.state
            num_trained += 1
            if parameter.matrix:
                matrices = parameter.rows // ep_size * parameter.row // parameter.matrix
                blocks += [replace(block, number=matrices * block.number) for block in parameter.blocks]
    held = (stored, computed, cast, trained, gradient, state)
    return Unit(ranks, replicas, *held, num_parameters, num_trained, tuple(blocks))
