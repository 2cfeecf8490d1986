"""Loss on held-out data, over exactly its target tokens, and what is remembered of it."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from ..sharding.mesh import Mesh
from ..sharding.parallelize.parallelize import free_gathered
from ..sharding.pipeline.pipeline import pipeline_of
from .data.batch import Batch, Padding, collate
from .data.sequences import Rows, share_out
from .micro_batch import token_loss_sum
from .pipelined import pipelined_loss_sum


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's figures, over all ranks.

    loss: mean cross-entropy of the target tokens, in nats; NaN where there is none. targets: how many these are.
    seconds: that it took.

    Example:
        evaluation = engine.evaluate(batches)
        print(f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.1f}")
    """

    loss: float
    targets: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss > 700 else math.exp(self.loss)

    def __str__(self) -> str:
        digits = ",.2f" if self.perplexity < 1e6 else ".2e"
        return (
            f"eval loss {self.loss:.4f}, perplexity {self.perplexity:{digits}}, "
            f"{self.targets:,} target tokens in {self.seconds:.1f} s"
        )


def evaluate(model: Any, rows: Rows, per_device: int, mesh: Mesh, padding: Padding) -> Evaluation:
    """The loss over all sequences; all ranks call it together, and get the same.

    A sum of token losses over a number of tokens, so it depends neither on how sequences are distributed over ranks and
    micro-batches nor on how long they are. Sequences of like length share a micro-batch.
    """
    order = rows.lengths.sort(descending=True, stable=True).indices.tolist()
    device, topology = torch.device(mesh.grid.device_type), mesh.topology
    mine = share_out(order, topology.data_size, per_device, topology.data_index(dist.get_rank()))
    batches = (collate([rows[row] for row in forward], mesh.cp_group, padding) for forward in mine)
    return mean_loss(model, batches, device)


def mean_loss(model: Any, batches: Iterable[Batch], device: torch.device) -> Evaluation:
    """The loss over all ranks' batches, equally many on each. All ranks call it together, and get the same."""
    begin = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    pipeline = pipeline_of(model)
    with inference(model):
        if pipeline is None:
            for batch in batches:
                sums[0] += token_loss_sum(model, batch.to(device))
                sums[1] += batch.num_targets
        else:
            # as many at a time as keep every stage at work
            for several in _in_lots(batches, 4 * pipeline.stages.number):
                sums[0] += pipelined_loss_sum(model, [batch.to(device) for batch in several])
                # every pp index has them
                sums[1] += sum(batch.num_targets for batch in several) * (pipeline.groups.index == 0)
    dist.all_reduce(sums)
    total, targets = sums.tolist()
    return Evaluation(total / targets if targets else math.nan, int(targets), time.perf_counter() - begin)


def _in_lots(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    following = iter(batches)
    while several := list(islice(following, size)):
        yield several


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

    def compared(self, step: int, patience: int) -> str:
        """The evaluation at a step beside the best so far, and how many more without a better one stop the run.

        Args:
            patience: evaluations without a better loss that stop it; 0: never.
        """
        if self.step == 0:
            best = "none was finite so far"
        else:
            best = "best so far" if self.step == step else f"best {self.loss:.4f} at step {self.step}"
        if patience == 0:
            return best
        return f"{best}; patience {max(patience - self.since, 0)} of {patience} left"

    def state(self) -> dict[str, float]:
        """For a checkpoint; `Best(**state)` brings it back."""
        # JSON has no infinity
        return {} if math.isinf(self.loss) else asdict(self)


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """No gradients, dropout, jitter, activation checkpointing or compiled code; afterwards the model is as it was.

    Call it where no forward waits for its backward, and run at least one forward in it.
    """
    was_training = model.training
    model.eval()
    try:
        # compiled code would be compiled anew for this mode and, as generations grow, for KV caches
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
        # without a backward the root, and with --no-reshard-after-forward every unit, keeps its gathered parameters,
        # which would outlive the next update of their shards
        free_gathered(model)
