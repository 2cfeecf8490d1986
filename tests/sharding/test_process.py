"""malloc, as `settle_malloc` leaves it; ranks that wait for one another without a collective."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from expertmesh.moe.util.errors import ExpertMeshError
from expertmesh.sharding.mesh import build_mesh
from expertmesh.sharding.runtime import watchdog
from expertmesh.sharding.runtime.agreement import gather, raise_at_start, wait_for_all
from expertmesh.sharding.runtime.failures import Notice
from expertmesh.sharding.runtime.process import (
    _OTHER_DESCRIPTORS,
    _WORLD_GROUPS,
    Ranks,
    end_process_group,
    raise_together,
    start_process_group,
    use_own_cores,
)
from expertmesh.sharding.runtime.watchdog import Watchdog
from expertmesh.sharding.topology import Topology
from expertmesh.sharding.torchrun import node_name
from tests.distributed.pool import RankPool


def output_of(program: str, argument: str, **environment: str) -> str:
    command, environment = [sys.executable, "-c", program, argument], {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout


PAGES = """
import ctypes, sys
import torch
from expertmesh.sharding.runtime.process import settle_malloc

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2

if sys.argv[1] == "settled":
    settle_malloc()
# by default its being freed raises the size from which blocks get pages of their own
del_me = torch.empty(30 * 2**20, dtype=torch.uint8)
del del_me
before = mallinfo2().hblks
large, small = torch.empty(20 * 2**20, dtype=torch.uint8), torch.empty(10 * 2**20, dtype=torch.uint8)
print(mallinfo2().hblks - before)
"""


HEAPS = """
import ctypes, os, sys, threading
import torch
from expertmesh.sharding.runtime.process import settle_malloc

if sys.argv[1] == "settled":
    settle_malloc()

together = threading.Barrier(6)

def work():
    kept = torch.empty(100_000)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w")))
libc.fflush(None)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
@pytest.mark.parametrize(("how", "own_pages", "least", "most"), [("settled", 1, 1, 2), ("as it is", 0, 6, 1000)])
def test_malloc(how: str, own_pages: int, least: int, most: int) -> None:
    """Large tensors get pages of their own. Threads that come and go share few heaps, of which each keeps the most that
    any thread ever had of it."""
    assert int(output_of(PAGES, how)) == own_pages
    assert least <= output_of(HEAPS, how).count("<heap nr=") <= most


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_malloc_as_the_user_settles_it() -> None:
    assert int(output_of(PAGES, "settled", MALLOC_MMAP_THRESHOLD_=str(2**25))) == 0


def ranks_at_one_store(world_size: int) -> list[Ranks]:
    store = dist.HashStore()
    return [Ranks(rank, world_size, torch.device("cpu"), store) for rank in range(world_size)]


def test_nobody_goes_on_before_all_have_come() -> None:
    """Three meetings, one rank late for each: what the others do after it comes after what that one does before."""
    everybody, told = ranks_at_one_store(3), []

    def work(ranks: Ranks) -> None:
        for meeting in range(3):
            if ranks.rank == meeting:
                time.sleep(0.2)
            told.append((meeting, "before"))
            wait_for_all(ranks)
            told.append((meeting, "after"))

    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 18
    for meeting in range(3):
        assert told.index((meeting, "after")) > max(i for i, t in enumerate(told) if t == (meeting, "before"))


def test_why_a_rank_cannot_start_is_told_though_another_is_gone_by_then() -> None:
    here, other = ranks_at_one_store(2)
    thread = threading.Thread(target=gather, args=(other, "start", json.dumps(["", "node 1 (b)"]), 5.0))
    thread.start()
    with pytest.raises(ExpertMeshError, match="no such directory"):
        raise_at_start(here, "no such directory", 0.5)
    thread.join()


@pytest.mark.parametrize("error", [pytest.param("", marks=pytest.mark.slow), "no such file"])
def test_a_slow_rank_is_waited_for_past_the_time_limit(ranks: RankPool, tmp_path: Path, error: str) -> None:
    """And its error reaches those who wait."""
    assert ranks.run(_first_rank_is_slow, 2, tmp_path, error, join_group=False) == [error or "read"] * 2


def _first_rank_is_slow(directory: Path, error: str) -> str:
    """Rank 0 takes twice as long as a collective may; what came of it."""
    group = start_process_group(use_cpu=True, timeout_seconds=60)
    _set_pg_timeout(timedelta(seconds=2))
    found = "read"
    try:
        with raise_together(patient=group):
            if group.rank == 0:
                time.sleep(4)
                if error:
                    raise ExpertMeshError(error)
                (directory / "cache").touch()
        assert (directory / "cache").exists()
    except ExpertMeshError as raised:
        found = str(raised)
    _set_pg_timeout(timedelta(seconds=60))
    end_process_group()
    return found


@pytest.mark.parametrize("is_told", [True, False])
def test_who_waits_ends_once_another_rank_has_failed(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its notice, or as it gives no sign any more."""
    ended = threading.Event()
    for name in ("NOTICE_SECONDS", "FAREWELL_SECONDS", *(() if is_told else ("SILENT_SECONDS",))):
        monkeypatch.setattr(watchdog, name, 0.05)
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(watchdog, "end_at_once", end)
    failing, waiting = ranks_at_one_store(2)
    if not is_told:
        Watchdog(failing, 1800).notices.give_sign("its last")
    threading.Thread(target=wait_for_all, args=(waiting,), daemon=True).start()
    with Watchdog(waiting, 1800).watching():
        if is_told:
            Watchdog(failing, 1800).notices.post(Notice(0, "error", "OSError, while it read the data"))
        ended.wait(60)
    wait_for_all(failing)  # lets the thread go
    assert codes[:1] == [1]


def test_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)), raising=False)
    try:
        for ranks, threads in ((4, 3), (24, 1), (1, 12)):
            # beside them, ranks of another node, and one that its launcher has bound to cores of its own
            others = [("node 1 (b)", list(range(12))), (node_name(), [12, 13])]

            def gathered(cores: list[Any], mine: Any, ranks: int = ranks, others: list[Any] = others) -> None:
                cores[:] = [mine] * ranks + others

            monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
            monkeypatch.setattr("torch.distributed.all_gather_object", gathered)
            use_own_cores()
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


ORPHAN = """
import os, time
import torch
import torch.distributed as dist
from expertmesh.sharding.runtime import watchdog
from expertmesh.sharding.runtime.process import Ranks
from expertmesh.sharding.runtime.watchdog import Watchdog

watchdog.NOTICE_SECONDS = 0.1
begun = os.pipe()
if os.fork() == 0:  # what starts the rank
    if os.fork() == 0:  # the rank
        with Watchdog(Ranks(0, 1, torch.device("cpu"), dist.HashStore()), None).watching():
            os.write(begun[1], b"begun")
            time.sleep(4)
            print("the rank has gone on", flush=True)
        os._exit(0)
    os.read(begun[0], 5)
    os._exit(0)
os.close(begun[1])
os.wait()
os.read(begun[0], 1)  # until the rank has ended, too
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_ends_with_torchrun_but_not_with_a_shell(by_torchrun: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment |= {"TORCHELASTIC_RUN_ID": "any"} if by_torchrun else {}
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ("the torchrun that started it has ended" in done.stderr) == by_torchrun, done.stderr
    assert ("the rank has gone on" in done.stdout) == (not by_torchrun), done.stderr


FILES = """
import json, resource, sys
from expertmesh.sharding.runtime.process import raise_descriptor_limit

for soft, hard, world_size in json.loads(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = raise_descriptor_limit(world_size)
    print(json.dumps([said, resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))
"""


def test_as_many_files_as_the_system_allows() -> None:
    limits = [(256, 4096, 340), (256, 1024, 340), (256, 1024, 8)]
    told, found = zip(*map(json.loads, output_of(FILES, json.dumps(limits)).splitlines()), strict=True)
    assert found == (4096, 1024, 1024)
    assert told[0] == told[2] == ""
    assert "may open 1,024 files here, and each of 340 ranks may need" in told[1]


def _descriptors(topology: Topology) -> int:
    """Those that the process groups of a run add."""
    before = len(os.listdir("/proc/self/fd"))
    start_process_group(use_cpu=True, timeout_seconds=60)
    mesh = build_mesh("cpu", topology, 60)
    savers = dist.new_group(backend="gloo")
    found = len(os.listdir("/proc/self/fd")) - before
    dist.barrier(group=savers)
    del mesh
    end_process_group()
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts what Linux lists")
@pytest.mark.parametrize("topology", [Topology(8, 4), Topology(8, 8, "hybrid")], ids=str)
def test_files_of_all_groups_are_counted(ranks: RankPool, topology: Topology) -> None:
    """As a run of 340 ranks is warned by it, and cannot be tried."""
    for found in ranks.run(_descriptors, 8, topology, join_group=False):
        assert 2 * 7 <= found <= _WORLD_GROUPS * 8 + _OTHER_DESCRIPTORS / 8, found
