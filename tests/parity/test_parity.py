"""The main guarantee: loss, gradients and updated weights are identical for every parallel layout, and whatever else
does not change what is computed. Every way to train has its rows here."""

import pytest
import torch

from tests.parity.rows import Row
from tests.parity.runner import Runner
from tests.parity.table import ROWS


@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_row(runner: Runner, row: Row) -> None:
    found = runner.compare(row)
    if row.case.zeroed:  # the rows of all others' experts
        assert (torch.tensor(found.routing["expert_tokens"]) > 0).sum(dim=1).tolist() == [1, 1]
