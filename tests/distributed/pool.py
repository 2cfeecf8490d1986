"""Persistent worker processes that stand in for ranks: started once, used by every distributed test.

Starting eight interpreters with torch and transformers costs more than most tests, so the workers are forked from one
process that has imported everything, and each job only joins and leaves a process group. That process is itself a fork
of the tests', made before the first of them begins: to start it by itself takes ten CPU seconds.

As torchrun's agent does, this process holds the store at which the ranks of a job meet: were it to be rank 0's, a rank
that came before it would be refused, and would only try again after most of a second.
"""

import atexit
import gc
import io
import multiprocessing
import os
import pkgutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertmesh import checkpoints, moe, sharding, training


def modules_of(package: ModuleType) -> list[str]:
    """Names of a package's modules, nested ones included, but those that only run as a command."""
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [module.name for module in modules if not module.name.endswith("__main__")]


MAX_RANKS = 8
MOST_THREADS = 40
"""Of a worker, between jobs. Every process group has a thread that looks a hundred times a second whether there is
something to do; what some tests leave behind holds theirs, and with hundreds of them a machine does nothing else."""
PRELOAD = [
    "accelerate",
    "datasets",
    "datasets.io.generator",
    "datasets.packaged_modules.generator.generator",
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.mixtral.modeling_mixtral",
    # a package of ours imports on demand, and so by itself brings nothing
    *(name for package in (moe, sharding, checkpoints, training) for name in modules_of(package)),
    "expertmesh.train_ep",
    "tests.distributed.reference",
    "tests.distributed.preloaded",
]


def start_fork_server() -> None:
    """Have a fork of this process be the server of multiprocessing's context "forkserver", which elsewhere is a new
    interpreter."""
    if torch.cuda.is_initialized():  # which no fork could use
        return
    address = os.path.join(get_temp_dir(), "fork-server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive_read, alive_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            try:
                atexit._clear()
                os.close(alive_write)
                forkserver.main(listener.fileno(), alive_read, PRELOAD)
            finally:
                os._exit(1)
        os.close(alive_read)
    server: Any = forkserver
    server = server._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_write, pid


class RankFailure(AssertionError):
    """A rank raised, died, or did not finish in time."""


class RankPool:
    """Runs a function on `world_size` ranks at once, each a process of its own, over gloo."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        join_group: bool = True,
        timeout: float = 600.0,
        **kwargs: Any,
    ) -> list[Any]:
        """What `function(*args, **kwargs)` returned on each rank.

        Args:
            function: importable by name.
            join_group: whether the worker joins the process group around the call; else the function does it itself.
            timeout: seconds after which a job counts as hung; many times what any takes.

        Raises:
            RankFailure: with the traceback of the first rank that failed.
        """
        if any(_num_threads(process.pid) > MOST_THREADS for process, _ in self.workers):
            self.close()
        self._grow(world_size)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, (process, connection) in enumerate(self.workers[:world_size]):
            try:
                connection.send((function, args, kwargs, rank, world_size, store.port, join_group))
            except OSError:
                # the next job is to find new ones
                self.close()
                raise RankFailure(f"rank {rank}: had ended before, with exit code {process.exitcode}") from None
        return self._collect(world_size, time.monotonic() + timeout)

    def _grow(self, world_size: int) -> None:
        assert world_size <= MAX_RANKS
        while len(self.workers) < world_size:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failure: str | None = None
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self.workers[:world_size])}
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), seconds):
                rank = waiting.pop(connection)
                process, ours = self.workers[rank]
                try:
                    ok, content = ours.recv()
                except (EOFError, OSError):
                    process.join(1.0)
                    ok, content = False, f"the process died with exit code {process.exitcode}"
                if ok:
                    results[rank] = torch.load(io.BytesIO(content), weights_only=False)
                elif failure is None:
                    failure = f"rank {rank}: {content}"
                    # the others may wait for this one in a collective
                    deadline = min(deadline, time.monotonic() + 5.0)
        if failure is None and not waiting:
            return [results[rank] for rank in range(world_size)]
        self.close()
        raise RankFailure(failure or f"ranks {sorted(waiting.values())} did not finish in time")

    def close(self) -> None:
        """End the workers; the next job starts new ones."""
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.join()
        self.workers = []


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # it has ended, or this is no Linux
        return 0


def _work(connection: Connection) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    gc.freeze()
    # which walks through all that is frozen, a tenth of a second here, and a run asks once
    gc.get_freeze_count = lambda: 1
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            buffer = io.BytesIO()
            torch.save(_run_job(*job), buffer)
            answer: tuple[bool, bytes | str] = (True, buffer.getvalue())
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
        _free_groups()


def _free_groups() -> None:
    """Let go of the process groups of a job that is done, each of which has a thread that looks a hundred times a
    second whether there is something to do: with a few in each of two dozen idle workers they took as much of the
    machine as the tests."""
    # a model and the hooks on it hold one another, and with them process groups
    gc.collect()
    # DTensor remembers how it has sharded, and with it the meshes of jobs long done; a mesh holds its groups
    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:
            vars(thing).get("_pg_registry", {}).clear()
    # what is left is remembered for good: the next job's collections need not walk through it
    gc.freeze()


def _run_job(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    world_size: int,
    port: int,
    join_group: bool,
) -> Any:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from expertmesh.sharding.runtime.process import end_process_group, start_process_group

    # where a job before has set it: `datasets` puts a copy in the place of os.environ, which then is not set back
    os.environ.pop("GROUP_RANK", None)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.manual_seed(rank)
    if join_group:
        start_process_group(use_cpu=True, timeout_seconds=300)
    result = function(*args, **kwargs)
    if join_group:
        end_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    return result
