"""What torchrun tells a process, and what the nodes of a run are called."""

import os
import socket
from collections.abc import Sequence
from itertools import groupby


def read_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun's variables; a lone process when they are not set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, world_size, local_rank = (int(os.environ.get(name, "1" if name == "WORLD_SIZE" else "0")) for name in names)
    return rank, world_size, local_rank


def spans_nodes() -> bool:
    """Whether the run has ranks on more than one node."""
    _, world_size, _ = read_environment()
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size


def started_by_torchrun() -> bool:
    """Whether this process is a worker of torchrun, which then is its parent and holds the store."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def node_name() -> str:
    """This rank's node, such as "node 1 (host-b)"; the host alone where torchrun does not number the nodes."""
    number = os.environ.get("GROUP_RANK")
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
