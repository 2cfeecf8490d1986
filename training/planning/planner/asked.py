"""What is asked of dry runs: whose step, of which run."""

from dataclasses import dataclass
from typing import Literal

from ....sharding.topology import Topology
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
