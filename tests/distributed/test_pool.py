"""The pool of ranks: as many threads in each as its environment says, which is another order of sums."""

import os

import torch

from tests.distributed.pool import RankPool


def test_ranks_have_the_threads_of_the_tests(ranks: RankPool) -> None:
    """One, if not asked for more; also once a process group has begun, which else shares a machine's cores out."""
    asked = int(os.environ["OMP_NUM_THREADS"])
    assert torch.get_num_threads() == asked
    for join_group in (False, True):
        assert ranks.run(torch.get_num_threads, 2, join_group=join_group) == [asked] * 2
