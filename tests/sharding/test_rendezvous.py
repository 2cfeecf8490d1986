"""Agreeing on a prefix in a store that dead attempts have written to."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.runtime.rendezvous import agree_on_prefix, torchrun_store


def attempt(store: dist.Store, late: dict[int, float], world_size: int = 3) -> list[str]:
    """Prefixes of all ranks, each in a thread, some of them starting late."""
    prefixes = [""] * world_size

    def run(rank: int) -> None:
        prefixes[rank] = agree_on_prefix(store, rank, world_size, timedelta(seconds=20))

    threads = [threading.Timer(late.get(rank, 0.0), run, (rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return prefixes


@pytest.mark.parametrize("late", [{}, {0: 0.3}, {2: 0.3}, {1: 0.2, 2: 0.1}])
def test_every_attempt_gets_a_prefix_of_its_own(late: dict[int, float]) -> None:
    """Three attempts on one store, with what a rank that died early has left in between."""
    store = dist.HashStore()
    seen: set[str] = set()
    for _ in range(3):
        prefixes = attempt(store, late)
        assert len(set(prefixes)) == 1
        assert prefixes[0]
        assert prefixes[0] not in seen
        seen.add(prefixes[0])
        with pytest.raises(ExpertMeshError, match="rank 1: not all 3 ranks"):
            agree_on_prefix(store, 1, 3, timedelta(seconds=0.1))


def test_no_store_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExpertMeshError, match=r"rank 1 cannot reach the store at 127\.0\.0\.1:9 .* within 1 s"):
        torchrun_store(1, 2, timedelta(seconds=1))
