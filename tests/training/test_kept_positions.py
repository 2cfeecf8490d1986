"""What autograd keeps of gathered positions: this rank's part, gathered again for the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.training.tensor_parallel.kept_positions import KeptPositions, is_kept_otherwise
from tests.rounding import assert_near

PARTS = 3


class Group:
    """Of ranks that all have the same part, beside a number that tells them apart."""

    def __init__(self) -> None:
        self.gathers = 0

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        self.gathers += 1
        return torch.cat([part + rank for rank in range(PARTS)], dim)


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_and_memory(keeps: bool) -> None:
    """Two linear layers save the gathered tensor, one of them a view of it: it is gathered once, for both."""
    torch.manual_seed(0)
    part_LD, weights = torch.randn(2, 4), [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    group: Any = Group()
    gathered_SD = group.all_gather(part_LD, 0)
    kept: list[Tensor] = []
    positions = KeptPositions()
    with positions:
        if keeps:
            positions.note(gathered_SD, group, part_LD, 0)
        assert is_kept_otherwise()
        packed = [positions._pack(x) for x in (gathered_SD, gathered_SD.view(3, 2, 4))]
        kept += [x for x in packed if isinstance(x, Tensor)]
        loss = (gathered_SD @ weights[0]).square().sum() + (gathered_SD.view(3, 2, 4) @ weights[1]).sum()
    del gathered_SD
    assert len(kept) == (0 if keeps else 2), "views hold what was gathered"
    del packed
    found = torch.autograd.grad(loss, weights)
    assert group.gathers == 1 + keeps
    plain_SD = torch.cat([part_LD + rank for rank in range(PARTS)])
    expected = (2 * plain_SD.T @ plain_SD @ weights[0], plain_SD.sum(0)[:, None].expand(4, 4))
    assert_near(found, expected)


def test_what_was_changed_since_is_kept_as_it_is() -> None:
    group: Any = Group()
    part_LD = torch.randn(2, 4)
    gathered_SD = group.all_gather(part_LD, 0)
    positions = KeptPositions()
    with positions:
        positions.note(gathered_SD, group, part_LD, 0)
        gathered_SD += 1
        assert positions._pack(gathered_SD) is gathered_SD
        assert positions._pack(part_LD) is part_LD
