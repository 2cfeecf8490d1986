"""The ranks of a pipeline: which pass the results of layers on to one another."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from ..topology import Topology
from .groups import group_description, make_group
from .warm_up import warm_up, warm_up_neighbours


@dataclass(frozen=True)
class PipelineGroups:
    """One rank of each pp index, all of which read the same sequences.

    index: this rank's pp index. ranks: all of them, in the order of their pp indices. forward, backward: groups of
    these ranks, for what layers give and for the gradients of it. device_type: of what they send. timeout: after which
    a collective in a group that `share` makes fails; None: torch's. sharing: groups of some pp indices' ranks that this
    rank is in, for parameters that these hold alike.
    """

    topology: Topology
    index: int
    ranks: tuple[int, ...]
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    device_type: str
    timeout: timedelta | None = None
    sharing: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def share(self, pp_ranks: Iterable[tuple[int, ...]]) -> None:
        """Make groups of these pp indices. All ranks call it together, with the same."""
        for several in sorted(set(pp_ranks)):
            parts = [[ranks[index] for index in several] for ranks in self.topology.groups("pp")]
            own = next((part for part in parts if dist.get_rank() in part), None)
            for part in parts:
                group = dist.new_group(part, self.timeout, group_desc=group_description("pp", "shared weights"))
                if part is own:
                    assert isinstance(group, dist.ProcessGroup)
                    self.sharing[several] = group
                    warm_up([group], [], self.device_type)


def make_pipeline_groups(
    topology: Topology, device_type: str, timeout: timedelta | None = None
) -> PipelineGroups | None:
    """The groups of this rank's pipeline; None where there is one pp index. All ranks call it together.

    A group for each direction: over NCCL the operations of a group run in the order in which they were begun, and what
    goes forward must not wait for what goes backward.
    """
    if topology.pp_size == 1:
        return None
    forward, backward = make_group(topology, "pp", "forward"), make_group(topology, "pp", "backward")
    rank = dist.get_rank()
    ranks = tuple(topology.group("pp", rank))
    # NCCL's first operation of a group must have all of its ranks, which a send and its receive are not
    warm_up([forward, backward], [], device_type)
    for group in (forward, backward):
        # of either direction's, as in some schedules what goes forward goes to the rank before
        warm_up_neighbours(group, ranks, device_type)
    return PipelineGroups(topology, topology.pp_rank(rank), ranks, forward, backward, device_type, timeout)
