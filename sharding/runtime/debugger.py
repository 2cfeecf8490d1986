"""A debugger on some ranks while the others wait: at the start and at `breakpoint()` torch.distributed's, at an error
Python's own."""

import os
import pdb
import sys
import tempfile
from bdb import BdbQuit
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from filelock import FileLock

from ...moe.util.errors import ExpertMeshError
from .failures import show


def check_debug_ranks(debug_ranks: Collection[int], world_size: int) -> None:
    """
    Raises:
        ExpertMeshError: there is no such rank.
    """
    if debug_ranks and (max(debug_ranks) >= world_size or min(debug_ranks) < 0):
        raise ExpertMeshError(f"--debug-ranks {' '.join(map(str, debug_ranks))}: the ranks are 0 to {world_size - 1}")


@contextmanager
def debugging(debug_ranks: Collection[int]) -> Iterator[None]:
    """Within it, a debugger opens on the ranks named, one after the other: at the beginning, at any `breakpoint()` that
    all ranks reach, and on each of them where it meets an error.

    Args:
        debug_ranks: of `check_debug_ranks`; an empty collection changes nothing.
    """
    if not debug_ranks:
        yield
        return

    def stop(*args: Any, **kwargs: Any) -> None:
        for rank in dict.fromkeys(debug_ranks):
            dist.breakpoint(rank, timeout_s=None)

    before, sys.breakpointhook = sys.breakpointhook, stop
    try:
        stop()
        yield
    except BdbQuit:
        raise
    except Exception as error:
        if (rank := dist.get_rank()) in debug_ranks:
            # all ranks of a node have one terminal, and the same parent
            with FileLock(Path(tempfile.gettempdir()) / f"expertmesh-debugger-{os.getppid()}.lock"):
                show(f"rank {rank}: {type(error).__name__}: {error}")
                pdb.post_mortem(error.__traceback__)
        raise
    finally:
        sys.breakpointhook = before
