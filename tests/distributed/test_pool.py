"""The pool of ranks: as many threads in each as its environment says, which is another order of sums; new ranks in the
place of those that were killed."""

import os

import pytest
import torch

from tests.distributed.pool import RankFailure, RankPool


def test_ranks_have_the_threads_of_the_tests(ranks: RankPool) -> None:
    """One, if not asked for more; also once a process group has begun, which else shares a machine's cores out."""
    asked = int(os.environ["OMP_NUM_THREADS"])
    assert torch.get_num_threads() == asked
    for join_group in (False, True):
        assert ranks.run(torch.get_num_threads, 2, join_group=join_group) == [asked] * 2


def test_ranks_that_were_killed_fail_one_job(ranks: RankPool) -> None:
    ranks.run(os.getpid, 2, join_group=False)
    process, _ = ranks.workers[1]
    process.kill()
    process.join()
    with pytest.raises(RankFailure, match="rank 1: had ended before, with exit code -9"):
        ranks.run(os.getpid, 2, join_group=False)
    first, second = ranks.run(os.getpid, 2, join_group=False)
    assert first != second
