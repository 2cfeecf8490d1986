"""A run that comes back with fewer or more ranks, under `torchrun --nnodes 1:2 --max-restarts 3`."""

import json
from dataclasses import replace
from math import gcd
from pathlib import Path

import torch.distributed as dist

from checkpoints import recorded_order, whole_checkpoints
from moe import ExpertMeshError
from sharding import Ranks, raise_together
from training.config import TrainConfig
from training.environment import FILE as ENVIRONMENT


def fit_to_ranks(config: TrainConfig, num_experts: int, ranks: Ranks) -> tuple[TrainConfig, list[str]]:
    """The configuration for the ranks that there are now: the same run, otherwise shared out.

    `ep_size` becomes the largest that divides the experts and the ranks and is no larger than was asked for. A larger
    one never takes more memory (a rank's part of the experts depends on all ranks alone, what is gathered for a layer
    falls with it), so if this one does not fit, none does. `cp_size` becomes the largest divisor of what was asked for
    that divides the ranks. The global batch stays what the run began with, in as many forwards of
    `per_device_train_batch_size` rows as it takes. (A balancing loss depends on how it is cut.)

    Returns:
        It, and what is not as it was asked for, in words. All ranks call it together and get the same.

    Raises:
        ExpertMeshError: on all ranks, when what the run has written cannot be read.
    """
    cp_size = gcd(config.cp_size, ranks.world_size)
    ep_size = max(
        size for size in range(1, config.ep_size + 1) if num_experts % size == 0 and ranks.world_size % size == 0
    )
    found: list[int | None] = [None]
    with raise_together():
        if ranks.rank == 0 and config.global_batch_size is None:
            found = [rows_a_step_before(config.resume, Path(config.output_dir))]
    dist.broadcast_object_list(found, src=0)
    fitting = replace(config, ep_size=ep_size, cp_size=cp_size)
    if found[0] is not None:
        fitting = replace(fitting, global_batch_size=found[0], gradient_accumulation_steps=1)
    changes = []
    if ep_size != config.ep_size:
        changes.append(f"--ep-size {ep_size} in place of {config.ep_size}")
    if cp_size != config.cp_size:
        more = config.cp_size // cp_size
        changes.append(
            f"--cp-size {cp_size} in place of {config.cp_size}: a rank gets {more} times as much of each sequence"
        )
    forwards, asked = fitting.forwards(ranks.world_size), replace(config, cp_size=cp_size).forwards(ranks.world_size)
    if forwards != asked:
        rows = fitting.rows_a_step(ranks.world_size)
        changes.append(
            f"{forwards} micro-batches per step in place of {asked}, for a global batch of {rows} sequences as before"
        )
        if config.router_aux_loss_coef != 0:
            changes.append(
                "a balancing loss, if there is one, is the mean over micro-batches, and so not quite the same"
            )
    return fitting, changes


def rows_a_step_before(resume: str, output_dir: Path) -> int | None:
    """The global batch of the run that `--resume` means; None where there is none yet."""
    order = recorded_order([Path(resume)] if resume != "auto" else whole_checkpoints(output_dir / "checkpoints"))
    if order is not None:
        return order["global_batch_size"]
    try:
        # of a run that was interrupted before its first checkpoint
        rows: int = json.loads((output_dir / ENVIRONMENT).read_text(encoding="utf-8"))["global_batch_size"]
        return rows
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExpertMeshError(
            f"--elastic: {output_dir / ENVIRONMENT} does not contain the global batch ({error!r}); "
            "give it, by --global-batch-size"
        ) from error
