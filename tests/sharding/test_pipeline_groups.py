"""A pipeline's process groups: whom they join, and that both directions have their own."""

from datetime import timedelta

import torch
import torch.distributed as dist

from expertmesh.sharding.collectives.pipeline_groups import make_pipeline_groups
from expertmesh.sharding.topology import Topology
from tests.distributed.pool import RankPool


def test_who_is_in_them(ranks: RankPool) -> None:
    """Of four ranks in two stages the first two are one stage, the last two the other: 0 and 2 read the same. Counted
    by what a sum over each group gives."""
    assert ranks.run(_joined, 4) == [(0, (0, 2), 2, 2, 10), (0, (1, 3), 4, 4, 12), (1, (0, 2), 2, 2, 10),
                                     (1, (1, 3), 4, 4, 12)]  # fmt: skip


def _joined() -> tuple[int, tuple[int, ...], int, int, int]:
    groups = make_pipeline_groups(Topology(4, 2, pp_size=2), "cpu", timedelta(seconds=60))
    assert groups is not None
    assert groups.forward is not groups.backward
    groups.share([(0, 1)])
    sums = []
    for number, group in enumerate((groups.forward, groups.backward, groups.sharing[0, 1])):
        # ranks of the third have 4 more each
        rank = torch.tensor(dist.get_rank() + (4 if number == 2 else 0))
        dist.all_reduce(rank, group=group)
        sums.append(int(rank))
    return groups.index, groups.ranks, sums[0], sums[1], sums[2]


def test_who_shares_what_others_have_not(ranks: RankPool) -> None:
    """Of four stages the first and the last hold something alike; those between are in no group for it."""
    assert ranks.run(_sharing, 4) == [{(0, 3): 3}, {}, {}, {(0, 3): 3}]


def _sharing() -> dict[tuple[int, ...], int]:
    groups = make_pipeline_groups(Topology(4, 1, pp_size=4), "cpu")
    assert groups is not None
    groups.share([(0, 3), (0, 3)])
    sums = {}
    for several, group in groups.sharing.items():
        rank = torch.tensor(dist.get_rank())
        dist.all_reduce(rank, group=group)
        sums[several] = int(rank)
    return sums


def test_one_stage_needs_none() -> None:
    assert make_pipeline_groups(Topology(4, 4), "cpu") is None
