"""One training step: loss, gradients, clipping, update. The same result with every parallel layout.

Every loss is a local sum over a global count, so that gradients are plain sums over ranks and micro-steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..moe.experts.model_layers import moe_layers
from ..moe.experts.router_stats import Routing
from ..sharding.clipping import clip_grad_norm
from ..sharding.mesh import Mesh
from ..sharding.pipeline.pipeline import pipeline_of
from .data.batch import Batch
from .loss.balance import BiasUpdate, LossWeights
from .micro_batch import StepCounts, count_step, losses_of
from .pipelined import pipelined_gradients

NO_TARGETS = "no token is to be predicted, on any rank: every label is -100"


@dataclass(frozen=True, repr=False)
class StepResult:
    """Figures of one optimizer step, over all ranks and micro-batches.

    Attributes:
        loss: mean cross-entropy of the target tokens, in nats; NaN where there is none.
        balance_loss, z_loss: the auxiliary losses before they are weighted; 0.0 where their weight is 0.
        grad_norm: of all gradients before they are clipped; 0.0 from `forward_backward`, which does not take it.
        tokens: without padding.
        targets: tokens that were to be predicted.
        is_finite: whether losses and gradient norm are; if not, there was no update.
        pairs, routing: for `Engine.update` and the log, and no part of the public interface: pairs of tokens that
            attend to one another, for each entry of the model's `ModelFacts.attention` (see `seen_pairs`), and this
            rank's part of the routing.

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

    def __repr__(self) -> str:
        auxiliary = {"balance_loss": self.balance_loss, "z_loss": self.z_loss}
        figures = {"loss": self.loss, **{k: v for k, v in auxiliary.items() if v}, "grad_norm": self.grad_norm}
        shown = ", ".join(f"{name}={value:.6g}" for name, value in figures.items())
        return f"StepResult({shown}, tokens={self.tokens}, targets={self.targets})"

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradient norm are; if not, there was no update."""
        return math.isfinite(self.loss + self.balance_loss + self.z_loss + self.grad_norm)


def add_gradients(
    model: Any, batch: Batch, number: int, counts: StepCounts, weights: LossWeights
) -> tuple[Tensor, Routing]:
    """Forward and backward over one micro-batch of a step; gradients are added to what the parameters hold.

    Args:
        number: of the micro-batch in its step, from 0 on.
        weights: of the auxiliary losses (see `compute_gradients`).

    Returns:
        This rank's part of the step's mean cross-entropy, balancing loss and z-loss, (3,) fp32, and its routing.
    """
    found = losses_of(model, batch, weights, counts.over(number))
    found.total(weights).backward()
    return found.values(), found.routing


def compute_gradients(
    model: Any, batches: Sequence[Batch], weights: LossWeights, at: Callable[[str], object] = lambda doing: None
) -> StepResult:
    """Forward and backward over the micro-batches of one step; gradients are added to what the parameters hold.

    Args:
        model: sharded, with a `LossHead`.
        batches: this rank's, equally many on every rank, on the model's device.
        weights: of the auxiliary losses. The balancing loss is taken over one micro-batch of all ranks, as HF does,
            and averaged over the micro-steps; the z-loss over all tokens of the step.
        at: is told what comes next in a pipeline.

    Returns:
        The step's figures, with a grad_norm of 0.
    """
    counts = count_step(model, batches)
    if pipeline_of(model) is not None:
        return step_result(*pipelined_gradients(model, batches, counts, weights, at), counts)
    losses = torch.zeros(3, dtype=torch.float64, device=counts.tokens_M.device)
    routings = []
    for number, batch in enumerate(batches):
        mine, routing = add_gradients(model, batch, number, counts, weights)
        losses += mine
        routings.append(routing)
    return step_result(losses, reduce(add, routings), counts)


def step_result(losses: Tensor, routing: Routing, counts: StepCounts) -> StepResult:
    """The figures of a step, with a grad_norm of 0. All ranks call it together.

    Args:
        losses: (3,) fp64, this rank's parts from `add_gradients`, added up; summed over ranks in place.
    """
    dist.all_reduce(losses)
    loss, balance_loss, z_loss = losses.tolist()
    loss = loss if counts.targets else math.nan  # a mean of nothing, and not the best there is
    return StepResult(loss, balance_loss, z_loss, 0.0, counts.tokens, counts.targets, counts.pairs, routing)


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
) -> StepResult:
    """Gradients from zero, clipped over all meshes at once, then one update.

    Without the update, on all ranks alike, where the result is not finite: weights and optimizer state are as before.

    Args:
        bias_update: of the routers, beside the optimizer's.
        at: is told what comes next, beside the layers.
        before_update: is called before weights and the optimizer's state change.
    """
    optimizer.zero_grad()
    at("the step's beginning")
    figures = compute_gradients(model, batches, weights, at)
    at("the gradient norm")
    result = replace(figures, grad_norm=clip_grad_norm(model, mesh, max_grad_norm))
    at("the optimizer step")
    if result.is_finite:
        before_update()
        optimizer.step()
        after_update(model, result.routing, bias_update)
    at("after the optimizer step")
    return result
