"""What is asked of dry runs: whose step, of which run; and what a search for the best parallel layout tries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ....sharding.parallelize.choices import Checkpointing
from ....sharding.pipeline.schedule import ScheduleName
from ....sharding.topology import DenseShard, Topology
from ...config.train_config import TrainConfig
from ..imbalance import EVEN, GivenRouting
from .costs import Cluster


@dataclass(frozen=True)
class Asked:
    """Whose step is asked for.

    Attributes:
        config: of the run. world_size, rank, device: which rank of how many, on what.
        cluster: what it runs on.
        routing: what is given in place of data.
    """

    config: TrainConfig
    world_size: int
    cluster: Cluster
    rank: int = 0
    routing: GivenRouting = EVEN
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def topology(self) -> Topology:
        return self.config.topology(self.world_size)

    @property
    def own_stages(self) -> list[int] | None:
        """The rank's stages of a pipeline."""
        config = self.config
        if config.pp_size == 1:
            return None
        index = self.rank // (self.world_size // config.pp_size)
        return list(range(index, config.pp_size * config.pipeline_chunks, config.pp_size))


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
