"""Layers' inputs in host memory from forward to backward: none is held elsewhere, and copies have their order. That
gradients keep every bit is in tests/parity."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.experts.model_layers import decoder_layers, moe_layers
from expertmesh.sharding.parallelize.choices import Checkpointing
from expertmesh.sharding.parallelize.offload import Copies, CopiesAtOnce, CopiesBeside, InputStore
from expertmesh.sharding.parallelize.parallelize import prefetch_layers
from expertmesh.sharding.topology import Topology
from expertmesh.training.steps.micro_batch import forward_of, token_loss_sum
from tests.distributed.pool import RankPool
from tests.distributed.reference import my_batches, sharded_model
from tests.parity.case import Case, hf_model, random_samples

SAMPLES = random_samples([5, 9, 7, 3, 12, 4, 8, 6])
LAYERS = 4


@pytest.mark.parametrize(("mode", "offload"), [("full", True), ("selective", True), ("selective", False)])
def test_no_input_is_held(ranks: RankPool, tmp_path: Path, mode: Checkpointing, offload: bool) -> None:
    """After forward, and after backward, which gives up nothing of its graph; without --offload-activations all are."""
    hf_model(Case(SAMPLES), num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    for held in ranks.run(_inputs_held, 2, tmp_path, mode, offload):
        assert held == ((0, 0) if offload else (LAYERS, LAYERS))


def _inputs_held(path: Path, mode: Checkpointing, offload: bool) -> tuple[int, int]:
    """Storages of layers' inputs that are still there after forward, and after backward."""
    settings = {"gradient_checkpointing": mode, "offload_activations": offload}
    case = Case(SAMPLES, gradient_checkpointing=mode, settings=settings)
    topology = Topology(2, 2)
    model, _, _ = sharded_model(path, topology, case)
    (batch,) = my_batches(case, topology, torch.distributed.get_rank())
    seen: list[Any] = []

    def note(layer: nn.Module, args: Any) -> None:
        # not what is recomputed
        if torch._C._current_autograd_node() is None:
            seen.append(weakref.ref(args[0].untyped_storage()))

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(note)
    forward = forward_of(batch)
    loss = token_loss_sum(model.train(), batch, forward)
    assert len(seen) == LAYERS
    held = sum(storage() is not None for storage in seen)
    loss.backward()
    held_after = sum(storage() is not None for storage in seen)
    assert forward.stats, "whose graph is not given up, as no loss was made of them"
    return held, held_after


class Log:
    """A stand-in for torch.cuda that notes what is asked of it, in order; everything happens at once."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.names = iter(("leaving", "coming"))
        self.current = FakeStream("compute", self)
        self.num_events = 0

    def Stream(self) -> "FakeStream":
        return FakeStream(next(self.names), self)

    def current_stream(self) -> "FakeStream":
        return self.current

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self.current = self.current, stream
        self.said.append(f"on {stream.name}")
        yield
        self.current = before


class FakeStream:
    def __init__(self, name: str, log: Log):
        self.name = name
        self.log = log

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.said.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.num_events += 1
        self.log.said.append(f"{self.name} records {self.log.num_events}")
        return str(self.log.num_events)


def chain(copies: Copies | None, device: str = "cpu", note: Callable[[int], object] = id) -> tuple[Tensor, ...]:
    """Result of three checkpointed layers, and gradients of input and weight. `note` is told when each begins."""
    torch.manual_seed(0)
    weight, first = (torch.randn(n, 16, device=device, requires_grad=True) for n in (16, 32))
    plain = partial(checkpoint, use_reentrant=False)
    run = plain if copies is None else InputStore(copies).around(plain)

    def layer(number: int, x: Tensor) -> Tensor:
        note(number)
        return (x @ weight).tanh() + x

    x = first
    for number in range(3):
        x = run(partial(layer, number), x)
    note(-1)
    x.sum().backward()
    assert first.grad is not None
    assert weight.grad is not None
    return x.detach(), first.grad, weight.grad


def test_order_of_copies() -> None:
    """Each way has a stream; a copy out begins once its input is computed, and the memory is not given back before it
    has ended; a copy back begins a layer ahead, where its memory is free, and ends before it is read."""
    log = Log()
    copies = CopiesBeside(log, pinned=False)
    found = chain(copies, note=lambda number: log.said.append(f"layer {number}" if number >= 0 else "backward"))
    assert all(map(torch.equal, found, chain(None)))
    out = [["leaving waits for compute", "on leaving", f"leaving records {n + 1}", f"layer {n}"] for n in range(3)]
    forward = [step for n in range(3) for step in (*out[n], f"compute waits for {n + 1}")]

    def back(layer: int, event: int) -> list[str]:
        waits = ["coming waits for compute", f"coming waits for {layer + 1}"]
        return [*waits, "on coming", f"coming records {event}"]

    backward = [
        *(*back(2, 4), *back(1, 5), "compute waits for 4", "layer 2"),
        *(*back(0, 6), "compute waits for 5", "layer 1"),
        *("compute waits for 6", "layer 0"),
    ]
    assert log.said == [*forward, "backward", *backward]


def test_experts_are_copied_a_layer_ahead(ranks: RankPool, tmp_path: Path) -> None:
    """In forward, and in backward, which recomputes: the copy of a layer's experts begins before the layer before it
    computes, on a stream of its own, and has ended before they are used; no more than two layers' are there."""
    hf_model(Case(SAMPLES), num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    said, most = ranks.run(_copied, 1, tmp_path)[0]
    at = [said.index(f"computed {layer}") for layer in range(LAYERS)]
    forward, backward = said[: at[-1]], said[at[-1] :]
    for layer in range(LAYERS):
        assert forward.count(f"begin {layer}") == forward.count(f"use {layer}") == 1
        before = forward.index(f"use {layer - 1}") if layer else 1
        assert forward.index(f"begin {layer}") < before <= forward.index(f"use {layer}") < at[layer]
        # what is there still, of the last layer, is not copied again
        assert backward.count(f"begin {layer}") == backward.count(f"use {layer}") == 1
        before = backward.index(f"use {layer + 1}") if layer + 1 < LAYERS else len(backward)
        assert backward.index(f"begin {layer}") < before
    assert most == 2


def _copied(path: Path) -> tuple[list[str], int]:
    settings = {"adapter": "lora", "offload_experts": True}
    case = Case(SAMPLES, gradient_checkpointing="full", settings=settings)
    model, _, _ = sharded_model(path, Topology(1, 1), case)
    prefetch_layers(model, decoder_layers(model))
    said: list[str] = []
    there: set[int] = set()
    most = 0

    class Noting(CopiesAtOnce):
        def __init__(self, layer: int):
            self.layer = layer

        def come(self, host: Tensor, left: None) -> tuple[Tensor, None]:
            nonlocal most
            if f"begin {self.layer}" not in said[-1:]:
                said.append(f"begin {self.layer}")
            there.add(self.layer)
            most = max(most, len(there))
            return host, None

        def wait(self, end: None) -> None:
            if f"use {self.layer}" not in said[-1:]:
                said.append(f"use {self.layer}")

    for number, layer in enumerate(moe_layers(model)):
        group = cast(Any, layer.mlp)._get_fsdp_state()._fsdp_param_group
        group.unshard.__self__.copies = Noting(number)
        reshard = group.reshard

        def freed(number: int = number, reshard: Callable[[], None] = reshard) -> None:
            reshard()
            there.discard(number)

        group.reshard = freed
        layer.mlp.register_forward_hook(lambda *_, number=number: said.append(f"computed {number}"))
    (batch,) = my_batches(case, Topology(1, 1), 0)
    token_loss_sum(model.train(), batch, forward_of(batch)).backward()
    return said, most


def test_what_all_layers_share_stays() -> None:
    """A mask among the inputs, and whatever is no number."""
    left: list[Tensor] = []

    class Noting(CopiesAtOnce):
        def leave(self, tensor: Tensor) -> tuple[Tensor, None]:
            left.append(tensor)
            return super().leave(tensor)

    x, residual = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    mask, positions = torch.randn(3, 3), torch.arange(3)
    run = InputStore(Noting()).around(partial(checkpoint, use_reentrant=False))
    result = run(lambda x, mask, positions, residual: (mask @ x).exp() * residual, x, mask, positions, residual)
    assert [tensor.shape for tensor in left] == [x.shape, residual.shape]
    result.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(((mask @ x).exp() * residual).sum(), x)[0])


def test_an_input_that_backward_had_is_not_fetched_again() -> None:
    """An input of an earlier forward, whose graph is still held."""
    come: list[Any] = []

    class Noting(CopiesAtOnce):
        def come(self, host: Tensor, left: None) -> tuple[Tensor, None]:
            come.append(host)
            return super().come(host, left)

    run = InputStore(Noting()).around(partial(checkpoint, use_reentrant=False))
    for _ in range(2):
        x = torch.randn(3, requires_grad=True)
        y = run(torch.exp, run(torch.sin, x))
        y.sum().backward(retain_graph=True)
        assert x.grad is not None
    assert len(come) == 4
