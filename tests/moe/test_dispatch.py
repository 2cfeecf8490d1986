"""The counts' own stream, which only a GPU has."""

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.dispatch.alltoall import exchange_counts, wait_for_counts


@pytest.mark.gpu
def test_counts_do_not_wait_for_what_is_queued_after_them() -> None:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        counts_E = torch.arange(8, device=device)
        group: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        exchange_counts(counts_E, group, [8])  # communicators are made when first used
        wait_for_counts(device)
        queued = torch.cuda.Event()
        received_E, splits_2S = exchange_counts(counts_E, group, [3, 5])
        torch.cuda._sleep(10**10)
        queued.record()
        wait_for_counts(device)
        assert not queued.query(), "the wait was for the counts alone"
        assert splits_2S.tolist() == [[[3], [25]], [[3], [25]]]
        assert received_E.tolist() == counts_E.tolist()
    finally:
        dist.destroy_process_group()
