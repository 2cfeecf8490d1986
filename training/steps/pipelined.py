"""Steps of a model that is cut into stages: each rank computes its schedule's actions, and exchanges what they give.

Losses are computed on the last stage, by the code of a model that is not cut. What the routers' losses are made of
travels along with what layers give: the sums of every MoE layer so far, a few values for each expert. So the last stage
has those of all layers, with their gradients' way back.

Shape suffixes: B sequences, S positions, V vocabulary, L MoE layers, l of them up to a stage's end, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...moe.experts.forward import current_forward
from ...moe.experts.model_layers import decoder_layers, moe_layers, moe_shape
from ...moe.experts.replay import used_experts
from ...moe.experts.router_stats import RouterStats, Routing, routing_of
from ...moe.hf_model.images import images_of
from ...moe.util.step_parts import register_step_part
from ...sharding.dataflow import Size
from ...sharding.parallelize.parallelize import forget_forwards
from ...sharding.parallelize.tower import on_some_rank
from ...sharding.parallelize.weight_gradients import weight_gradients
from ...sharding.pipeline.cut import StageForward
from ...sharding.pipeline.pipeline import Messages, Pipeline, Shapes, adding_to_shared, pipeline_of
from ...sharding.pipeline.schedule import (
    Action,
    Event,
    ScheduleName,
    SendReceive,
    communications,
    forward_schedule,
    make_schedule,
)
from ...sharding.stages import Stages
from ...sharding.state import parameters_of
from ..attention.packed_attention import run_model
from ..data.batch import Batch, SplitSequences
from ..loss.balance import LossWeights
from ..loss.head import loss_head
from ..loss.objective import CROSS_ENTROPY, Objective
from .micro_batch import PooledCounts, StepCounts, figure_names, forward_of, loss_sums, no_losses, weigh_losses

register_step_part(__name__, "pipeline")


def pipelined_gradients(
    model: Any,
    batches: Sequence[Batch],
    counts: StepCounts,
    weights: LossWeights,
    at: Callable[[str], object],
    objective: Objective = CROSS_ENTROPY,
) -> tuple[Tensor, Routing]:
    """Forward and backward over the micro-batches of a step, as the pipeline's schedule has it; gradients are added to
    what the parameters hold. All ranks call it together.

    Returns:
        This rank's part of the losses and figures, fp64 (see `step.Gradients`), all 0 where the last stage is
        elsewhere, and of the step's routing.
    """
    pipeline = pipeline_of(model)
    assert pipeline is not None
    events = _training_events(pipeline.schedule, pipeline.stages.pp_size, pipeline.chunks, len(batches))
    if pipeline.schedule == "zero-bubble" and pipeline.later is None:
        pipeline.later = weight_gradients(model, pipeline.mesh)
    run = PipelinedStep(model, batches, at, counts, weights, objective)
    with adding_to_shared(model, pipeline):
        run.run(events[pipeline.groups.index])
    if not run.has_gradients:
        forget_forwards(model)
    return run.losses, run.routing


def pipelined_heads(
    model: Any, batches: Sequence[Batch], by_token: bool, top_k: int = 0, found: list[Tensor] | None = None
) -> list[Tensor]:
    """What the head gives of micro-batches, without gradients (see `LossHead.loss_of`), in their order; nothing where
    the last stage is elsewhere. All ranks call it together.

    Args:
        by_token, top_k, found: see `head_outputs`; of the MoE layers that are here.
    """
    pipeline = pipeline_of(model)
    assert pipeline is not None
    run = _Evaluation(model, batches, by_token, top_k, found is not None)
    run.run(_forward_events(pipeline.stages.pp_size, pipeline.chunks, len(batches))[pipeline.groups.index])
    if found is not None:
        found += [run.used[number] for number in range(len(batches))]
    return [run.gave[number] for number in sorted(run.gave)]


@cache
def _training_events(
    schedule: ScheduleName, pp_size: int, chunks: int, micro_batches: int
) -> tuple[tuple[Event, ...], ...]:
    """What each pp rank does in a step; the same in each one."""
    return communications(make_schedule(schedule, pp_size, chunks, micro_batches))


@cache
def _forward_events(pp_size: int, chunks: int, micro_batches: int) -> tuple[tuple[Event, ...], ...]:
    """The same, of forwards alone."""
    return communications(forward_schedule(pp_size, chunks, micro_batches))


@contextmanager
def through_stages(model: Any, pipeline: Pipeline) -> Iterator[None]:
    """Within it, a call of a model that is cut, on all pp indices together, runs all of its stages, and gives each of
    them the logits of the last position, (B, 1, V) fp32. Without gradients."""
    run_stage = model.forward

    @wraps(run_stage)
    def run_all(*args: Any, **kwargs: Any) -> Any:
        return CausalLMOutputWithPast(logits=_last_logits(model, pipeline, run_stage, kwargs))

    model.forward = run_all
    try:
        yield
    finally:
        model.forward = run_stage


def _last_logits(model: Any, pipeline: Pipeline, run_stage: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """
    Args:
        run_stage: the model's forward.
        arguments: of a call of it, with `input_ids`.
    """
    forward, stages, ranks = current_forward(), pipeline.stages, pipeline.groups.ranks
    tokens_BS = arguments["input_ids"]
    assert forward is not None
    size, device = size_of(tokens_BS, forward.split), tokens_BS.device
    index, messages = pipeline.groups.index, Messages(pipeline.groups.forward, device)
    following, preceding = ranks[(index + 1) % len(ranks)], ranks[index - 1]
    logits_B1V = torch.empty(len(tokens_BS), 1, loss_head(model).out_features, device=device)
    for stage in stages.here:
        received = []
        if stage > 0:
            given = stages.survey.given[stages.layers[stage].start - 1]
            shapes = [(leaf.shape(size), leaf.dtype) for leaf in given.tensors]
            received = messages.begin([], following, shapes, preceding)
            messages.wait()
        forward.stage = StageForward(stages, stage, size, device, received)
        gave = run_stage(**arguments)
        if forward.stage.is_last:
            logits_B1V.copy_(gave.logits[:, -1:])
        else:
            messages.begin(gave, following, [], preceding)
    messages.wait()
    dist.broadcast(logits_B1V, ranks[-1], group=pipeline.groups.forward)
    return logits_B1V


def size_of(tokens_BS: Tensor, split: SplitSequences | None) -> Size:
    """Of a micro-batch, by this rank's tokens of it."""
    number, length = tokens_BS.shape
    if split is None:
        return Size((number, length), (number, length))
    # mixers are in regions of tensor parallelism, if there are any
    group = split.cp_group if split.cp_group.tp is None else split.cp_group.within_tp
    complete = number if group is None else len(group.sequences_of(group.index, number))
    return Size((number, length), (complete, split.positions_BS.shape[1]))


@dataclass(frozen=True)
class _RouterSums:
    """What the routers' losses are made of, of the MoE layers up to a stage's end.

    prob_sum_lE, z_sum_l: fp32, differentiable. counts_lE: int64. See `RouterStats`.
    """

    prob_sum_lE: Tensor
    z_sum_l: Tensor
    counts_lE: Tensor

    def and_those(self, stats: Sequence[RouterStats]) -> "_RouterSums":
        """With the layers that follow."""
        parts = [(s.prob_sum_E, s.z_sum, s.counts_E) for s in stats]
        probs, zs, counts = zip(*parts, strict=True) if parts else ((), (), ())
        return _RouterSums(
            torch.cat([self.prob_sum_lE, *(prob_E.unsqueeze(0) for prob_E in probs)]),
            torch.cat([self.z_sum_l, *(z.unsqueeze(0) for z in zs)]),
            torch.cat([self.counts_lE, *(counts_E.unsqueeze(0) for counts_E in counts)]),
        )

    def by_layer(self) -> list[RouterStats]:
        """As statistics of each layer, of which only what losses need is known."""
        rows = zip(self.counts_lE.unbind(), self.prob_sum_lE.unbind(), self.z_sum_l.unbind(), strict=True)
        return [RouterStats(counts_E, prob_E, z, None, 0) for counts_E, prob_E, z in rows]


@dataclass(frozen=True)
class _Done:
    """A stage's forward that waits for its backward. received: its input. gave: its output or, on the last stage, the
    loss to be differentiated."""

    received: list[Tensor]
    gave: list[Tensor]


class _Run:
    """One rank's part of a schedule, over micro-batches that all pp indices have.

    Args:
        at: is told of each action.
    """

    def __init__(self, model: Any, batches: Sequence[Batch], at: Callable[[str], object]):
        pipeline = pipeline_of(model)
        assert pipeline is not None
        self.model, self.batches, self.at = model, batches, at
        self.pipeline, self.stages = pipeline, pipeline.stages
        self.device = batches[0].tokens_BS.device
        groups = pipeline.groups
        self.messages = {
            "forward": Messages(groups.forward, self.device),
            "backward": Messages(groups.backward, self.device),
        }
        self.received: dict[Action, list[Tensor]] = {}
        self.outputs: dict[Action, list[Tensor]] = {}

    def run(self, events: Sequence[Event]) -> None:
        """Compute this rank's actions, and exchange what they need and give."""
        for event in events:
            if isinstance(event, SendReceive):
                self.exchange(event)
                continue
            action = event.action
            if action in self.received:
                self.at(f"{self._told(action)}, waiting for its input")
                self.messages[action.kind].wait()
            self.at(self._told(action))
            self.compute(action)
        for messages in self.messages.values():
            messages.wait()

    def compute(self, action: Action) -> None:
        """Compute an action: its input is in `received`, its output is left in `outputs`."""
        raise NotImplementedError

    def shapes(self, action: Action) -> Shapes:
        """Shapes and dtypes of an action's input."""
        raise NotImplementedError

    def _told(self, action: Action) -> str:
        return (
            f"stage {action.stage + 1} of {self.stages.number}, {action.kind} of micro-batch {action.micro_batch + 1}"
        )

    def _told_of(self, exchange: SendReceive) -> str:
        if exchange.send is not None:
            return f"{self._told(exchange.send)}, sending its output"
        assert exchange.receive is not None
        return f"{self._told(exchange.receive)}, waiting for its input"

    def exchange(self, exchange: SendReceive) -> None:
        """Begin to send an action's output, and to receive another one's input."""
        ranks, index = self.pipeline.groups.ranks, self.pipeline.groups.index
        step = 1 if exchange.direction == "forward" else -1
        following, preceding = ranks[(index + step) % len(ranks)], ranks[(index - step) % len(ranks)]
        sent = [] if exchange.send is None else self.outputs.pop(exchange.send)
        shapes = [] if exchange.receive is None else self.shapes(exchange.receive)
        # which first waits for the exchange before it
        self.at(self._told_of(exchange))
        tensors = self.messages[exchange.direction].begin(sent, following, shapes, preceding)
        if exchange.receive is not None:
            self.received[exchange.receive] = tensors

    def size(self, micro_batch: int) -> Size:
        batch = self.batches[micro_batch]
        return size_of(batch.tokens_BS, batch.split)

    def given_shapes(self, action: Action) -> Shapes:
        """Of what the layer before a stage gives."""
        given = self.stages.survey.given[self.stages.layers[action.stage].start - 1]
        return [(leaf.shape(self.size(action.micro_batch)), leaf.dtype) for leaf in given.tensors]


class _Evaluation(_Run):
    """Forwards without backwards."""

    def __init__(self, model: Any, batches: Sequence[Batch], by_token: bool, top_k: int, records_choices: bool):
        super().__init__(model, batches, lambda doing: None)
        self.by_token, self.top_k, self.records_choices = by_token, top_k, records_choices
        self.used: dict[int, Tensor] = {}
        sees_images = images_of(model) is not None
        self.has_images_M = on_some_rank([batch.images is not None for batch in batches]) if sees_images else None
        self.gave: dict[int, Tensor] = {}

    def shapes(self, action: Action) -> Shapes:
        return self.given_shapes(action)

    def compute(self, action: Action) -> None:
        batch, received = self.batches[action.micro_batch], self.received.pop(action, [])
        has_images = None if self.has_images_M is None else self.has_images_M[action.micro_batch]
        forward = forward_of(
            batch,
            by_token=self.by_token,
            top_k=self.top_k,
            has_images=has_images,
            records_choices=self.records_choices,
        )
        forward.stage = StageForward(
            self.stages, action.stage, self.size(action.micro_batch), self.device, received, action.micro_batch
        )
        gave = run_model(self.model, batch, forward)
        if self.records_choices:
            routes_TLK = used_experts(self.model, forward)
            # of a rank's several stages, each has some of the layers
            self.used[action.micro_batch] = torch.maximum(self.used.get(action.micro_batch, routes_TLK), routes_TLK)
        if forward.stage.is_last:
            assert forward.targets is not None
            self.gave[action.micro_batch] = loss_head(self.model).loss_of(gave.logits, forward.targets)
        else:
            self.outputs[action] = gave


class PipelinedStep(_Run):
    """One rank's forwards and backwards.

    Attributes:
        losses: fp64 (see `LossValues.of`); 0 where the last stage is elsewhere.
        has_gradients: whether there was a backward: none where nothing is trained up to the end of a stage.
        routing: of the forwards here, with 0 for layers of other stages.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        at: Callable[[str], object],
        counts: StepCounts,
        weights: LossWeights,
        objective: Objective = CROSS_ENTROPY,
    ):
        super().__init__(model, batches, at)
        self.counts, self.weights, self.objective = counts, weights, objective
        self.losses = no_losses(figure_names(weights, objective), self.device)
        self.done: dict[tuple[int, int], _Done] = {}
        self.has_gradients = False
        self.num_experts = moe_shape(model).num_experts
        self.has_router_losses = weights.of_routers
        # of each stage, its MoE layers by their numbers in the model
        numbers = {experts: number for number, experts in enumerate(moe_layers(model))}
        self.num_moe_layers, layers = len(numbers), decoder_layers(model)
        self.experts = [[e for layer in part for e in moe_layers(layers[layer])] for part in self.stages.layers]
        # one after the other: a list of them would have to be copied to the device, for which the host waits
        firsts = [numbers[part[0]] if part else 0 for part in self.experts]
        self.moe_numbers = [slice(n, n + len(part)) for n, part in zip(firsts, self.experts, strict=True)]
        self.is_trained_before = _trained_before(model, self.stages)
        self.routing = self._nothing()
        if self.pipeline.later is not None:
            # of a step that was given up
            self.pipeline.later.clear()

    def shapes(self, action: Action) -> Shapes:
        if action.kind == "forward":
            return [*self.given_shapes(action), *self._router_shapes(action.stage - 1)]
        # of what this stage gave the next one, its gradients
        after = Action("forward", action.stage + 1, action.micro_batch)
        shapes = [*self.given_shapes(after), *self._router_shapes(action.stage)]
        return (
            [part for part in shapes if part[1].is_floating_point] if self.is_trained_before[action.stage + 1] else []
        )

    def _router_shapes(self, last_stage: int) -> Shapes:
        """Of the sums of the MoE layers up to a stage's end."""
        if not self.has_router_losses:
            return []
        layers = sum(len(part) for part in self.experts[: last_stage + 1])
        sizes = (layers, self.num_experts)
        return [(sizes, torch.float32), (sizes[:1], torch.float32), (sizes, torch.int64)]

    def compute(self, action: Action) -> None:
        later, number = self.pipeline.later, (action.stage, action.micro_batch)
        if action.kind == "forward":
            self._forward(action)
        elif action.kind == "weights":
            assert later is not None
            later.compute(number)
        else:
            with nullcontext() if later is None else later.collecting(number):
                self._backward(action)

    def _forward(self, action: Action) -> None:
        batch, stage = self.batches[action.micro_batch], action.stage
        received = self.received.pop(action, [])
        for tensor in received:
            tensor.requires_grad_(tensor.is_floating_point() and self.is_trained_before[stage])
        num_given = len(received) - 3 * (self.has_router_losses and stage > 0)
        over = self.counts.over(action.micro_batch)
        forward = forward_of(
            batch, self.has_router_losses, self.objective.by_token, drafts=True, has_images=over.has_images
        )
        forward.weight_gradients = self.pipeline.later
        forward.stage = StageForward(
            self.stages,
            stage,
            self.size(action.micro_batch),
            self.device,
            received[:num_given],
            action.micro_batch,
        )
        gave = run_model(self.model, batch, forward)
        forward.stage.release()
        stats = [forward.stats.pop(experts) for experts in self.experts[stage]]
        if stats:
            self.routing += self._routing(stats, self.moe_numbers[stage])
        if self.has_router_losses:
            before = received[num_given:] or self._no_sums()
            sums = _RouterSums(*before).and_those(stats)
        if not forward.stage.is_last:
            if self.has_router_losses:
                gave = [*gave, sums.prob_sum_lE, sums.z_sum_l, sums.counts_lE]
            self.outputs[action] = [tensor.detach() for tensor in gave]
            self.done[stage, action.micro_batch] = _Done(received, gave)
            return
        assert forward.targets is not None
        of_layers = sums.by_layer() if self.has_router_losses else []
        counts = PooledCounts(of_layers, self.weights, self.pipeline.mesh.stage_group)
        loss = loss_sums(self.model, gave.logits, batch, forward.targets, self.objective)
        found = weigh_losses(loss, of_layers, self.routing, self.weights, over, counts)
        self.losses += found.values()
        self.done[stage, action.micro_batch] = _Done(received, [found.total(self.weights)])

    def _no_sums(self) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._router_shapes(-1)]

    def _routing(self, stats: Sequence[RouterStats], numbers: slice) -> Routing:
        """Of all layers, 0 for those of other stages."""
        here, whole = routing_of(stats), self._nothing()
        whole.counts_LE[numbers] = here.counts_LE
        whole.entropy_L[numbers] = here.entropy_L
        whole.rows_computed_L[numbers] = here.rows_computed_L
        return replace(whole, replayed_2=here.replayed_2)

    def _nothing(self) -> Routing:
        layers = self.num_moe_layers
        return Routing(
            torch.zeros(layers, self.num_experts, dtype=torch.int64, device=self.device),
            torch.zeros(layers, dtype=torch.float64, device=self.device),
            torch.zeros(layers, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64, device=self.device),
        )

    def _backward(self, action: Action) -> None:
        done = self.done.pop((action.stage, action.micro_batch))
        gradients: Sequence[Tensor | None] = self.received.pop(action, [])
        outputs = [tensor for tensor in done.gave if tensor.is_floating_point()]
        if action.stage == self.stages.number - 1:
            gradients = [None]
        pairs = [(x, g) for x, g in zip(outputs, gradients, strict=False) if x.requires_grad]
        if pairs:
            self.has_gradients = True
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        if action.stage > 0:
            needing = [tensor for tensor in done.received if tensor.requires_grad]
            self.outputs[action] = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in needing
            ]


def _trained_before(model: Any, stages: Stages) -> list[bool]:
    """Of each stage, whether anything of the stages before it is trained: if not, it sends no gradients back."""
    trained = [stages.first_stage(name) for name, part in parameters_of(model).items() if part.trainable]
    return [min(trained, default=stage) < stage for stage in range(stages.number)]
