"""What a search for the best parallel layout tries."""

from collections.abc import Sequence
from dataclasses import dataclass

from ....sharding.parallelize.choices import Checkpointing
from ....sharding.pipeline.schedule import ScheduleName
from ....sharding.topology import DenseShard

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Sequences per micro-batch, where they are not given."""


@dataclass(frozen=True)
class Tried:
    """What a search tries. Of what is None, it tries several.

    Attributes:
        micro_batches: sequences per micro-batch, or pairs.
        pp_size, chunks, schedule, ep_size, tp_sizes, dense_shard, checkpointing: as the settings of a run. schedule:
            None: zero-bubble, and the one without queued weight gradients.
    """

    micro_batches: Sequence[int]
    pp_size: int | None = 1
    chunks: int | None = None
    schedule: ScheduleName | None = None
    ep_size: int | None = None
    tp_sizes: Sequence[int] | None = (1,)
    dense_shard: DenseShard | None = None
    checkpointing: Checkpointing | None = None
