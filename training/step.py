"""One training step: loss, gradients, clipping, update. The same result however ranks are arranged.

Every loss is a local sum over a global count, so that gradients are plain sums over ranks and micro-steps.

Shape suffixes: L MoE layers, E experts, G groups of layers that are balanced together: 1, or L.
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

from moe import load_balancing_loss, outdate_working_weights, router_z_loss, seen_pairs, take_stats
from sharding import Mesh, clip_grad_norm
from training.attention import attention_arguments, told_whether_packed
from training.balance import BiasUpdate, LossWeights
from training.data import Batch
from training.head import loss_head
from training.routing import Routing, routing_of
from training.shared_attention import tell_rows


@dataclass(frozen=True)
class StepResult:
    """Figures of one step, over all ranks but for `routing`, which is this rank's part.

    loss: mean cross-entropy of the target tokens. balance_loss, z_loss: unweighted. tokens: without padding.
    pairs: of tokens that attend to one another, for each entry of the model's `attention` (see `moe.seen_pairs`).
    """

    loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    tokens: int
    targets: int
    pairs: tuple[int, ...]
    routing: Routing

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradient norm are: if not, there was no update."""
        return math.isfinite(self.loss + self.balance_loss + self.z_loss + self.grad_norm)


def compute_gradients(model: Any, batches: Sequence[Batch], weights: LossWeights) -> StepResult:
    """Forward and backward over the micro-batches of one step; gradients are added to what the parameters hold.

    Args:
        model: sharded, with a `LossHead`.
        batches: this rank's, equally many on every rank, on the model's device.
        weights: of the auxiliary losses. The balancing loss is taken over one forward of all ranks, as HF does,
            and averaged over the micro-steps; the z-loss over all tokens of the step.

    Returns:
        The step's figures, with a grad_norm of 0.
    """
    device = batches[0].tokens_BS.device
    figures = [(b.num_targets, b.num_tokens, *seen_pairs(model.attention, b.spans)) for b in batches]
    counted = torch.tensor(figures, device=device)
    dist.all_reduce(counted)
    num_targets, num_tokens, *pairs = (max(n, 1) for n in counted.sum(dim=0).tolist())

    losses = torch.zeros(3, dtype=torch.float64, device=device)
    routings = []
    for batch, (_, tokens_in_forward, *_) in zip(batches, counted, strict=True):
        cross_entropy = token_loss_sum(model, batch) / num_targets
        stats = take_stats(model)
        routings.append(routing_of(stats))
        balance = z = torch.zeros((), device=device)
        if weights.balance > 0:
            counts_LE = routings[-1].counts_LE
            counts_GE = counts_LE.clone() if weights.balance_per_layer else counts_LE.sum(dim=0, keepdim=True)
            dist.all_reduce(counts_GE)
            balance = load_balancing_loss(stats, counts_GE, tokens_in_forward.clamp(min=1)) / len(batches)
        if weights.z > 0:
            z = router_z_loss(stats, num_tokens)
        # a loss that is not taken would keep its graph, and with it the inputs of checkpointed layers, beyond backward
        del stats
        (cross_entropy + weights.balance * balance + weights.z * z).backward()
        losses += torch.stack([cross_entropy, balance, z]).detach()

    dist.all_reduce(losses)
    loss, balance_loss, z_loss = losses.tolist()
    routing = reduce(add, routings)
    return StepResult(loss, balance_loss, z_loss, 0.0, num_tokens, num_targets, tuple(pairs), routing)


def token_loss_sum(model: Any, batch: Batch) -> Tensor:
    """Sum of the target tokens' cross-entropies after a forward of a model with a `LossHead`, an fp32 scalar."""
    with told_whether_packed(model, batch):
        # masks are made before the model is called
        tell_rows(batch.shared)
        logits: Tensor = model(
            **attention_arguments(model, batch),
            **({} if batch.shared is None else {"shared": batch.shared}),
            input_ids=batch.tokens_BS,
            position_ids=batch.positions_BS,
            is_token_BS=batch.is_token_BS,
            targets_BS=batch.targets_BS,
            target_index_N=batch.target_index_N,
            use_cache=False,
        ).logits
    return loss_head(model).loss_of(logits)


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
    figures = compute_gradients(model, batches, weights)
    at("the gradient norm")
    result = replace(figures, grad_norm=clip_grad_norm(model, mesh, max_grad_norm))
    at("the optimizer step")
    if result.is_finite:
        before_update()
        optimizer.step()
        outdate_working_weights(model)
        if bias_update is not None:
            bias_update.step(result.routing)
    at("after the optimizer step")
    return result
