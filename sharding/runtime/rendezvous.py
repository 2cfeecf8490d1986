"""A key-value store that is this attempt's own, also after `torchrun --max-restarts` has started the ranks anew.

torchrun lets all attempts share one store, and clears nothing: a restarted rank can find the address that a dead one
left there, and is refused, or waits for ever. So the ranks first agree on a prefix that no attempt before has used.
"""

import hashlib
import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from ...moe.util.errors import ExpertMeshError
from ..torchrun import started_by_torchrun

_POLL_SECONDS = 0.02


def torchrun_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, under a prefix of this attempt's own where torchrun shares it.

    Raises:
        ExpertMeshError: the store cannot be reached, or not all ranks come together in time.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ExpertMeshError(
            f"rank {rank} of {world_size}: {' and '.join(missing)} must say where ranks meet: the host of rank 0, and "
            "a port that is free there, as configs/launch/slurm.sbatch sets them; for a single process, unset RANK and "
            "WORLD_SIZE, or start it without srun"
        )
    try:
        store: dist.Store = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))[0]
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ExpertMeshError(
            f"rank {rank} cannot reach the store at {address} (MASTER_ADDR, MASTER_PORT) within "
            f"{timeout.total_seconds():g} s: {str(error).splitlines()[0]}"
        ) from error
    if not started_by_torchrun():
        return store
    return dist.PrefixStore(agree_on_prefix(store, rank, world_size, timeout), store)


def agree_on_prefix(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A string that is the same on all ranks and new, whatever earlier attempts have left in the store.

    Each rank announces itself with a random number. Rank 0 proposes the numbers it sees, and again whenever one
    changes, for it may have seen a dead rank's. Who finds its own number in a proposal confirms that proposal; when all
    have confirmed the same one, rank 0 says so, and it is the prefix.
    """
    mine = uuid.uuid4().hex
    store.set(f"expertmesh/here/{rank}", mine)
    deadline = time.monotonic() + timeout.total_seconds()
    everybody = [f"expertmesh/here/{r}" for r in range(world_size)]
    proposal: list[str] = []
    while time.monotonic() < deadline:
        if rank == 0:
            if store.check(everybody):
                here = [number.decode() for number in store.multi_get(everybody)]
                if here != proposal:
                    proposal = here
                    store.set("expertmesh/proposal", json.dumps(proposal))
        elif store.check(["expertmesh/proposal"]):
            proposal = json.loads(store.get("expertmesh/proposal"))
        # random numbers of these very processes: no earlier attempt can have proposed them
        if len(proposal) == world_size and proposal[rank] == mine:
            prefix = "expertmesh/" + hashlib.sha256("".join(proposal).encode()).hexdigest()
            store.set(f"{prefix}/confirmed/{rank}", "")
            if rank == 0 and store.check([f"{prefix}/confirmed/{r}" for r in range(world_size)]):
                store.set(f"{prefix}/agreed", "")
            if store.check([f"{prefix}/agreed"]):
                return prefix
        time.sleep(_POLL_SECONDS)
    raise ExpertMeshError(f"rank {rank}: not all {world_size} ranks joined within {timeout.total_seconds():g} s")
