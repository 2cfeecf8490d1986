"""The first collectives of process groups, when they are made.

NCCL makes a group's communicator when something is first sent in it, and connects its ranks anew for each algorithm,
while the host waits. In a step that would come in the midst of a pipeline's schedule, where ranks do not come to a
group at the same time, and in memory that forecasts count from the start. Here all ranks come to all groups in one
order.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .groups import all_gather, reduce_scatter


def warm_up(summing: Iterable[dist.ProcessGroup], exchanging: Iterable[dist.ProcessGroup], device_type: str) -> None:
    """Send one number through groups. All ranks call it together, each with its own of the same kinds of groups in the
    same order.

    Args:
        summing: groups that gather, scatter and sum.
        exchanging: groups in which ranks send rows to each other.
    """
    for group in summing:
        if group.size() > 1:
            one, all_of_them = (torch.zeros(size, device=device_type) for size in (1, group.size()))
            dist.all_reduce(one, group=group)
            all_gather(all_of_them, one, group)
            reduce_scatter(one, all_of_them, group)
    for group in exchanging:
        if group.size() > 1:
            sent = torch.zeros(group.size(), device=device_type)
            dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def warm_up_neighbours(group: dist.ProcessGroup, ranks: Sequence[int], device_type: str) -> None:
    """Send one number to the rank before this one and to the one after it, and receive theirs. All ranks of the group
    call it together, once it is warm.

    Args:
        ranks: those of the group, in a circle.
    """
    index = ranks.index(dist.get_rank())
    neighbours = ranks[(index + 1) % len(ranks)], ranks[index - 1]
    batch = [dist.P2POp(dist.isend, torch.zeros(1, device=device_type), rank, group) for rank in neighbours]
    # where both are one rank, what is sent to the one after it is received from the one before it
    batch += [dist.P2POp(dist.irecv, torch.zeros(1, device=device_type), rank, group) for rank in neighbours[::-1]]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
