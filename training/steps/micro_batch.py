"""The losses of one micro-batch: its forward, and what its parts are divided by.

Every loss is a local sum over a global count, so that gradients are plain sums over ranks and micro-steps.

Shape suffixes: M micro-batches of a step, L MoE layers, E experts, G groups of layers that are balanced together: 1, or
L.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...moe.experts.forward import Forward, Targets
from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import moe_layers
from ...moe.experts.router_stats import RouterStats, Routing, load_balancing_loss, router_z_loss, routing_of
from ...moe.hf_model.counts import seen_pairs
from ...moe.hf_model.images import images_of
from ...moe.util.gpu import computing_values
from ...moe.util.step_parts import register_step_part
from ...sharding.pipeline.pipeline import pipeline_of, stage_group
from ..attention.packed_attention import run_model
from ..data.batch import CANDIDATES, WEIGHT, Batch
from ..loss.balance import LossWeights
from ..loss.head import loss_head
from ..loss.objective import CROSS_ENTROPY, Objective

register_step_part(__name__, "the step")

V = TypeVar("V")

MTP_LOSS = "mtp_loss"
"""Name of the figure that is the loss of multi-token prediction."""


@dataclass(frozen=True)
class Denominators:
    """What one micro-batch's losses are divided by: figures over all ranks, none of them 0.

    targets: of the step, or what the objective counts. tokens_in_forward: of this micro-batch. tokens: of the
    step. forwards: micro-batches of the step. drafts: targets of multi-token prediction in the step. has_images:
    whether any rank's part of this micro-batch has images; None: it is not known.
    """

    targets: float
    tokens_in_forward: int
    tokens: int
    forwards: int
    drafts: int = 1
    has_images: bool | None = None


@dataclass(frozen=True)
class StepCounts:
    """What the micro-batches of one step hold, over all ranks: what their losses are divided by.

    targets, tokens: of all micro-batches; targets may be 0. pairs: see `StepResult`. tokens_M: of each micro-batch.
    counted: what the loss is divided by: the targets, or what the objective counts; may be 0. drafts: targets of
    multi-token prediction. of_images: how many images, patches, and pairs of patches of one image; empty where the
    model takes none. has_images_M: whether there are any in each micro-batch.
    """

    targets: int
    tokens: int
    pairs: tuple[int, ...]
    tokens_M: tuple[int, ...]
    counted: float
    drafts: int = 0
    of_images: tuple[int, ...] = ()
    has_images_M: tuple[bool, ...] = ()

    def over(self, number: int) -> Denominators:
        """What the losses of a micro-batch, counted from 0, are divided by."""
        tokens = self.tokens_M[number]
        has_images = self.has_images_M[number] if self.has_images_M else None
        return Denominators(
            self.counted or 1, max(tokens, 1), self.tokens, len(self.tokens_M), max(self.drafts, 1), has_images
        )


def count_step(model: Any, batches: Sequence[Batch], objective: Objective = CROSS_ENTROPY) -> StepCounts:
    """The counts of a step's micro-batches, summed over ranks in one all-reduce. All ranks call it together.

    They are known on the host and summed between hosts: a GPU that is still at work on the step before is not waited
    for.

    Args:
        batches: this rank's, equally many on every rank.
        objective: what is minimised.
    """
    attention, seen = facts_of(model).attention, _images if images_of(model) is not None else lambda batch: ()
    figures = [(b.num_targets, b.num_tokens, *seen_pairs(attention, b.spans), *seen(b), *_drafts(b)) for b in batches]
    with computing_values():
        counted = torch.tensor(figures)
        dist.all_reduce(counted)
        # every pp index has all micro-batches
        by_batch = (counted // _pp_size(model)).tolist()
    (targets, *others), tokens_M = map(sum, zip(*by_batch, strict=True)), tuple(batch[1] for batch in by_batch)
    drafts = others.pop() if _drafts(batches[0]) else 0
    behind = len(others)
    of_images = tuple(others.pop() for _ in seen(batches[0]))[::-1]
    has_images_M = tuple(any(batch[1 + len(others) : 1 + behind]) for batch in by_batch)
    tokens, *pairs = (max(n, 1) for n in others)
    divisor = targets if objective.count is None else _counted(model, batches, objective)
    return StepCounts(targets, tokens, tuple(pairs), tokens_M, divisor, drafts, of_images, has_images_M)


def _images(batch: Batch) -> tuple[int, ...]:
    """How many images, patches and pairs of them a batch has: of those that ranks have in common, on the first one."""
    is_counted = batch.images is not None and (batch.split is None or batch.split.cp_group.index == 0)
    return batch.images.counts if batch.images is not None and is_counted else (0, 0, 0)


def _drafts(batch: Batch) -> tuple[int, ...]:
    """How many targets of multi-token prediction a batch has on this rank; nothing where there is none."""
    return () if batch.ahead is None else (len(batch.ahead.targets.index_N),)


def _counted(model: Any, batches: Sequence[Batch], objective: Objective) -> float:
    """What an objective counts in a step, over all ranks."""
    with computing_values():
        counted = torch.tensor(objective.counted(batches), dtype=torch.float64)
        dist.all_reduce(counted)
        return float(counted) / _pp_size(model)


def _pp_size(model: Any) -> int:
    pipeline = pipeline_of(model)
    return 1 if pipeline is None else pipeline.stages.pp_size


@dataclass(frozen=True)
class MicroLosses:
    """This rank's part of one micro-batch's losses, unweighted fp32 scalars with their graph, and of its routing.

    figures: what the objective tells beside it, without a graph. mtp: the loss of multi-token prediction.
    """

    cross_entropy: Tensor
    balance: Tensor
    z: Tensor
    routing: Routing
    figures: tuple[Tensor, ...] = ()
    mtp: Tensor | None = None

    def total(self, weights: LossWeights) -> Tensor:
        """What is to be differentiated."""
        total = self.cross_entropy + weights.balance * self.balance + weights.z * self.z
        return total if self.mtp is None else total + weights.mtp * self.mtp

    def values(self) -> Tensor:
        """As `LossValues.of` takes them, without graph."""
        figures = self.figures if self.mtp is None else (self.mtp,)
        return torch.stack([self.cross_entropy, self.balance, self.z, *figures]).detach()


class LossValues(NamedTuple, Generic[V]):
    """A step's losses, or a rank's or micro-batch's part of them, which one tensor has: its scalars, or numbers.

    figures: see `figure_names`.
    """

    loss: V
    balance_loss: V
    z_loss: V
    figures: tuple[V, ...]

    @classmethod
    def of(cls, values: Iterable[V]) -> "LossValues[V]":
        loss, balance_loss, z_loss, *figures = values
        return cls(loss, balance_loss, z_loss, tuple(figures))


def no_losses(names: Sequence[str], device: torch.device) -> Tensor:
    """What those of micro-batches are added to, fp64: as `LossValues.of` takes them, with figures of these names."""
    return torch.zeros(len(LossValues._fields) - 1 + len(names), dtype=torch.float64, device=device)


def figure_names(weights: LossWeights, objective: Objective) -> tuple[str, ...]:
    """Of what a step tells beside its losses."""
    if weights.mtp > 0:
        assert not objective.by_token, "--train-mtp goes with the cross-entropy alone"
        return (MTP_LOSS,)
    return objective.figures


def losses_of(
    model: Any, batch: Batch, weights: LossWeights, over: Denominators, objective: Objective = CROSS_ENTROPY
) -> MicroLosses:
    """The losses of a micro-batch after its forward. Its backward may come at any time, also after those of later
    micro-batches; all ranks call both in one order."""
    forward = forward_of(batch, weights.of_routers, objective.by_token, drafts=True, has_images=over.has_images)
    assert forward.targets is not None
    output = run_model(model, batch, forward)
    stats = forward.take_stats(moe_layers(model))
    # under way while the loss is computed
    counts = PooledCounts(stats, weights, stage_group(model))
    sums = loss_sums(model, output.logits, batch, forward.targets, objective)
    return weigh_losses(sums, stats, routing_of(stats), weights, over, counts)


@dataclass(frozen=True)
class LossSums:
    """Losses before they are divided: the loss; what else the objective tells; that of multi-token prediction."""

    loss: Tensor
    figures: tuple[Tensor, ...] = ()
    mtp: Tensor | None = None


def loss_sums(model: Any, logits: Tensor, batch: Batch, targets: Targets, objective: Objective) -> LossSums:
    """Of what a forward of a model with a `LossHead` has given as logits, with these targets."""
    gave = loss_head(model).loss_of(logits, targets)
    if batch.ahead is not None:
        return LossSums(gave[0], mtp=gave[1])
    return LossSums(*objective.sums(gave, batch))


class PooledCounts:
    """What the balancing loss counts, summed over ranks: the sum begins when this is made, which all ranks do together.

    Args:
        stats: of all MoE layers.
        group: the ranks that share the micro-batch's tokens; None: all.
    """

    def __init__(self, stats: Sequence[RouterStats], weights: LossWeights, group: dist.ProcessGroup | None):
        self._work: dist.Work | None = None
        if weights.balance > 0:
            counts_LE = torch.stack([s.counts_E for s in stats])
            self._counts_GE = counts_LE if weights.balance_per_layer else counts_LE.sum(dim=0, keepdim=True)
            self._work = dist.all_reduce(self._counts_GE, group=group, async_op=True)

    def wait(self) -> Tensor:
        """(G, E) int64, of all ranks."""
        assert self._work is not None
        self._work.wait()
        return self._counts_GE


def weigh_losses(
    sums: LossSums,
    stats: Sequence[RouterStats],
    routing: Routing,
    weights: LossWeights,
    over: Denominators,
    counts: PooledCounts,
) -> MicroLosses:
    """The losses of a micro-batch, of what its forward has given on this rank.

    Args:
        sums: see `loss_sums`.
        stats: of all MoE layers. counts: of the same.
        routing: what is told of it.
    """
    cross_entropy = sums.loss / over.targets
    figures = tuple(figure / over.targets for figure in sums.figures)
    mtp = None if sums.mtp is None else sums.mtp / over.drafts
    # a loss that nobody asked for would keep its graph, and with it the inputs of checkpointed layers, beyond backward
    balance = z = torch.zeros((), device=cross_entropy.device)
    if weights.balance > 0:
        balance = load_balancing_loss(stats, counts.wait(), over.tokens_in_forward) / over.forwards
    if weights.z > 0:
        z = router_z_loss(stats, over.tokens)
    return MicroLosses(cross_entropy, balance, z, routing, figures, mtp)


def forward_of(
    batch: Batch,
    has_router_losses: bool = True,
    by_token: bool = False,
    top_k: int = 0,
    drafts: bool = False,
    has_images: bool | None = None,
    records_choices: bool = False,
) -> Forward:
    """What a model with a `LossHead` is told of a batch beside its arguments.

    Args:
        by_token: whether the log-probability of each target is asked for, in place of their loss with the batch's
            weights, and that of the candidates that the batch has.
        top_k: how many of the most likely tokens are asked for, in place of that; 0: none.
        drafts: whether a layer for multi-token prediction is run, if there is one.
        has_images: whether any rank's part of the micro-batch has images; None: it is not known.
        records_choices: see `Forward`.
    """
    inputs: Mapping[str, Tensor] = {} if batch.for_loss is None else batch.for_loss.inputs
    candidates_NK, weights_N = (inputs.get(CANDIDATES), None) if by_token else (None, inputs.get(WEIGHT))
    return Forward(
        batch.is_token_BS,
        Targets(batch.targets_BS, batch.target_index_N, by_token, candidates_NK, top_k, weights_N),
        ahead=batch.ahead if drafts else None,
        split=batch.split,
        segments=batch.segments,
        has_router_losses=has_router_losses,
        images=batch.images,
        runs_tower_idly=None if has_images is None else has_images and batch.images is None,
        routed_experts_BSLK=batch.routed_experts_BSLK,
        records_choices=records_choices,
    )


def token_loss_sum(model: Any, batch: Batch, forward: Forward | None = None) -> Tensor:
    """Sum of the target tokens' cross-entropies after a forward of a model with a `LossHead`, an fp32 scalar.

    Args:
        forward: from `forward_of`, with which the routing's statistics are left; None: nobody asks for them. With
            `by_token` the log-probability of each target is given, (N,), in place of the sum.
    """
    forward = forward or forward_of(batch)
    assert forward.targets is not None
    return loss_head(model).loss_of(run_model(model, batch, forward).logits, forward.targets)
