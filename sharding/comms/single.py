"""Collectives of one tensor, by the names that the installed release of torch gives them (another one since 2.13)."""

from typing import Any

import torch.distributed as dist

from expertmesh.moe.base.declared import StepPart

STEP_PART: StepPart = None

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Any, part: Any, group: dist.ProcessGroup | None = None) -> None:
    """Gather every rank's `part`, one after the other along dim 0, into `out`."""
    _gather(out, part, group=group)


def reduce_scatter(out: Any, data: Any, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part, along dim 0, of the sum of all ranks' `data` into `out`."""
    _reduce(out, data, group=group)
