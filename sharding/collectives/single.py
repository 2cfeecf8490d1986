"""Collectives of one tensor, by the names that the installed release of torch gives them (another one since 2.13)."""

import torch.distributed as dist
from torch import Tensor

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather every rank's `part`, one after the other along dim 0, into `out`."""
    getattr(dist, ALL_GATHER)(out, part, group=group)


def reduce_scatter(out: Tensor, data: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part, along dim 0, of the sum of all ranks' `data` into `out`."""
    getattr(dist, REDUCE_SCATTER)(out, data, group=group)
