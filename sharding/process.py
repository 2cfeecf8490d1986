"""Starting and ending the process group, and errors that all ranks raise together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from moe import ExpertMeshError


@dataclass(frozen=True)
class Ranks:
    """This process among all: its rank, how many there are, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device


def read_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun's variables; a lone process when they are not set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world_size, local_rank = (int(os.environ.get(name, "1" if name == "WORLD_SIZE" else "0")) for name in names)
    return rank, world_size, local_rank


def start_process_group(use_cpu: bool, timeout_seconds: int) -> Ranks:
    """Join the process group: gloo on CPU; on GPU nccl, with gloo beside it for what lies in host memory.

    Works under torchrun, and as a plain `python` process, which becomes a group of one.
    """
    rank, world_size, local_rank = read_environment()
    device = torch.device("cpu")
    if torch.cuda.is_available() and not use_cpu:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=timeout_seconds)
    )
    return Ranks(rank, world_size, device)


def end_process_group() -> None:
    """Leave the group. The barrier keeps gloo from aborting when one rank is gone before another has finished."""
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def raise_together() -> Iterator[None]:
    """Around work that each rank does alone and that may fail on some only, without collectives inside.

    Raises:
        ExpertMeshError: on every rank, the error of the lowest rank that met one, so that no rank waits for another.
    """
    problem: str | None = None
    try:
        yield
    except ExpertMeshError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((p for p in problems if p is not None), None)
    if first is not None:
        raise ExpertMeshError(first)
