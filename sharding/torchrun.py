"""What torchrun is told by a process, and what the nodes of a run are called."""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from ..moe.util.process_place import process_place

MISTAKE = 2
"""Exit code after a mistake of the user's."""
STOPPED = 75
"""Exit code after a signal stopped the run with a checkpoint saved: "try again later", EX_TEMPFAIL of sysexits.h."""
_PATIENCE = 20.0
"""Seconds for which ranks wait for the first of their node to tell of a mistake."""
_TEARDOWN = 10.0
"""Seconds for which that one then waits for their processes to end."""
_ENDING = "ending.lock"
"""Beside a rank's error file: locked by a process that is about to end, until it has ended."""


def started_by_torchrun() -> bool:
    """Whether this process is a worker of torchrun, which then is its parent and holds the store."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def tell_mistake(message: str) -> int:
    """Tell a mistake that every rank has found, once per node; the exit code of this process.

    torchrun ends all ranks when the first one fails, prints a block of lines for each that has, and ends with the first
    one's reason. So the others of a node let its first rank tell of it, and end after that without a failure of their
    own; it fails once their processes are gone, or torchrun would end those that are not, and list them. The reason
    that torchrun repeats, in its last line but one, is the message.
    """
    local_rank = process_place().local_rank
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if local_rank == 0:
        print(message, file=sys.stderr, flush=True)
    if not (given and started_by_torchrun()):
        return MISTAKE
    error_file = Path(given)
    of_ranks = error_file.parent.parent
    if local_rank > 0:
        with suppress(OSError):  # a full disk
            _hold_until_the_end(error_file.parent / _ENDING)
        deadline = time.monotonic() + _PATIENCE
        while not (of_ranks / "0" / error_file.name).exists():
            if time.monotonic() > deadline:
                return MISTAKE
            time.sleep(0.02)
        return 0
    # as torch.distributed.elastic's ErrorHandler writes it, without torch, which may not be loaded yet
    report = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
    with suppress(OSError):
        error_file.write_text(json.dumps({"message": report}), encoding="utf-8")
    deadline = time.monotonic() + _TEARDOWN
    others = range(1, process_place().ranks_here)
    with suppress(OSError):
        while not all(_is_gone(of_ranks / str(rank) / _ENDING) for rank in others) and time.monotonic() < deadline:
            time.sleep(0.02)
    return MISTAKE


def _hold_until_the_end(path: Path) -> None:
    """Lock a file that appears when it is locked; the kernel unlocks it when this process ends."""
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # of a file system without locks: the first rank meets it too, and waits for nobody
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(path)


def _is_gone(path: Path) -> bool:
    """Whether a process has called `_hold_until_the_end`, and ended since."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return True


def node_name() -> str:
    """This rank's node, such as "node 1 (host-b)"; the host alone where nothing numbers the nodes."""
    number = process_place().node
    return socket.gethostname() if number is None else f"node {number} ({socket.gethostname()})"


MOST_NODES_NAMED = 4


def nodes_of(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Names some ranks by their nodes, such as "node 0 (a), ranks 0-3 and node 1 (b), rank 5".

    Args:
        ranks: which ones, in ascending order.
        nodes: the name of every rank's node.
    """
    by_node = [(node, list(members)) for node, members in groupby(ranks, key=lambda rank: nodes[rank])]
    if len(by_node) > MOST_NODES_NAMED:
        return f"{len(by_node)} nodes, the first of them {by_node[0][0]}, {_spans(ranks)}"
    return " and ".join(f"{node}, {_spans(members)}" for node, members in by_node)


def _spans(ranks: Sequence[int]) -> str:
    """Ranks in words, such as "ranks 0-3, 6"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
