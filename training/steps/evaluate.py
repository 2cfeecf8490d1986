"""Loss on held-out data, over exactly its target tokens, and what is remembered of it."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.experts.replay import NO_ROUTE, RouteReader, used_experts
from ...sharding.mesh import Mesh
from ...sharding.parallelize.parallelize import free_gathered
from ...sharding.pipeline.pipeline import Pipeline, pipeline_of
from ...sharding.runtime.preemption import boundary
from ..data.batch import Batch, BatchMaker, LossInputs, collate_rows
from ..data.sequences import Rows, share_out
from ..loss.objective import CROSS_ENTROPY, Objective
from .micro_batch import forward_of, token_loss_sum
from .pipelined import pipelined_heads


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's figures, over all ranks.

    loss: mean cross-entropy of the target tokens, in nats, or the mean of a loss of your own; NaN of nothing.
    targets: how many these are. seconds: that it took. figures: what a loss of your own gives beside itself, by name.

    Example:
        evaluation = engine.evaluate(batches)
        print(f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.1f}")
    """

    loss: float
    targets: int
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        return math.inf if self.loss > 700 else math.exp(self.loss)

    def __str__(self) -> str:
        if self.figures:
            figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
            return f"eval loss {self.loss:.4f}, {figures}, in {self.seconds:.1f} s"
        digits = ",.2f" if self.perplexity < 1e6 else ".2e"
        return (
            f"eval loss {self.loss:.4f}, perplexity {self.perplexity:{digits}}, "
            f"{self.targets:,} target tokens in {self.seconds:.1f} s"
        )


def evaluate(
    model: Any,
    rows: Rows,
    per_device: int,
    mesh: Mesh,
    maker: BatchMaker,
    objective: Objective = CROSS_ENTROPY,
    inputs_of: Callable[[list[int]], LossInputs | None] = lambda numbers: None,
) -> Evaluation:
    """The loss over all sequences; all ranks call it together, and get the same.

    A sum of token losses over a number of tokens, so it depends neither on how sequences are distributed over ranks and
    micro-batches nor on how long they are. Sequences of like length share a micro-batch.

    Args:
        objective: what is computed.
        inputs_of: what it gets of a micro-batch's rows.
    """

    def batch(numbers: list[int]) -> Batch:
        return collate_rows(rows, numbers, mesh.cp_group, maker, inputs_of(numbers))

    device, mine = torch.device(mesh.grid.device_type), by_length(rows, per_device, mesh)
    complete = objective.complete(model, map(batch, mine), device)
    return mean_loss(model, (complete(batch(numbers)) for numbers in mine), device, objective)


def by_length(rows: Rows, per_device: int, mesh: Mesh) -> list[list[int]]:
    """Numbers of the entries of each of this rank's micro-batches of all data, those of like length together: equally
    many micro-batches on all ranks."""
    order = rows.lengths.sort(descending=True, stable=True).indices.tolist()
    return share_out(order, mesh.topology.data_size, per_device, mesh.topology.data_index(dist.get_rank()))


def mean_loss(
    model: Any, batches: Iterable[Batch], device: torch.device, objective: Objective = CROSS_ENTROPY
) -> Evaluation:
    """The loss over all ranks' batches, equally many on each. All ranks call it together, and get the same."""
    begin = time.perf_counter()
    # the loss and the figures; what they are divided by, and targets
    sums = torch.zeros(1 + len(objective.figures), dtype=torch.float64, device=device)
    counts = torch.zeros(2, dtype=torch.float64)
    pipeline = pipeline_of(model)
    # every pp index has all batches
    counts_here = pipeline is None or pipeline.groups.index == 0
    with inference(model):
        for several, heads in head_outputs(model, batches, device, objective.by_token):
            loss_sum = torch.zeros((), device=device)
            for batch, gave in zip(several, heads, strict=False):
                loss, figures = objective.sums(gave, batch)
                loss_sum += loss
                for place, figure in enumerate(figures, 1):
                    sums[place] += figure
            sums[0] += loss_sum
            if counts_here:
                counts[0] += objective.counted(several)
                counts[1] += sum(batch.num_targets for batch in several)
    sums = torch.cat([sums, counts.to(device)])
    dist.all_reduce(sums)
    *totals, counted, targets = sums.tolist()
    mean, *means = (total / counted if counted else math.nan for total in totals)
    named = dict(zip(objective.figures, means, strict=True))
    return Evaluation(mean, int(targets), time.perf_counter() - begin, named)


def token_accuracy(model: Any, batches: Sequence[Batch], device: torch.device) -> float:
    """The share of targets that are the likeliest token, as trl's evaluations have it: the mean over micro-batches,
    each of all ranks together. All ranks call it together, with equally many; not through a pipeline."""
    sums_M2 = torch.zeros(len(batches), 2, dtype=torch.float64, device=device)
    with inference(model):
        found = head_outputs(model, batches, device, by_token=False, top_k=1)
        for sums_2, ((batch,), (top_N21,)) in zip(sums_M2, found, strict=True):
            targets_N = batch.targets_BS.flatten()[batch.target_index_N]
            sums_2[0] = (top_N21[:, 1, 0] == targets_N).sum()
            sums_2[1] = len(targets_N)
    dist.all_reduce(sums_M2)
    return float((sums_M2[:, 0] / sums_M2[:, 1].clamp(min=1)).mean())


def head_outputs(
    model: Any,
    batches: Iterable[Batch],
    device: torch.device,
    by_token: bool,
    top_k: int = 0,
    found: list[Tensor] | None = None,
) -> Iterator[tuple[list[Batch], list[Tensor]]]:
    """Batches on the device, some at a time, and what the head gives of each (see `LossHead.loss_of`): nothing where a
    pipeline's last stage is elsewhere. To be called within `inference`.

    Args:
        by_token: whether that is the log-probability of each target, in place of the sum of their cross-entropies.
        top_k: how many of the most likely tokens it is, in place of that; 0: none.
        found: takes the experts that each batch has used (see `used_experts`); None: they are not asked for.
    """
    pipeline, records = pipeline_of(model), found is not None
    if pipeline is None:
        for number, batch in enumerate(batches):
            if number > 0:
                boundary()
            here = batch.to(device)
            forward = forward_of(here, by_token=by_token, top_k=top_k, records_choices=records)
            gave = token_loss_sum(model, here, forward)
            if found is not None:
                found.append(used_experts(model, forward))
            yield [here], [gave]
        return
    # as many at a time as keep every stage at work
    for number, several in enumerate(_in_lots(batches, 4 * pipeline.stages.number)):
        if number > 0:
            boundary()
        moved = [batch.to(device) for batch in several]
        yield moved, pipelined_heads(model, moved, by_token, top_k, found)


def label_logprobs(
    model: Any, batches: Iterable[Batch], device: torch.device, sizes: Sequence[int], routes: RouteReader | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The log-probability of each label of this rank's batches, flat, in fp32, 0 where nothing is to be predicted, and
    the experts of each token, (labels, L, K) int16. All ranks call it together, with equally many batches; ranks that
    share sequences get the same.

    Args:
        batches: with what a loss of one's own needs.
        sizes: how many labels each had, as it was given.
        routes: of the model, if the experts are asked for.
    """
    pipeline, found, following = pipeline_of(model), [], iter(sizes)
    experts: list[Tensor] = []
    used: list[Tensor] | None = None if routes is None else []
    with inference(model):
        for several, heads in head_outputs(model, batches, device, by_token=True, found=used):
            for number, batch in enumerate(several):
                loss_batch = batch.of_loss
                labels = torch.zeros(next(following), device=device)
                if number < len(heads):
                    labels[loss_batch.place_N] = heads[number]
                if loss_batch.cp_group is not None:
                    dist.all_reduce(labels, group=loss_batch.cp_group.ranks)
                if pipeline is not None:
                    dist.broadcast(labels, pipeline.groups.ranks[-1], group=pipeline.groups.forward)
                if used is not None:
                    assert routes is not None
                    experts.append(_in_place(used.pop(0), batch, len(labels), routes, pipeline))
                found.append(labels)
    return found, experts


def _in_place(routes_TLK: Tensor, batch: Batch, size: int, routes: RouteReader, pipeline: Pipeline | None) -> Tensor:
    """The experts of a batch, of all its tokens and layers, in the order in which it was given.

    Args:
        routes_TLK: of those that are here. size: tokens, padding included, as given.
    """
    # which ranks exchange: no collective of gloo takes int16
    given = torch.full((size, *routes_TLK.shape[1:]), NO_ROUTE, dtype=torch.int32, device=routes_TLK.device)
    if batch.place_BS is not None:
        is_token = slice(None) if batch.is_token_BS is None else batch.is_token_BS.flatten()
        given[batch.place_BS.flatten()[is_token]] = routes_TLK.int()[is_token]
    cp_group = batch.of_loss.cp_group
    for group in (None if cp_group is None else cp_group.ranks, None if pipeline is None else pipeline.groups.forward):
        if group is not None:
            dist.all_reduce(given, dist.ReduceOp.MAX, group=group)
    return given.to(torch.int16)


def _in_lots(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    following = iter(batches)
    while several := list(islice(following, size)):
        yield several


@dataclass
class Best:
    """The best evaluation so far, and how many in a row were not better by the threshold.

    loss: of `by_score`, the negative of the score, which is the better the higher it is.
    """

    loss: float = math.inf
    step: int = 0
    since: int = 0
    by_score: bool = False

    def __str__(self) -> str:
        return f"{'score' if self.by_score else 'loss'} {self.figure:.4f}"

    @property
    def figure(self) -> float:
        """The loss, or the score."""
        return -self.loss if self.by_score else self.loss

    def update(self, loss: float, step: int, threshold: float) -> bool:
        """Whether this one is the best. One that is better by no more than `threshold` counts as best, but not against
        an early stop (`EarlyStoppingCallback` in transformers)."""
        self.since = 0 if self.loss - loss > threshold else self.since + 1
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
            best = "best so far" if self.step == step else f"best {self.figure:.4f} at step {self.step}"
        if patience == 0:
            return best
        return f"{best}; patience {max(patience - self.since, 0)} of {patience} left"

    def state(self) -> dict[str, float]:
        """For a checkpoint; `Best(**state)` brings it back."""
        if math.isinf(self.loss):  # which JSON does not have
            return {}
        return {name: value for name, value in asdict(self).items() if name != "by_score" or value}


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
