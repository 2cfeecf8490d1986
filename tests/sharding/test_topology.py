"""Which rank holds which rows: every row once, and as FSDP2 and DTensor cut them (the checkpoint tests hold that)."""

from itertools import product

import pytest

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.topology import (
    DENSE,
    DIVIDED,
    EXPERT,
    REPLICATED,
    Topology,
    check_sizes,
    check_tp_nodes,
    rows_of,
)


@pytest.mark.parametrize(
    "topology",
    [
        *(Topology(1, 1), Topology(4, 2), Topology(8, 2), Topology(8, 8), Topology(6, 2, "hybrid")),
        *(Topology(4, 1, "hybrid"), Topology(8, 2, tp_size=2), Topology(8, 4, "hybrid", tp_size=2)),
        Topology(8, 2, pp_size=2, tp_size=2),
    ],
    ids=str,
)
def test_every_row_has_one_owner(topology: Topology) -> None:
    """Of a tensor that every stage has, as a table that two of them use, and of one that the last stage alone has."""
    last, every = topology.pp_size - 1, range(topology.pp_size)
    for layout, num_rows in product((DENSE, DIVIDED, EXPERT, REPLICATED), (8, 24, 56, 328)):
        for on_stages, pp_ranks in ((layout, every), (layout.on((last,)), range(last, last + 1))):
            owners = list(topology.owners(num_rows, on_stages))
            assert [row for _, rows in owners for row in rows] == list(range(num_rows)), layout
            assert all(topology.rows(num_rows, on_stages, rank) == rows for rank, rows in owners), layout
            # each stage that has a tensor has all of it
            held = {pp_rank: set[int]() for pp_rank in every}
            for rank in range(topology.world_size):
                held[topology.pp_rank(rank)].update(topology.rows(num_rows, on_stages, rank))
            assert held == {n: set(range(num_rows)) if n in pp_ranks else set() for n in held}, layout


def test_context_parallel_leave_parameters_where_they_are() -> None:
    shared, alone = Topology(8, 4, "full", 2), Topology(8, 4)
    for layout in (DENSE, EXPERT, REPLICATED):
        assert list(shared.owners(24, layout)) == list(alone.owners(24, layout))
    assert (shared.data_size, [shared.data_index(rank) for rank in range(8)]) == (4, [0, 0, 1, 1, 2, 2, 3, 3])


def test_more_ranks_than_rows() -> None:
    assert [len(Topology(4, 1).rows(2, DENSE, rank)) for rank in range(4)] == [1, 1, 0, 0]


def test_divided_over_tp_before_the_ranks_of_one_tp_index() -> None:
    """So that each rank's rows are of one part of the heads, whatever shards them."""
    stages = Topology(8, 2, "full", 1, 2, 2)
    full, hybrid = Topology(8, 2, tp_size=2), Topology(8, 4, "hybrid", tp_size=2)
    starts = {full: [0, 8, 2, 10, 4, 12, 6, 14], hybrid: [0, 8, 4, 12, 0, 8, 4, 12], stages: [0, 8, 4, 12, 0, 8, 4, 12]}
    for topology, expected in starts.items():
        assert [topology.rows(16, DIVIDED, rank).start for rank in range(8)] == expected, topology
    assert [rank for rank, _ in stages.owners(16, DIVIDED.on((1,)))] == [4, 6, 5, 7]


def test_hybrid_replicas_hold_the_same() -> None:
    topology = Topology(4, 2, "hybrid")
    assert topology.rows(10, DENSE, 0) == topology.rows(10, DENSE, 2) == range(0, 5)
    assert [rank for rank, _ in topology.owners(10, DENSE)] == [0, 1]


def test_experts_lie_on_consecutive_ep_ranks_and_are_cut_over_dp() -> None:
    assert [Topology(4, 2).rows(16, EXPERT, rank).start for rank in range(4)] == [0, 8, 4, 12]


def test_replicated_rows_are_on_every_rank() -> None:
    """A scalar is one row."""
    topology = Topology(4, 2, "hybrid")
    assert {topology.rows(7, REPLICATED, rank) for rank in range(4)} == {range(7)}
    assert list(topology.owners(rows_of(()), REPLICATED)) == [(0, range(1))]
    assert rows_of((5, 3)) == 5


@pytest.mark.parametrize(
    ("ep_size", "world_size", "num_experts", "said"),
    [
        (3, 8, 8, r"--ep-size 3 does not divide the 8 experts of this model; use 1, 2, 4 or 8$"),
        (3, 2, 8, r"use 1, 2, 4 or 8 \(with 2 ranks: 1 or 2\)"),
        (3, 1, 8, r"use 1, 2, 4 or 8 \(with 1 rank: 1\)"),
        (8, 4, 8, r"--ep-size 8 does not divide the 4 ranks; use 1, 2 or 4"),
        (2, 1, 8, r"--ep-size 2 does not divide 1 rank; use 1, or more ranks \(torchrun --nproc-per-node N\)$"),
        (0, 4, 8, r"--ep-size 0 does not divide"),
        # before the experts are known
        *((size, 16, None, f"--ep-size {size} does not divide the 16 ranks; use 1, 2, 4, 8 or") for size in (0, 3, 32)),
    ],
)
def test_ep_size_that_will_not_do(ep_size: int, world_size: int, num_experts: int | None, said: str) -> None:
    check_sizes(Topology(16, 8), num_experts=None)
    with pytest.raises(ExpertMeshError, match=said):
        check_sizes(Topology(world_size, ep_size), num_experts)


def test_a_tensor_parallel_group_is_on_one_node() -> None:
    check_tp_nodes(Topology(8, 2, tp_size=2), ["a"] * 4 + ["b"] * 4)
    with pytest.raises(ExpertMeshError) as raised:
        check_tp_nodes(Topology(8, 2, tp_size=4), ["a"] * 6 + ["b"] * 2)
    assert "--tp-size 4: a group has a, ranks 4-5 and b, ranks 6-7; " in str(raised.value)
    assert "must be on one node: use --tp-size 1 or 2. " in str(raised.value)
