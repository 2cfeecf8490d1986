"""Compares what must be alike on all ranks, and names what is not, by node.

Ranks that were started with other flags, or read other files, would train a chimera, or wait for one another in
collectives that do not match. They meet at the store instead, which works before there is any process group.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from ...moe.util.errors import ExpertMeshError
from ..torchrun import node_name, nodes_of

if TYPE_CHECKING:
    from .process import Ranks

_KEY = "expertmesh/alike"
_MEETINGS = "expertmesh/meetings"
_MOST_FACTS = 3
_MOST_VARIANTS = 4
_MOST_CHARACTERS = 80

Explain = Callable[[Mapping[str, str], Mapping[str, str]], str]
"""What two differing sets of facts mean, in words; empty where nothing is to be added."""


def wait_for_all(ranks: Ranks, seconds: float = inf) -> None:
    """Wait until all ranks have come here, however long that takes: a collective would give up after its time limit.

    They meet at the store. A rank that waits is not in any collective, and ends like one that computes once the
    watchdog hears of a failure or misses another rank.

    Args:
        ranks: this one among all.
        seconds: how long to wait, where no watchdog looks after the others.

    Raises:
        ExpertMeshError: a rank does not come in time.
    """
    came = ranks.store.add(f"{_MEETINGS}/came", 1)
    # nobody comes to a meeting before all have come to the one before
    meeting = f"{_MEETINGS}/{(came - 1) // ranks.world_size}"
    if came % ranks.world_size == 0:
        ranks.store.set(meeting, "")
    begun = time.monotonic()
    while not ranks.store.check([meeting]):
        waited = time.monotonic() - begun
        if waited > seconds:
            raise ExpertMeshError(f"rank {ranks.rank}: not all {ranks.world_size} ranks arrived within {seconds:g} s")
        # in hundreds of ranks' long wait the store is not asked all the time
        time.sleep(min(0.01 + waited / 20, 1.0))


def check_alike(
    ranks: Ranks,
    what: str,
    facts: Mapping[str, str] | None,
    remedy: str,
    explain: Explain = lambda one, other: "",
    seconds: float = inf,
) -> None:
    """Compare facts over all ranks. All ranks call it together, each time with another `what`.

    Args:
        ranks: this one among all.
        what: what the facts describe, in the plural, such as "the model's files".
        facts: by name; None where another rank of the same node gives them.
        remedy: what would help, for the error.
        explain: see `Explain`.
        seconds: how long to wait for the other ranks.

    Raises:
        ExpertMeshError: on all ranks, when facts differ; the message names them, and the nodes and ranks.
    """
    if ranks.world_size == 1:
        return
    mine = "" if facts is None else json.dumps(dict(facts), sort_keys=True)
    digest = mine and hashlib.sha256(mine.encode()).hexdigest()[:16]
    gathered = gather(ranks, what, json.dumps([digest, node_name()]), seconds)
    digests, nodes = zip(*map(json.loads, gathered), strict=True)
    found = list(dict.fromkeys(filter(None, digests)))[:_MOST_VARIANTS]
    if len(found) <= 1:
        return
    if digest in found and digests.index(digest) == ranks.rank:
        ranks.store.set(f"{_KEY}/{what}/{digest}", mine)
    wait_for_all(ranks, seconds)
    variants = [json.loads(text) for text in ranks.store.multi_get([f"{_KEY}/{what}/{digest}" for digest in found])]
    _take_leave(ranks, seconds)
    # ranks that gave no facts stand with the rank of their node that did
    of_node = {node: digest for node, digest in zip(nodes, digests, strict=True) if digest}
    owners = [
        [rank for rank, node in enumerate(nodes) if (digests[rank] or of_node.get(node)) == digest] for digest in found
    ]
    said = differences(variants, [f"on {nodes_of(members, nodes)}" for members in owners])
    hint = explain(variants[0], variants[1])
    raise ExpertMeshError(f"{what} differ between nodes: {f'{hint}: ' * bool(hint)}{said}; {remedy}")


def raise_at_start(ranks: Ranks, problem: str, seconds: float) -> None:
    """As `raise_together`, before there is a process group: a rank that cannot start tells the others why.

    Args:
        ranks: this one among all.
        problem: what keeps this rank from starting; empty where nothing does.
        seconds: how long to wait for the other ranks.

    Raises:
        ExpertMeshError: on all ranks, when one cannot start; on the others the message names its node.
    """
    gathered = gather(ranks, "start", json.dumps([problem, node_name()]), seconds)
    problems, nodes = zip(*map(json.loads, gathered), strict=True)
    if not any(problems):
        return
    _take_leave(ranks, seconds)
    first = next(filter(None, problems))
    where = nodes_of([rank for rank, other in enumerate(problems) if other == first], nodes)
    raise ExpertMeshError(problem or f"{first} (on {where})")


def gather(ranks: Ranks, name: str, text: str, seconds: float) -> list[str]:
    """The text of every rank, in order. All ranks call it together, each time with another `name`.

    Raises:
        ExpertMeshError: a rank does not come within so many seconds.
    """
    ranks.store.set(f"{_KEY}/{name}/{ranks.rank}", text)
    wait_for_all(ranks, seconds)
    gathered = ranks.store.multi_get([f"{_KEY}/{name}/{rank}" for rank in range(ranks.world_size)])
    return [each.decode() for each in gathered]


def _take_leave(ranks: Ranks, seconds: float) -> None:
    """Wait until all ranks have read what they need: the store ends with the first node that does."""
    with suppress(RuntimeError, ExpertMeshError):
        wait_for_all(ranks, seconds)


def differences(variants: Sequence[Mapping[str, str]], owners: Sequence[str]) -> str:
    """The first few facts that differ, as each of the variants has them.

    Args:
        variants: at least two different sets of facts.
        owners: where each was found, such as "on node 0 (a), ranks 0-3".
    """
    names = list(dict.fromkeys(name for variant in variants for name in variant))
    differing = [name for name in names if len({variant.get(name) for variant in variants}) > 1]
    shown, more = differing[:_MOST_FACTS], len(differing) - _MOST_FACTS
    parts = [
        f"{owner}: {', '.join(f'{name} {_short(variant.get(name))}' for name in shown)}"
        for owner, variant in zip(owners, variants, strict=True)
    ]
    return "; ".join(parts) + (f"; {more} more differ" if more > 0 else "")


def _short(value: str | None) -> str:
    if value is None:
        return "none"
    if len(value) <= _MOST_CHARACTERS:
        return value
    return f"{value[:_MOST_CHARACTERS]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:8]})"
