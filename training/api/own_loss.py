"""The loss that a Trainer's class computes itself, on an engine: trl's GRPO, DPO, KTO and others, or a user's own.

The class's code runs as it is, on this rank's sequences, and calls the engine's model like any other. Its loss means
what it means under DistributedDataParallel, which minimises the mean of the ranks' losses. An engine adds up gradients
over ranks and never divides them, so that each rank's loss need only be divided by the number of ranks.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...moe.experts.forward import Forward, keeping_forwards
from ...moe.experts.lora import A, B
from ...moe.experts.model_facts import facts_of
from ...moe.experts.model_layers import moe_layers, moe_shape
from ...moe.experts.router_stats import Routing, load_balancing_loss, router_z_loss, routing_of
from ...moe.hf_model.counts import seen_pairs
from ...moe.util.errors import ExpertMeshError
from ..engine.engine import Engine, start_engine
from ..steps.generate import generate_in_step
from ..steps.micro_batch import PooledCounts, StepCounts, no_losses
from ..steps.step import Gradients


class OwnLoss:
    """Gradients of a step whose loss a Trainer's class computes, and what its micro-batches leave beside them."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.layers = moe_layers(engine.model)
        self.begin(1)

    def begin(self, micro_batches: int) -> None:
        """Start a step of so many micro-batches."""
        self._micro_batches = micro_batches
        self._losses = no_losses((), self.engine.ranks.device)
        self._routing: Routing | None = None
        self._lengths: list[Tensor] = []

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around the forwards and the backward of a micro-batch.

        Raises:
            ExpertMeshError: there was no backward, or one that `backward` knows nothing of.
        """
        with keeping_forwards(self.engine.model, self.engine.balance.weights.of_routers) as self._forwards:
            yield
            if self._routing is None or self._forwards:
                raise ExpertMeshError(
                    "training_step did not call self.accelerator.backward(loss) after the model: without it, the "
                    "gradients would be the sum over ranks and not their mean"
                )

    def backward(self, loss: Tensor, **unused: Any) -> None:
        """Stand in for `Accelerator.backward`: of the mean of the ranks' losses, and of the router losses over the
        tokens of all ranks. All ranks call it together, after equally many forwards."""
        weights, own = self.engine.balance.weights, loss / self.engine.ranks.world_size
        balance = z = torch.zeros((), device=own.device)
        shares = self._micro_batches * len(self._forwards)
        for forward in self._forwards:
            stats = forward.take_stats(self.layers)
            routing = self._count(forward, routing_of(stats))
            if weights.of_routers:
                pooled = PooledCounts(stats, weights, None)
                tokens = self._tokens(routing)
                dist.all_reduce(tokens)
                if weights.balance > 0:
                    balance = balance + load_balancing_loss(stats, pooled.wait(), tokens.clamp(min=1)) / shares
                if weights.z > 0:
                    z = z + router_z_loss(stats, tokens.clamp(min=1)) / shares
        self._forwards.clear()
        (own + weights.balance * balance + weights.z * z).backward()
        self._losses += torch.stack([own.float(), balance, z]).detach()

    def gradients(self) -> Gradients:
        """What the step's micro-batches have left. All ranks call it together.

        Every token that a forward had counts as one with a loss: which ones have one, only the class's code knows.
        """
        assert self._routing is not None
        spans = [range(length) for lengths in self._lengths for length in lengths.tolist()]
        seen = seen_pairs(facts_of(self.engine.model).attention, spans)
        figures = torch.tensor([int(self._tokens(self._routing)), *seen]).to(self.engine.ranks.device)
        dist.all_reduce(figures)
        tokens, *pairs = (max(number, 1) for number in figures.tolist())
        counts = StepCounts(tokens, tokens, tuple(pairs), (tokens,), counted=1)
        return Gradients(self._losses, self._routing, counts)

    def _count(self, forward: Forward, routing: Routing) -> Routing:
        self._routing = routing if self._routing is None else self._routing + routing
        if forward.is_token_BS is not None:
            self._lengths.append(forward.is_token_BS.sum(dim=1))
        return routing

    def _tokens(self, routing: Routing) -> Tensor:
        return routing.counts_LE[0].sum() // moe_shape(self.engine.model).top_k


class WithoutAdapters(nn.Module):
    """A model of an engine without what its adapters add: the reference of a policy that trains nothing else."""

    model: Any

    def __init__(self, model: Any):
        super().__init__()
        # no submodule: who moves, freezes or switches this one leaves the model alone
        vars(self).update(model=model, config=model.config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        adapted = [module for module in self.model.modules() if getattr(module, "low_rank", None) is not None]
        scaled = [module.low_rank for module in adapted]
        try:
            for module in adapted:
                module.low_rank = replace(module.low_rank, scale=0.0)
            return self.model(*args, **kwargs)
        finally:
            for module, low_rank in zip(adapted, scaled, strict=True):
                module.low_rank = low_rank


def reference_of(engine: Engine) -> Any:
    """An engine's model as it is now, frozen: itself without adapters, where these are all that is trained and still
    add nothing; else a copy, sharded like it. All ranks call it together."""
    trained = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
    is_base = not engine.config.init_adapter and engine.step_number == 0
    if is_base and all(name.endswith((A, B)) for name in trained):
        return WithoutAdapters(engine.model)
    engine.tell(
        "the reference is a second copy of the model, sharded like the first; adapter='lora' needs none, as it is the "
        "model without them"
    )
    devices = [engine.ranks.device] if engine.ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # loading seeds them
        copy = start_engine(replace(engine.config, resume=""), engine.ranks, lambda line: None)
        copy.place(limit=engine.config.ddp_timeout)
    engine.release()
    with torch.no_grad():
        for mine, theirs in zip(copy.model.parameters(), engine.model.parameters(), strict=True):
            _here(mine).copy_(_here(theirs))
    return frozen(copy)


def frozen(engine: Engine) -> Any:
    """The model of an engine that serves another one's training: as a reference, or a teacher."""
    generate_in_step(engine.model)
    return engine.model.requires_grad_(False)


def _here(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def referring_to(engine: Engine, kind: type) -> Iterator[None]:
    """Around the `__init__` of a class of trl's, which would load its reference complete on each rank: it gets
    `reference_of` instead."""

    def make(path: Any, *_: Any, **__: Any) -> Any:
        if str(path) != str(engine.model.config._name_or_path):
            raise ExpertMeshError(f"{path} would be loaded complete on each rank: give the model that it is")
        return reference_of(engine)

    # of a model it takes a hash, to find again what a reference gave; of a sharded one there is none: nothing is found
    stand_ins: dict[str, Any] = {"create_model_from_path": make, "hash_module": lambda _: os.urandom(16).hex()}
    with ExitStack() as patches:
        for module in {base.__module__ for base in kind.__mro__}:
            for name, stand_in in stand_ins.items():
                if hasattr(sys.modules.get(module), name):
                    patches.enter_context(mock.patch.object(sys.modules[module], name, stand_in))
        yield


def keep_as_it_is(model: Any) -> None:
    """Have what trl does to a model around its forwards and generations leave an engine's as it is: activation
    checkpointing stays, which trl would switch off and on, and ranks generate in step; in place."""
    generate_in_step(model)
    for name in ("gradient_checkpointing_disable", "gradient_checkpointing_enable"):
        setattr(model, name, _nothing)


def _nothing(*_: Any, **__: Any) -> None:
    """To be called in place of a method."""
