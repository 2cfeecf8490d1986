"""The process groups that are made beside those of a device mesh, and what groups are called in messages."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

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
