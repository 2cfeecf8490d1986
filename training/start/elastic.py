"""A run that comes back with fewer or more ranks, under `torchrun --nnodes 1:2 --max-restarts 3`."""

import json
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.topology import Topology, check_sizes, divisors
from ..config.train_config import TrainConfig
from ..environment import FILE as ENVIRONMENT
from .resume import Resumed


def fit_to_ranks(
    config: TrainConfig, num_experts: int, ranks: Ranks, resumed: Resumed | None
) -> tuple[TrainConfig, list[str]]:
    """The configuration for the ranks that there are now: the same run in another parallel layout.

    `ep_size` becomes the largest that divides the experts and the ranks of a pp index and is no larger than was asked
    for. A larger one never takes more memory (a rank's part of the experts depends on all ranks alone, what is gathered
    for a layer falls with it), so if this one does not fit, none does. All else stays as it was asked for. The
    global batch stays what the run began with, in as many micro-batches of `per_device_train_batch_size` sequences as
    it takes. (A balancing loss depends on how it is cut.)

    Args:
        resumed: on rank 0, what the run resumes.

    Returns:
        It, and what is not as it was asked for, in words. All ranks call it together and get the same.

    Raises:
        ExpertMeshError: on all ranks, when what the run has written cannot be read, or `pp_size`, `tp_size` or
            `cp_size` does not divide the ranks.
    """
    ep_size = max(
        (size for size in divisors(ranks.world_size // config.pp_size) if _fits(size, config, num_experts)),
        default=config.ep_size,
    )
    layout = replace(config, ep_size=ep_size)
    of_other_axes = (config.cp_size, config.pp_size, config.tp_size)
    with raise_together():
        check_sizes(Topology(ranks.world_size, ep_size, config.dense_shard, *of_other_axes), num_experts)
    found: list[int | None] = [None]
    with raise_together():
        if ranks.rank == 0 and config.global_batch_size is None:
            found = [recorded_sequences_per_step(resumed, Path(config.output_dir))]
    dist.broadcast_object_list(found, src=0)
    fitting = layout
    if found[0] is not None:
        fitting = replace(fitting, global_batch_size=found[0], gradient_accumulation_steps=None)
    changes = []
    if ep_size != config.ep_size:
        changes.append(f"--ep-size {ep_size} instead of {config.ep_size}")
    forwards, asked = fitting.micro_batches(ranks.world_size), layout.micro_batches(ranks.world_size)
    if forwards != asked:
        rows = fitting.sequences_per_step(ranks.world_size)
        changes.append(
            f"{forwards} micro-batches per step instead of {asked}, for the same global batch of {rows} sequences"
        )
        if config.router_aux_loss_coef != 0:
            changes.append("a balancing loss is a mean over micro-batches, so it changes slightly")
    return fitting, changes


def _fits(ep_size: int, config: TrainConfig, num_experts: int) -> bool:
    """Whether a size that divides the ranks is one for the experts, and for what tp divides."""
    is_for_tp = config.dense_shard == "full" or ep_size % config.tp_size == 0
    return ep_size <= config.ep_size and num_experts % ep_size == 0 and is_for_tp


def recorded_sequences_per_step(resumed: Resumed | None, output_dir: Path) -> int | None:
    """The global batch of the run that is resumed; None where there is none yet."""
    if resumed is not None:
        return resumed.sequences_per_step
    try:
        # of a run that was interrupted before its first checkpoint
        rows: int = json.loads((output_dir / ENVIRONMENT).read_text(encoding="utf-8"))["global_batch_size"]
        return rows
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExpertMeshError(
            f"--elastic: {output_dir / ENVIRONMENT} does not contain the global batch ({error!r}); "
            "give --global-batch-size"
        ) from error
