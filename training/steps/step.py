"""One training step: loss, gradients, clipping, update. The same result with every parallel layout.

Every loss is a local sum over a global count, so that gradients are plain sums over ranks and micro-steps. Losses,
gradient norm and what ranks have to tell each other are summed at once, after the last backward, and read at once: the
only time in a step that the host waits for its GPU, beside the row counts of MoE layers. Where the optimizer can be
told on the device what to scale gradients by, and to leave a step out, the update is queued before the host waits, and
runs while the host goes on.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.experts.model_layers import moe_layers
from ...moe.experts.router_stats import Routing
from ...moe.util.gpu import computes_on_cpu
from ...moe.util.step_parts import register_step_part
from ...sharding.clipping import clip_divisor, scale_gradients, squares_and_lacking
from ...sharding.mesh import Mesh
from ...sharding.parallelize.unreached import agree_on_gradients
from ...sharding.pipeline.pipeline import pipeline_of
from ..data.batch import Batch
from ..loss.balance import BiasUpdate, LossWeights
from ..loss.objective import CROSS_ENTROPY, Objective
from .micro_batch import LossValues, StepCounts, count_step, figure_names, losses_of, no_losses
from .pipelined import pipelined_gradients

V = TypeVar("V")

register_step_part(__name__, "the step")

NO_TARGETS = "there is no token to predict on any rank: every label is -100"


@dataclass(frozen=True, repr=False)
class StepResult:
    """Figures of one optimizer step, over all ranks and micro-batches.

    Attributes:
        loss: mean cross-entropy of the target tokens, in nats; of a loss of your own, its sum divided by what it
            counts. NaN where there is nothing to be divided by.
        balance_loss, z_loss: the auxiliary losses before they are weighted; 0.0 where their weight is 0.
        grad_norm: of all gradients before they are clipped; 0.0 from `forward_backward`, which does not take it.
        tokens: without padding.
        targets: tokens that were to be predicted.
        is_finite: whether losses and gradient norm are; if not, there was no update.
        figures: what a loss of your own gives beside itself, by name; with --train-mtp `mtp_loss`.
        pairs, routing, is_stopping, counted, of_images: for `Engine.update` and the loop, and no part of the public
            interface: pairs of tokens that attend to one another, for each entry of the model's
            `ProbedFacts.attention` (see `seen_pairs`); this rank's part of the routing; whether any rank was asked to
            stop; what the loss is divided by; how many images, patches, and pairs of patches of one image.

    Example:
        figures = engine.step(batch)
        print(f"loss {figures.loss:.4f}, gradient norm {figures.grad_norm:.3f}, {figures.tokens} tokens")
    """

    loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    tokens: int
    targets: int
    pairs: tuple[int, ...]
    routing: Routing
    is_stopping: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    counted: float | None = None
    of_images: tuple[int, ...] = ()

    @property
    def weight(self) -> float:
        """What the mean loss of several steps weighs it by: what its own is a mean of."""
        return self.targets if self.counted is None else self.counted

    def __repr__(self) -> str:
        auxiliary = {"balance_loss": self.balance_loss, "z_loss": self.z_loss}
        figures = {"loss": self.loss, **{k: v for k, v in auxiliary.items() if v}, "grad_norm": self.grad_norm}
        figures |= self.figures
        shown = ", ".join(f"{name}={value:.6g}" for name, value in figures.items())
        return f"StepResult({shown}, tokens={self.tokens}, targets={self.targets})"

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradient norm are; if not, there was no update."""
        return math.isfinite(self.loss + self.balance_loss + self.z_loss + self.grad_norm)


def add_gradients(
    model: Any,
    batch: Batch,
    number: int,
    counts: StepCounts,
    weights: LossWeights,
    objective: Objective = CROSS_ENTROPY,
) -> tuple[Tensor, Routing]:
    """Forward and backward over one micro-batch of a step; gradients are added to what the parameters hold.

    Args:
        number: of the micro-batch in its step, from 0 on.
        weights: of the auxiliary losses (see `compute_gradients`).
        objective: what is minimised.

    Returns:
        This rank's part of the step's losses, fp32 (see `LossValues.of`), and its routing.
    """
    found = losses_of(model, batch, weights, counts.over(number), objective)
    found.total(weights).backward()
    return found.values(), found.routing


@dataclass(frozen=True)
class Gradients:
    """What a step's forwards and backwards leave beside gradients.

    losses: this rank's parts of the step's, fp64, on the device (see `LossValues.of`). routing: this rank's. counts:
    over all ranks. names: of the figures.
    """

    losses: Tensor
    routing: Routing
    counts: StepCounts
    names: tuple[str, ...] = ()

    def result(self, losses: LossValues[float], grad_norm: float = 0.0, is_stopping: bool = False) -> StepResult:
        """The figures of the step, of which the losses are now known over all ranks."""
        counts = self.counts
        return StepResult(
            loss=losses.loss if counts.counted else math.nan,  # a mean of nothing, and not the best there is
            balance_loss=losses.balance_loss,
            z_loss=losses.z_loss,
            grad_norm=grad_norm,
            tokens=counts.tokens,
            targets=counts.targets,
            pairs=counts.pairs,
            routing=self.routing,
            is_stopping=is_stopping,
            figures=dict(zip(self.names, losses.figures, strict=True)),
            counted=counts.counted,
            of_images=counts.of_images,
        )


def step_gradients(
    model: Any,
    batches: Sequence[Batch],
    weights: LossWeights,
    at: Callable[[str], object] = lambda doing: None,
    objective: Objective = CROSS_ENTROPY,
) -> Gradients:
    """Forward and backward over the micro-batches of one step; gradients are added to what the parameters hold.

    Args:
        model: sharded, with a `LossHead`.
        batches: this rank's, equally many on every rank, on the model's device.
        weights: of the auxiliary losses. The balancing loss is taken over one micro-batch of all ranks, as HF does,
            and averaged over the micro-steps; the z-loss over all tokens of the step.
        at: is told what comes next in a pipeline.
        objective: what is minimised.
    """
    counts, names = count_step(model, batches, objective), figure_names(weights, objective)
    if pipeline_of(model) is not None:
        return Gradients(*pipelined_gradients(model, batches, counts, weights, at, objective), counts, names)
    losses = no_losses(names, batches[0].tokens_BS.device)
    routings = []
    for number, batch in enumerate(batches):
        mine, routing = add_gradients(model, batch, number, counts, weights, objective)
        losses += mine
        routings.append(routing)
    return Gradients(losses, reduce(add, routings), counts, names)


def compute_gradients(
    model: Any, batches: Sequence[Batch], weights: LossWeights, objective: Objective = CROSS_ENTROPY
) -> StepResult:
    """`step_gradients`, and the figures of the step, with a grad_norm of 0. All ranks call it together."""
    return step_result(step_gradients(model, batches, weights, objective=objective))


def step_result(gradients: Gradients) -> StepResult:
    """The figures of a step, with a grad_norm of 0; its losses are summed over ranks in place. All ranks call it
    together."""
    dist.all_reduce(gradients.losses)
    return gradients.result(LossValues.of(gradients.losses.tolist()))


class StepSums(NamedTuple, Generic[V]):
    """What a step sums over ranks in one tensor: its scalars, or, once they are read, numbers.

    losses: of the step. squared_norm: of its gradients. lacking, stopping: less than 0 where a rank lacks gradients
    (see `squares_and_lacking`), or was asked to stop: every number that a dry run reads from the device is 1.
    """

    losses: LossValues[V]
    squared_norm: V
    lacking: V
    stopping: V

    @classmethod
    def of(cls, values: Iterable[V]) -> "StepSums[V]":
        """As `packed` has put them."""
        *losses, squared_norm, lacking, stopping = values
        return cls(LossValues.of(losses), squared_norm, lacking, stopping)

    @staticmethod
    def packed(losses: Tensor, squares_and_lacking: Tensor, is_stopping: bool) -> Tensor:
        """This rank's part."""
        stopping = losses.new_full((1,), -1.0 if is_stopping else 0.0)
        return torch.cat([losses, squares_and_lacking, stopping])


@runtime_checkable
class QueuesStep(Protocol):
    """An optimizer whose step can be queued on a device before the host knows whether it is to be taken."""

    def queue_step(self, scale: Tensor, is_skipped: Tensor) -> None:
        """Take a step with gradients divided by `scale`, or none at all, neither of which is known on the host: scalars
        on the device."""


def after_update(model: Any, routing: Routing, bias_update: BiasUpdate | None) -> None:
    """What an optimizer's step leaves to be done: experts' working weights are outdated, correction biases move.

    Args:
        routing: this rank's, of the step.
    """
    outdate_working_weights(model)
    if bias_update is not None:
        bias_update.step(routing)


def outdate_working_weights(model: Any) -> None:
    """Have experts that keep a copy of their weights in another dtype (see `bf16_copies`) round them anew, after
    each update."""
    for layer in moe_layers(model):
        layer.mlp.working.outdate()


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    mesh: Mesh,
    weights: LossWeights,
    max_grad_norm: float,
    bias_update: BiasUpdate | None = None,
    at: Callable[[str], object] = lambda doing: None,
    before_update: Callable[[], object] = lambda: None,
    is_stopping: Callable[[], bool] = lambda: False,
    objective: Objective = CROSS_ENTROPY,
) -> StepResult:
    """Gradients from zero, clipped over all meshes at once, then one update.

    Without the update, on all ranks alike, where the result is not finite: weights and optimizer state are as before.

    Args:
        bias_update: of the routers, beside the optimizer's.
        at: is told what comes next, beside the layers.
        before_update: is called before weights and the optimizer's state change.
        is_stopping: whether this rank was asked to stop, of which the result tells all.
        objective: what is minimised.
    """
    optimizer.zero_grad()
    at("the step's beginning")
    batches = [*map(objective.complete(model, batches, batches[0].tokens_BS.device), batches)]
    gradients = step_gradients(model, batches, weights, at, objective)
    at("the gradient norm")
    packed = StepSums.packed(gradients.losses, squares_and_lacking(model, mesh), is_stopping())
    dist.all_reduce(packed)
    read_packed = begin_to_read(packed)
    at("the optimizer step")
    before_update()
    is_queued = gradients.counts.counted > 0 and _queue_step(optimizer, packed, max_grad_norm)
    sums = StepSums.of(read_packed())
    result = gradients.result(sums.losses, math.sqrt(sums.squared_norm), sums.stopping < 0)
    if sums.lacking < 0:
        agree_on_gradients(model, mesh)
    if result.is_finite:
        if not is_queued or sums.lacking < 0:
            scale_gradients(model, result.grad_norm, max_grad_norm)
            optimizer.step()
        after_update(model, result.routing, bias_update)
    at("after the optimizer step")
    return result


def begin_to_read(numbers: Tensor) -> Callable[[], list[float]]:
    """Queue a copy of numbers to the host. What is returned waits for that, not for what is queued later, and gives
    them."""
    done = torch.get_device_module(numbers.device).Event()
    on_host = numbers.to("cpu", non_blocking=True)
    done.record()

    def read() -> list[float]:
        done.synchronize()
        values: list[float] = on_host.tolist()
        return values

    return read


def _queue_step(optimizer: torch.optim.Optimizer, packed: Tensor, max_grad_norm: float) -> bool:
    """Queue an optimizer's step on a GPU, where that is possible; returns whether it was.

    Args:
        packed: sums over all ranks (see `StepSums`). No step is taken where the host will call it not finite (see
            `StepResult.is_finite`, which does not read figures), or gradients are lacking.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # a rank may have none: where all that its stages of a pipeline hold is frozen
    if not isinstance(optimizer, QueuesStep) or not parameters or computes_on_cpu(parameters[0]):
        return False
    sums = StepSums.of(packed.unbind())
    losses = sums.losses
    total = losses.loss + losses.balance_loss + losses.z_loss + sums.squared_norm
    is_skipped = ~total.isfinite() | (sums.lacking < 0)
    optimizer.queue_step(clip_divisor(sums.squared_norm, max_grad_norm), is_skipped.float())
    return True
