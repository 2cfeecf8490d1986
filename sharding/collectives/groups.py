"""The process groups that are made beside those of a device mesh, with their options; what groups are called in
messages; and collectives of one tensor, by the names that the installed release of torch gives them."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...moe.kernels.carve_out import LEFT
from ..topology import Axis, Topology


def make_group(
    topology: Topology,
    axis: Axis,
    purpose: str = "",
    *,
    ranks_per_node: int | None = None,
    timeout: timedelta | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """A process group of this rank's group of an axis. All ranks call it together, and each makes all of the axis.

    Args:
        purpose: what tells it from other process groups of the same ranks.
        ranks_per_node: see `Topology.groups`.
        timeout: after which a collective in it fails; None: torch's.
        options: of its backend.
    """
    groups = [list(ranks) for ranks in topology.groups(axis, ranks_per_node)]
    own, _ = dist.new_subgroups_by_enumeration(
        groups, timeout, pg_options=options, group_desc=group_description(axis, purpose)
    )
    assert own is not None
    return own


def group_description(axis: Axis, purpose: str = "") -> str:
    """As torch describes the groups of a mesh, which is what its flight recorder knows them by."""
    return f"mesh_{axis} ({purpose})" if purpose else f"mesh_{axis}"


def group_name(description: str) -> str:
    """What messages call a process group that torch describes so: its axis and, where there are several process groups
    of one, its purpose. Empty if it is not described."""
    if description in ("default_pg", "mesh_default"):
        return "world"
    return "" if description == "undefined" else description.removeprefix("mesh_")


def few_blocks(device_type: str) -> Any:
    """Options with which NCCL has no more blocks than expert GEMMs in chunks leave it multiprocessors (see
    `moe.kernels.carve_out`). torch writes into them: for one group only. None where there is no NCCL."""
    if device_type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = LEFT
    return options


# another name since torch 2.13
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather every rank's `part`, one after the other along dim 0, into `out`."""
    getattr(dist, ALL_GATHER)(out, part, group=group)


def reduce_scatter(out: Tensor, data: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part, along dim 0, of the sum of all ranks' `data` into `out`."""
    getattr(dist, REDUCE_SCATTER)(out, data, group=group)
