"""The context of one micro-batch's forward: its inputs beside the model's arguments, and its results beside the output.

A `Forward` is current while its model runs, so that routers, experts, head and attention find it without involving the
modules between. Recomputation in backward finds it by `Forward.again`, which activation checkpointing takes when a
layer first runs and makes current when it is recomputed. So no state of a micro-batch is on a module, and any number of
them may wait for their backwards, in any order.

Shape suffixes: B sequences, S positions, T = B·S tokens, N positions with a target, K further tokens at each of them,
or experts of each token, L MoE layers, D model width, E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..kernels.weight_gradients import WeightGradients
from ..torch_private import _current_autograd_node
from ..util.change_order import begin_change
from ..util.errors import ExpertMeshError
from .router_stats import RouterStats


@dataclass(frozen=True)
class Targets:
    """The targets of a forward.

    targets_BS: int64, the next token; undefined where there is no loss. index_N: int64, the flat positions with a loss.
    by_token: whether the head gives the log-probability of each target, in place of the sum of their cross-entropies.
    candidates_NK: int64, further tokens whose log-probabilities it then gives behind the target's; None: of none.
    top_k: whether, and of how many, it gives the most likely tokens in place of all that.
    weights_N: fp32, of each target in the sum of their cross-entropies; None: each has 1.
    """

    targets_BS: Tensor
    index_N: Tensor
    by_token: bool = False
    candidates_NK: Tensor | None = None
    top_k: int = 0
    weights_N: Tensor | None = None


@dataclass(frozen=True)
class Ahead:
    """What a layer for multi-token prediction is told of a batch (see `training.loss.mtp`).

    tokens_BS: int64, the next token of the same sample; 0 where there is none. targets: the one after that, where it is
        to be learned. num_targets: of each rank that shares the sequences, where they are split.
    """

    tokens_BS: Tensor
    targets: Targets
    num_targets: tuple[int, ...] = ()


@dataclass(eq=False)
class Forward:
    """Current within `with forward:`, for one call of a model or of some of its layers.

    A call of a model for which none is current gets one of its own, which is discarded afterwards.

    Attributes:
        is_token_BS: bool, False for padding, which is not routed; None where there is none. If it is None, a model that
            is called with a 2-D `attention_mask` takes it from there.
        targets: the targets for the head's loss; None: the head returns logits.
        ahead: for a layer for multi-token prediction; None: it is not run. drafts_BSD: what it gave, for the head.
        split: the sequences of which each rank of a context-parallel group holds a part (`training.data.
            SplitSequences`); None: they are complete.
        segments: lengths of the samples, and of the padding behind them, of complete sequences, one sequence after the
            other; None: each is one sample.
        layout: what modules that run sample by sample need to know of segments, once one has run
            (`training.attention.by_sample.SampleLayout`); if the sequences are split, of those that are complete on
            this rank.
        within_tp: the `Forward` for what is in regions of tensor parallelism, once one has run. gathered: what is the
            same in all of them, such as rotary positions, by its number; also for recomputation.
        stage: the part of a pipeline that is run (`sharding.pipeline.cut.StageForward`); None: the complete model.
        weight_gradients: where backward may leave the gradients of experts' weights for later; None: it computes them.
        has_router_losses: whether losses are made of the routing's statistics. Where none are, these are figures for
            the log, which have no graph, and which no recomputation makes again.
        is_again: whether a layer is being recomputed for its backward. Its statistics are those of the first run:
            recorded once more, they would keep alive all that was recomputed.
        logits_TE: the logits of each router that has run and whose experts have not, by these.
        ahead_TD: for each block, tokens and results of what was computed during the all-to-alls (see
            `Beside`).
        stats: routing statistics by layer, until `take_stats` takes them. They hold the graph of the losses made of
            them.
        images: the images of the micro-batch (`training.data.images.Images`); None: it has none.
        runs_tower_idly: whether a tower with FSDP units of its own is run though there are no images here, as other
            ranks have some; None: all ranks agree on it when they call the model.
        has_run: whether a model was called. shape_BS, device: of its sequences.
        routed_experts_BSLK: int16, the experts to be used in place of those that routers choose, below 0 where they are
            to choose; None: they always do (see `replay`).
        records_choices: whether the experts that were used are left in `chosen_TK`, by MoE layer.
        replayed_2: int64, of each MoE layer, replayed choices that its router would have made otherwise, and all
            replayed ones, until its statistics take them.
    """

    is_token_BS: Tensor | None = None
    targets: Targets | None = None
    ahead: Ahead | None = None
    drafts_BSD: Tensor | None = None
    split: Any = None
    segments: tuple[int, ...] | None = None
    layout: Any = None
    within_tp: "Forward | None" = None
    gathered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stage: Any = None
    weight_gradients: WeightGradients | None = None
    has_router_losses: bool = True
    is_again: bool = False
    logits_TE: dict[nn.Module, Tensor] = field(default_factory=dict)
    ahead_TD: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    stats: dict[nn.Module, RouterStats] = field(default_factory=dict)
    images: Any = None
    runs_tower_idly: bool | None = None
    has_run: bool = False
    shape_BS: torch.Size | None = None
    device: torch.device | None = None
    routed_experts_BSLK: Tensor | None = None
    records_choices: bool = False
    chosen_TK: dict[nn.Module, Tensor] = field(default_factory=dict)
    replayed_2: dict[nn.Module, Tensor] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._token: Token[Forward | None] = _CURRENT.set(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _CURRENT.reset(self._token)
        # which holds the one that was current before, and that may hold this one: a cycle
        del self._token
        # after an exception, with which recomputation ends once it has all it needs, what was handed over is not needed
        self.logits_TE.clear()
        self.ahead_TD.clear()

    def again(self) -> "Forward":
        """The `Forward` for a recomputation of parts of it: with the same inputs, and without results of the first run,
        whose graph will hold it. May be current more than once, one time after the other."""
        return Forward(
            self.is_token_BS,
            ahead=self.ahead,
            split=self.split,
            segments=self.segments,
            layout=self.layout,
            gathered=self.gathered,
            stage=self.stage,
            weight_gradients=self.weight_gradients,
            has_router_losses=self.has_router_losses,
            is_again=True,
            routed_experts_BSLK=self.routed_experts_BSLK,
        )

    def take_stats(self, layers: Sequence[nn.Module]) -> list[RouterStats]:
        """The routing statistics that a forward of a model has left here, one entry for each of its MoE layers, first
        to last; they are removed."""
        assert all(layer in self.stats for layer in layers), "take_stats before the forward, or twice"
        return [self.stats.pop(layer) for layer in layers]

    def of_split(self, split: Any) -> "Forward":
        """The `Forward` for a part of it in which other ranks share the sequences."""
        other = self.again()
        other.is_token_BS, other.split, other.layout, other.is_again = None, split, None, self.is_again
        other.routed_experts_BSLK = None
        return other

    def of_complete_sequences(self, segments: tuple[int, ...] | None) -> "Forward":
        """The `Forward` for a part of it that is given complete sequences, though they are split elsewhere.

        Args:
            segments: of these sequences.
        """
        complete = self.again()
        complete.is_token_BS, complete.split, complete.is_again = None, None, self.is_again
        complete.segments, complete.routed_experts_BSLK = segments, None
        return complete


_CURRENT: ContextVar[Forward | None] = ContextVar("_CURRENT", default=None)


def current_forward() -> Forward | None:
    """The forward that is being run; None where a part of a model is called by itself."""
    return _CURRENT.get()


def forward_of_experts() -> Forward:
    """The forward that is being run, or for experts that are called by themselves a new one, without padding.

    Raises:
        ExpertMeshError: they are recomputed in backward by a checkpointing that does not say for which forward.
    """
    forward = current_forward()
    if forward is None and _current_autograd_node() is not None:
        raise ExpertMeshError(
            "experts are recomputed in backward for an unknown forward: their layers are checkpointed without "
            "--gradient-checkpointing (sharding.parallelize.recompute.checkpoint_layers)"
        )
    return Forward() if forward is None else forward


def give_forwards(model: nn.Module) -> None:
    """Have each call of a model take from its own arguments which positions are tokens, and have a `Forward` of its own
    where none is current, in place."""
    begin_change(model, "experts")
    model.register_forward_pre_hook(_before_model, with_kwargs=True)
    model.register_forward_hook(_after_model, always_call=True)


@dataclass(eq=False)
class _OwnForward(Forward):
    """The `Forward` of a call of a model for which none was current: it ends with the call. Within it another model may
    be called, such as a teacher, which gets one of its own."""

    model: nn.Module | None = None


@dataclass(frozen=True)
class _Kept:
    """Where calls of a model leave forwards of their own (see `keeping_forwards`)."""

    model: nn.Module
    has_router_losses: bool
    forwards: list[Forward] = field(default_factory=list)


_KEPT: ContextVar[_Kept | None] = ContextVar("_KEPT", default=None)


@contextmanager
def keeping_forwards(model: nn.Module, has_router_losses: bool) -> Iterator[list[Forward]]:
    """Within it, each call of a model with gradients, for which no `Forward` is current, leaves its own in a list.

    Args:
        has_router_losses: see `Forward`.
    """
    kept = _Kept(model, has_router_losses)
    token = _KEPT.set(kept)
    try:
        yield kept.forwards
    finally:
        _KEPT.reset(token)


def _before_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Padding is marked by a 2-D `attention_mask`, as with any HF model, or by `Forward.is_token_BS` alone. The latter
    suffices for right-padded training batches, where causal attention hides the padding by itself and a mask would only
    cost memory."""
    forward = current_forward()
    if forward is None or (isinstance(forward, _OwnForward) and forward.model is not model):
        kept = _KEPT.get()
        forward = _OwnForward(has_router_losses=kept is None or kept.has_router_losses, model=model).__enter__()
        if kept is not None and kept.model is model and torch.is_grad_enabled():
            kept.forwards.append(forward)
    assert not forward.has_run, "a Forward is one forward of a model: make a new one for the next"
    forward.has_run = True
    attention_mask = kwargs.get("attention_mask")
    candidates = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    tokens = next((t for t in candidates if isinstance(t, Tensor)), None)
    if tokens is None:
        return  # trl has a loss run in the forward's place, of which the model is the first argument
    forward.shape_BS, forward.device = tokens.shape[:2], tokens.device
    if forward.is_token_BS is None and isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        # with a KV cache the mask also covers the tokens of earlier calls
        forward.is_token_BS = attention_mask[:, -tokens.shape[1] :].bool()


def _after_model(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    forward = current_forward()
    if isinstance(forward, _OwnForward) and forward.model is model:
        forward.__exit__()


class Beside:
    """A module, such as shared experts, that a family's block calls on the experts' tokens after the experts: it is run
    between the sending of the rows and their arrival, and its result is returned when the block calls it. No
    `nn.Module`: the module stays where it is, under its own name."""

    def __init__(self, module: nn.Module):
        self.module: Any = module
        self._forward = module.forward
        module.forward = self._take

    def compute(self, x_TD: Tensor, forward: Forward) -> None:
        """Run the module now, on the tokens that the experts got."""
        forward.ahead_TD[self] = x_TD, self.module(x_TD)

    def _take(self, x: Tensor) -> Tensor:
        forward = current_forward()
        done = None if forward is None else forward.ahead_TD.pop(self, None)
        if done is not None and _are_the_same(x, done[0]):
            return done[1].view(*x.shape[:-1], -1)
        out: Tensor = self._forward(x)
        return out


def _are_the_same(x: Tensor, y: Tensor) -> bool:
    """Whether both are views of the same elements."""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.numel(), t.is_contiguous()) for t in (x, y)]
    return places[0] == places[1] and places[0][3]
