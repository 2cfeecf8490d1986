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
        micro_batches: sequences per micro-batch.
        global_batch: sequences per step, of which each layout's number of micro-batches follows; None: that is the
            base setting's.
        pp_size, chunks, ep_size, dense_shard, checkpointing: as in `Setting`.
        schedule: None: zero-bubble, and the one without queued weight gradients: 1f1b, or interleaved with several
            chunks.
        only_fitting: whether nothing is forecast of layouts of which it is known beforehand that they do not fit.
    """

    micro_batches: Sequence[int]
    global_batch: int | None = None
    pp_size: int | None = 1
    chunks: int | None = None
    schedule: ScheduleName | None = None
    ep_size: int | None = None
    dense_shard: DenseShard | None = None
    checkpointing: Checkpointing | None = None
    only_fitting: bool = False
