"""Counting the memory of tensors."""

import torch

from expertmesh.training.planning.rehearsal.live_memory import LiveTensors

KB = 1024


def test_peak_of_live_tensors() -> None:
    held = torch.zeros(KB // 4)
    with LiveTensors([held, held[:10]]) as live:
        assert live.total == KB  # a view holds no memory of its own
        one = held + 1
        two = one * 2
        assert live.total == 3 * KB
        two.add_(1)
        del one
        assert live.total == 2 * KB
        two = two.view(2, -1)
        three = torch.empty(4 * KB, dtype=torch.uint8)
        assert live.total == 6 * KB
        del two, three
    assert live.total == KB
    assert live.peak == 6 * KB


def test_storages_that_are_emptied() -> None:
    """As FSDP empties what it has gathered, and fills it again."""
    held = torch.zeros(KB // 4)
    with LiveTensors([held]) as live:
        held.untyped_storage().resize_(0)
        assert live.total == 0
        held.untyped_storage().resize_(2 * KB)
        assert live.total == live.peak == 2 * KB


def test_what_autograd_keeps_is_live() -> None:
    x = torch.zeros(KB // 4, requires_grad=True)
    with LiveTensors([x]) as live:
        loss = x.exp().exp().sum()
        kept = live.total
        loss.backward()
    assert kept == 3 * KB + 4  # both results of exp, which their gradients need, and the sum
    del loss
    assert live.total == 2 * KB  # x and its gradient
