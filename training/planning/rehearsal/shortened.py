"""Runs a few layers of a model in place of all: marks what each does, and skips the others.

All layers are there, with their parameters, gradients and optimizer state, so that what goes over all parameters, or
over the statistics of all routers, is what it is in the full model.
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....moe.experts.forward import current_forward
from ....moe.experts.model_layers import decoder_layers, moe_layers
from ....moe.experts.router_stats import RouterStats
from ....moe.torch_private import FSDPState, _current_autograd_node
from ....sharding.parallelize.parallelize import prefetch_layers
from ....sharding.parallelize.unreached import Unreached, is_reducing
from ....sharding.stages import stages_of
from ....sharding.state import local_tensor
from .layer_kinds import Stack
from .live_memory import LiveTensors
from .recorder import Recorder


class Shortened:
    """Shortens a parallelized model with as many decoder layers as `stack`. Within it, forwards and backwards tell
    `recorder` which layer they come to, skipped ones included."""

    def __init__(self, model: Any, stack: Stack, recorder: Recorder, live: LiveTensors):
        self.layers: list[Any] = list(decoder_layers(model))
        self.stack = stack
        stages = stages_of(model)
        self.lasts = {len(self.layers) - 1} if stages is None else {layers[-1] for layers in stages.layers}
        self.recorder = recorder
        self.live = live
        self._output: Any = None
        rehearsed = [layer for number, layer in enumerate(self.layers) if stack.is_rehearsed(number)]
        if len(rehearsed) < len(self.layers):
            prefetch_layers(model, rehearsed)
        for number, layer in enumerate(self.layers):
            if stack.is_rehearsed(number):
                self._have_marked(layer, number)
            else:
                self._have_stand_aside(layer, number)

    def __enter__(self) -> "Shortened":
        finish = FSDPState._root_post_backward_final_callback

        def marked(state: FSDPState) -> None:
            self.recorder.mark(None)
            finish(state)

        fill, skipped = Unreached.fill, self._of_skipped_layers()

        def filled(unreached: Unreached, group: Any) -> None:
            # a unit of all layers, say of routers in fp32: the gradients that their backwards would have left
            with self.recorder.paused():
                for own in group.fsdp_params if is_reducing(group) else ():
                    if own.sharded_param in skipped and own.unsharded_param.grad is None:
                        own.unsharded_param.grad = torch.empty_like(own.unsharded_param)
            fill(unreached, group)

        self._replaced = ExitStack()
        self._replaced.enter_context(mock.patch.object(FSDPState, "_root_post_backward_final_callback", marked))
        self._replaced.enter_context(mock.patch.object(Unreached, "fill", filled))
        return self

    def __exit__(self, *error: Any) -> None:
        self._replaced.close()

    def _of_skipped_layers(self) -> set[nn.Parameter]:
        skipped = (layer for number, layer in enumerate(self.layers) if not self.stack.is_rehearsed(number))
        return {parameter for layer in skipped for parameter in layer.parameters() if parameter.requires_grad}

    def add_gradients(self) -> None:
        """Give the parameters of skipped layers gradients, as those have them that ran in their place. To be called
        after the step's last backward."""
        with self.live.paused(), self.recorder.paused():
            for layer, number in zip(self.layers, self.stack.stand_ins, strict=True):
                # FSDP's are parts of one tensor
                storages: dict[int, Tensor] = {}
                for parameter, ran in zip(layer.parameters(), self.layers[number].parameters(), strict=True):
                    if parameter.grad is None and ran.grad is not None:
                        parameter.grad = _like(ran.grad, storages)

    def _have_marked(self, layer: nn.Module, number: int) -> None:
        is_last = number in self.lasts
        is_followed = is_last or self.stack.is_rehearsed(number + 1)

        def begin(module: nn.Module, args: Any) -> None:
            # not what is recomputed, within a backward that is marked already
            if _is_forward():
                self._output = None
                self.recorder.mark(number)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if _is_forward():
                self._output = None if is_followed else output
                result = output if isinstance(output, Tensor) else output[0]
                if result.requires_grad:
                    # it comes before FSDP's own hook, by which backward begins to gather parameters
                    result.register_hook(lambda gradient: self.recorder.mark(number))

        def go_on(module: nn.Module, args: Any, output: Any) -> None:
            if _is_forward():
                self.recorder.mark(None)

        layer.register_forward_pre_hook(begin, prepend=True)
        layer.register_forward_hook(end, prepend=True)
        if is_last:
            layer.register_forward_hook(go_on)

    def _have_stand_aside(self, layer: Any, number: int) -> None:
        """Skip a layer: its call returns what the layer before has returned, and none of its hooks run."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.recorder.mark(number)
            like = self.layers[self.stack.rehearsed_before(number)]
            with self.live.paused(), self.recorder.paused():
                forward = current_forward()
                assert forward is not None
                for experts, ran in zip(moe_layers(module), moe_layers(like), strict=True):
                    forward.stats[experts] = _statistics(forward.stats[ran])
            return self._output

        kind = type(layer)
        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _statistics(like: RouterStats) -> RouterStats:
    counts_E, rows = torch.empty_like(like.counts_E), like.rows_computed
    return RouterStats(counts_E, _figure(like.prob_sum_E), _figure(like.z_sum), _figure(like.entropy_sum), rows)


def _figure(like: Tensor | None) -> Tensor | None:
    if like is None or not like.requires_grad:
        return None if like is None else torch.empty_like(like)
    begin = torch.empty((), requires_grad=True)
    figure: Tensor = _Figure.apply(begin, torch.empty_like(like, requires_grad=False))
    return figure


def _is_forward() -> bool:
    return _current_autograd_node() is None


def _like(gradient: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """A gradient without values, like another. storages: those made so far, by that of the tensor that each is like."""
    local = local_tensor(gradient)
    storage = local.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = local.new_empty(storage.nbytes() // local.element_size())
    part = storages[storage._cdata].as_strided(local.shape, local.stride(), local.storage_offset())
    if not isinstance(gradient, DTensor):
        return part
    mesh, placements = gradient.device_mesh, gradient.placements
    shape, stride = gradient.shape, gradient.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


class _Figure(torch.autograd.Function):
    """The statistics that a router would have left. The losses stack those of all layers: the gradient of each is a
    part of one tensor, which goes when the last one has used it."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, figure: Tensor) -> Tensor:
        return figure

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
