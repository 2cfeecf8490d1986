"""Which rank counts which rows in the gradient norm."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from expertmesh.moe.experts.layout import ExpertParameter, Place
from expertmesh.sharding import clipping
from expertmesh.sharding.state import StateTensor
from expertmesh.sharding.topology import DENSE, DIVIDED, EXPERT, Topology

ROWS = 24


@pytest.mark.parametrize(
    "topology",
    [
        Topology(4, 2),
        Topology(4, 2, "hybrid"),
        Topology(8, 2, "hybrid", pp_size=2),
        Topology(8, 4, "hybrid", tp_size=2),
    ],
    ids=str,
)
def test_every_row_is_counted_once(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of replicas, and of what several stages of a pipeline use, one copy."""
    on_stages = {(topology.pp_size - 1,), tuple(range(topology.pp_size))}
    for layout, stages in product((DENSE, DIVIDED, EXPERT), on_stages):
        expert = ExpertParameter("w1", ROWS // 8, (2,), Place("up_proj", 1)) if layout is EXPERT else None
        part = StateTensor("w", torch.zeros(ROWS, 2), layout.on(stages), expert, True, True)
        counted: list[int] = []
        for rank in range(topology.world_size):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            if clipping._is_counted(part, topology):
                counted += topology.rows(ROWS, part.layout, rank)
        assert sorted(counted) == list(range(ROWS)), (layout, stages)
