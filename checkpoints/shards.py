"""A sharded model as the checkpoint code sees it: which rows of each parameter are here, and who holds the others."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding import Topology, is_expert, local_tensor


class ShardedParameter:
    """One parameter of a sharded model.

    Attributes:
        local: this rank's rows, sharing memory with the parameter.
        rows: which they are.
        row_shape: shape of one row.
        owners: (rank, rows) of all rows, in row order, one owner a row.
        is_owner: whether this rank is among them; else it holds a replica.
    """

    def __init__(self, parameter: Tensor, is_expert: bool, topology: Topology):
        self.local = local_tensor(parameter.detach())
        self.rows = topology.rows(parameter.shape[0], is_expert, dist.get_rank())
        self.row_shape = torch.Size(parameter.shape[1:])
        self.owners = list(topology.owners(parameter.shape[0], is_expert))
        self.is_owner = any(rank == dist.get_rank() for rank, _ in self.owners)
        assert self.local.shape[0] == len(self.rows), (self.local.shape, self.rows)

    def view(self, rows: range) -> Tensor:
        """Some of this rank's rows."""
        start = rows.start - self.rows.start
        return self.local[start : start + len(rows)]


def sharded_parameters(model: nn.Module, topology: Topology) -> dict[str, ShardedParameter]:
    """All parameters by name; a tied one appears once."""
    return {name: ShardedParameter(p, is_expert(name, model), topology) for name, p in model.named_parameters()}
