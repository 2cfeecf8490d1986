"""A sharded model as the checkpoint code sees it: which rows of each parameter are here, and who holds the others."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..moe.linear.quantized import fill
from ..sharding.state import StateTensor, local_tensor, saved_state
from ..sharding.topology import Topology


class ShardedParameter:
    """One parameter of a sharded model, or a buffer that checkpoints hold.

    Attributes:
        local: this rank's rows, sharing memory with the parameter; of a quantized weight, their codes. Not to be read
            where `rows` is empty.
        rows: which they are.
        row_shape: shape of one row.
        owners: (rank, rows) of all rows, in row order, one owner a row.
        is_owner: whether this rank is among them; else it holds a replica.
    """

    def __init__(self, part: StateTensor, topology: Topology):
        self.local = part.local
        self.storage = part.storage
        self.scales = None if part.scales is None else local_tensor(part.scales.detach())
        self.rows = topology.rows(part.num_rows, part.layout, dist.get_rank())
        self.row_shape = torch.Size(part.shape[1:])
        self.owners = list(topology.owners(part.num_rows, part.layout))
        self.is_owner = any(rank == dist.get_rank() for rank, _ in self.owners)
        assert not part.is_here or self.local.shape[0] == len(self.rows), (self.local.shape, self.rows)

    def fill(self, rows: range, values: Tensor) -> Tensor:
        """Write some of this rank's rows; returns what was written or, of a quantized weight, the values it stands
        for."""
        target = self.view(rows)
        if self.storage is None:
            return target.copy_(values)
        assert self.scales is not None
        start = rows.start - self.rows.start
        fill(target, self.scales[start : start + len(rows)], values, self.storage)
        return values

    def view(self, rows: range) -> Tensor:
        """Some of this rank's rows."""
        start = rows.start - self.rows.start
        return self.local[start : start + len(rows)]


def sharded_parameters(
    model: nn.Module, topology: Topology, parts: Mapping[str, StateTensor] | None = None
) -> dict[str, ShardedParameter]:
    """All that checkpoints of the model hold, or `parts` of it, by name; what is tied appears once."""
    parts = saved_state(model) if parts is None else parts
    return {name: ShardedParameter(part, topology) for name, part in parts.items()}
