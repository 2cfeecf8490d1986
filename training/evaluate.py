"""Loss on held-out data, over exactly its target tokens, and what is remembered of it."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from sharding import Mesh
from training.data import Rows, collate, share_out
from training.inference import inference
from training.step import token_loss_sum


@dataclass(frozen=True)
class Evaluation:
    """loss: mean cross-entropy of the target tokens, in nats. seconds: that it took."""

    loss: float
    targets: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(model: Any, rows: Rows, per_device: int, mesh: Mesh) -> Evaluation:
    """The loss over all rows; all ranks call it together, and get the same.

    A sum of token losses over a number of tokens, so neither how rows are spread over ranks and forwards nor how long
    they are weighs in. Rows of like length share a forward.
    """
    begin = time.perf_counter()
    order = rows.lengths.sort(descending=True, stable=True).indices.tolist()
    device, topology = torch.device(mesh.grid.device_type), mesh.topology
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with inference(model):
        for forward in share_out(order, topology.data_size, per_device, topology.data_index(dist.get_rank())):
            batch = collate([rows[row] for row in forward], mesh.sharers).to(device)
            sums[0] += token_loss_sum(model, batch)
            sums[1] += batch.num_targets
    dist.all_reduce(sums)
    total, targets = sums.tolist()
    return Evaluation(total / max(targets, 1), int(targets), time.perf_counter() - begin)


@dataclass
class Best:
    """The best evaluation so far, and how many in a row were not better by the threshold."""

    loss: float = math.inf
    step: int = 0
    since: int = 0

    def update(self, loss: float, step: int, threshold: float) -> bool:
        """Whether this one is the best. One that is better by no more than `threshold` counts as best, but not against
        an early stop (`EarlyStoppingCallback` in transformers)."""
        self.since = 0 if loss < self.loss - threshold else self.since + 1
        is_better = loss < self.loss
        if is_better:
            self.loss, self.step = loss, step
        return is_better

    def state(self) -> dict[str, float]:
        """For a checkpoint; `Best(**state)` brings it back."""
        # JSON has no infinity
        return {} if math.isinf(self.loss) else asdict(self)
