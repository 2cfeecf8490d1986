"""Starting and ending the process group, and errors that all ranks raise together."""

import atexit
import ctypes
import json
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...moe.torch_private import _get_default_store
from ...moe.util.errors import ExpertMeshError
from ...moe.util.process_place import process_place, read_place, settle_place
from ..torchrun import node_name, nodes_of
from .agreement import check_alike, gather, raise_at_start, wait_for_all
from .rendezvous import torchrun_store

# what torch's flight recorder keeps, to be told when a rank hangs; see sharding.collectives
_RECORDED_COLLECTIVES = 500

# in which ranks that were started together have imported what they need
_REFUSAL_SECONDS = 60


_WORLD_GROUPS = 4
"""Process groups of all ranks in which gloo connects each rank with each: the default one, that of savers, and those of
the mesh."""
_OTHER_DESCRIPTORS = 400
"""Files, libraries' connections, and groups of fewer ranks."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks: its rank, their number, the device it computes on, and the store they met at."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store


def device_type(use_cpu: bool) -> str:
    """Where a run computes: "cuda" where there is a GPU, unless told otherwise."""
    return "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"


def check_tf32(device_type: str) -> None:
    """
    Raises:
        ExpertMeshError: the device has no TF32, as no CPU and no GPU before Ampere.
    """
    if device_type != "cuda":
        raise ExpertMeshError(f"--tf32 needs a GPU; this run is on {device_type}; leave it out")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise ExpertMeshError(
            f"--tf32 needs a GPU of compute capability 8.0 (Ampere) or more; this one has {major}.{minor}; leave it out"
        )


def settle_malloc() -> None:
    """Have glibc give tensors of 16 MiB and more pages of their own, and keep the two heaps that the others share.

    By default it raises that threshold up to 32 MiB over time, which scatters the weights and gradients of experts over
    a heap that they fragment; and it returns the heap's end after each step, to have it zeroed again in the next.
    As heaps are kept, there must be few: by default there are eight for each core, of which a new thread takes any, so
    that the threads which write checkpoints would in time leave as much in each of them as a checkpoint needs.
    Useful where computation is on the CPU. What the user's own variables of glibc settle stays as they say. Without
    glibc nothing happens.
    """
    settings = {
        "MALLOC_MMAP_THRESHOLD_": (-3, 16 * 2**20),  # M_MMAP_THRESHOLD
        "MALLOC_TRIM_THRESHOLD_": (-1, 2**30),  # M_TRIM_THRESHOLD
        "MALLOC_ARENA_MAX": (-8, 2),  # M_ARENA_MAX
    }
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for variable, (option, value) in settings.items():
        if mallopt is not None and variable not in os.environ:
            mallopt(option, value)


def use_own_cores() -> None:
    """Let torch compute on as many threads as there are cores for each of the ranks that share them: torchrun gives a
    rank one thread, which would make the update of offloaded parameters that many times slower; srun may give each rank
    cores of its own. All ranks call it together."""
    mine = (node_name(), sorted(os.sched_getaffinity(0)))
    cores: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(cores, mine)
    torch.set_num_threads(max(1, len(mine[1]) // cores.count(mine)))


def raise_descriptor_limit(world_size: int) -> str:
    """Let this process open as many files as the system allows: gloo holds a socket for every other rank in each group,
    and login shells and schedulers often leave 1,024 of hundreds of thousands.

    Returns:
        What is wrong where that may be too few for so many ranks; else nothing.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # where there is no limit, some systems refuse to be told so
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _WORLD_GROUPS * world_size + _OTHER_DESCRIPTORS
    if most == resource.RLIM_INFINITY or most >= needed:
        return ""
    return (
        f"warning: a process may open {most:,} files here, and each of {world_size:,} ranks may need {needed:,}, most "
        "of them connections to the others: raise the hard limit (ulimit -Hn, LimitNOFILE of a service, nofile in "
        "limits.conf) before ranks fail with 'too many open files'"
    )


def start_process_group(use_cpu: bool, timeout_seconds: int, alike: Mapping[str, str] | None = None) -> Ranks:
    """Join the process group: gloo on CPU; on GPU nccl, with gloo beside it for what lies in host memory.

    Works under torchrun, under srun where MASTER_ADDR and MASTER_PORT are set, and as a plain `python` process, which
    becomes a group of one.

    Args:
        use_cpu: whether to stay on the CPU where there is a GPU.
        timeout_seconds: time limit of a collective, and of waiting for the other ranks.
        alike: settings, by name, that must be the same on all ranks; None compares nothing.

    Raises:
        ExpertMeshError: on all ranks, when one cannot start, or was not started like the others.
    """
    from accelerate import PartialState  # slow to import, and most commands need no process group

    place = read_place()
    rank, world_size = place.rank, place.world_size
    warning = raise_descriptor_limit(world_size)
    if warning and place.local_rank == 0:
        print(warning, file=sys.stderr, flush=True)
    timeout = timedelta(seconds=timeout_seconds)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))
    is_launched = world_size > 1 or "RANK" in os.environ
    store = torchrun_store(rank, world_size, timeout) if is_launched else dist.HashStore()
    ranks = Ranks(rank, world_size, torch.device("cpu"), store)
    if alike is not None and world_size > 1:
        raise_at_start(ranks, "", timeout_seconds)
        check_alike(
            ranks,
            "flags or software",
            alike,
            "start all nodes with the same settings and software",
            seconds=timeout_seconds,
        )
    # once no rank is left that cannot start: it would not come to this meeting
    device = _device(use_cpu, ranks, timeout_seconds)
    if world_size > 1:  # accelerate and transformers read these
        told = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": process_place().local_rank}
        os.environ.update({name: str(value) for name, value in told.items() if not os.environ.get(name)})
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timeout,
    )
    PartialState(cpu=device.type == "cpu")
    return replace(ranks, device=device)


def _device(use_cpu: bool, ranks: Ranks, seconds: float) -> torch.device:
    """This rank's device; all ranks call it together, and know their places from then on."""
    if ranks.world_size > 1:
        told = read_place()
        is_of_group = (told.rank, told.world_size) == (ranks.rank, ranks.world_size)
        mine = json.dumps([is_of_group and told.local_world_size is not None, socket.gethostname()])
        gathered = gather(ranks, "places", mine, seconds)
        settle_place(ranks.rank, *zip(*map(json.loads, gathered), strict=True))
    if device_type(use_cpu) == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(process_place().local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


_FAREWELL_SECONDS = 30
_loads: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How often a process group was asked for."""


def join_process_group(use_cpu: bool, timeout_seconds: int) -> Ranks:
    """The ranks of the process group that this process is in, which it joins if it is in none yet; it then leaves it at
    its end. For a library: nothing else of the process changes, but how many files it may open.

    Args:
        use_cpu: whether to stay on the CPU where there is a GPU.
        timeout_seconds: time limit of a collective in a group that is joined now, and of waiting for the other ranks.

    Raises:
        ExpertMeshError: the group that is there has no backend for this device, or none for the CPU.
    """
    if not dist.is_initialized():
        ranks = start_process_group(use_cpu, timeout_seconds)
        atexit.register(_leave, ranks)
    else:
        kind = device_type(use_cpu)
        backends = dist.get_backend_config()
        if missing := [device for device in {"cpu", kind} if f"{device}:" not in backends]:
            raise ExpertMeshError(
                f"the process group has no backend for {', '.join(missing)}, but {backends}: begin it with "
                'torch.distributed.init_process_group("cpu:gloo,cuda:nccl"), or let expertmesh.load do it, before '
                "TrainingArguments or Accelerator are made"
            )
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), _get_default_store())
    # what one model's ranks tell each other is not another's
    group = dist.group.WORLD
    assert group is not None
    _loads[group] = _loads.get(group, 0) + 1
    store = dist.PrefixStore(f"expertmesh/{_loads[group]}", ranks.store)
    ranks = replace(ranks, store=store)
    return replace(ranks, device=_device(use_cpu, ranks, timeout_seconds))


def _leave(ranks: Ranks) -> None:
    """Leave the group at the end of the process. Gloo aborts a process whose connection to another is gone: they wait
    for one another, but not for long, nor after an error, as the others may not come."""
    if not dist.is_initialized():
        return
    if getattr(sys, "last_value", None) is None:
        with suppress(ExpertMeshError, RuntimeError):
            wait_for_all(ranks, _FAREWELL_SECONDS)
    dist.destroy_process_group()


def refuse_at_start(problem: str) -> None:
    """Tell ranks on other nodes, which would wait for this one, of an error that ends this process and that they may
    not have met.

    Imports torch: not to be called in a run on one node, which has nobody to tell.
    """
    rank, world_size = process_place().rank, process_place().world_size
    with suppress(ExpertMeshError, RuntimeError):
        store = torchrun_store(rank, world_size, timedelta(seconds=_REFUSAL_SECONDS))
        raise_at_start(Ranks(rank, world_size, torch.device("cpu"), store), problem, _REFUSAL_SECONDS)


def end_process_group() -> None:
    """Leave the group. The barrier keeps gloo from aborting when one rank is gone before another has finished."""
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def raise_together(patient: Ranks | None = None) -> Iterator[None]:
    """For work that may fail on some ranks only, so that no rank is left waiting for one that has failed.

    The work may use collectives only if a rank that meets an error still takes part in all of them.

    Args:
        patient: these ranks, where the work may take some of them longer than a collective's time limit; the others
            then wait for them without limit (see `wait_for_all`).

    Raises:
        ExpertMeshError: on every rank, when one met an error; the message is that of the lowest such rank, and names
            its node where not all met it. A rank that met anything but an ExpertMeshError raises that itself.
    """
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    problem = None if caught is None else str(caught)
    if caught is not None and not isinstance(caught, ExpertMeshError):
        problem = f"rank {dist.get_rank()} failed: {type(caught).__name__}: {caught}"
    if patient is not None:
        wait_for_all(patient)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (problem, node_name()))
    if caught is not None and not isinstance(caught, ExpertMeshError):
        raise caught
    problems, nodes = zip(*gathered, strict=True)
    first = next((p for p in problems if p is not None), None)
    if first is None:
        return
    who = [rank for rank, other in enumerate(problems) if other == first]
    is_local = process_place().spans_nodes and len(who) < len(problems)
    raise ExpertMeshError(f"{first} (on {nodes_of(who, nodes)})" if is_local else first) from caught
