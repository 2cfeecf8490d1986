"""Activation offloading: checkpointed layers' inputs in host memory from forward to backward, copied during compute."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...moe.experts.forward import Forward, current_forward
from ...moe.transformers_private import wrap_checkpointing
from ...moe.util.gpu import is_rehearsing_gpu


def offload_inputs(model: Any, device_type: str) -> None:
    """Have a model whose layers are checkpointed keep each layer's input in host memory until its backward, in place.

    Only the input that is as long as the sequence is offloaded; what else a layer keeps (see `checkpoint_layers`) stays
    where it is. On a GPU an input is copied out while its layer computes, and back during the backward of the layer
    after. On a CPU it is copied, and the copy is what backward reads.

    Raises:
        ExpertMeshError: transformers has changed how layers are checkpointed.
    """
    store = InputStore(copies_of(device_type))
    wrap_checkpointing(model, store.around)


class Copies(Protocol):
    """How tensors are copied to host memory and back. `leave` and `come` begin a copy and return a handle of its end
    with it; what is computed after `wait(end)`, or touches the memory, comes after that end."""

    def leave(self, tensor: Tensor) -> tuple[Any, Any]: ...

    def come(self, host: Any, left: Any) -> tuple[Tensor, Any]: ...

    def wait(self, end: Any) -> None: ...


def copies_of(device_type: str) -> Copies:
    if is_rehearsing_gpu():
        return NoCopies()
    return CopiesBeside(torch.cuda) if device_type == "cuda" else CopiesAtOnce()


class CopiesAtOnce:
    """On a CPU: host memory is the device's own."""

    def leave(self, tensor: Tensor) -> tuple[Tensor, None]:
        return tensor.clone(), None

    def come(self, host: Tensor, left: None) -> tuple[Tensor, None]:
        return host, None

    def wait(self, end: None) -> None:
        pass


class NoCopies:
    """In a dry run, where tensors have no values: no tensor is put in host memory, so that none is counted."""

    def leave(self, tensor: Tensor) -> tuple[Any, None]:
        return (tensor.shape, tensor.dtype, tensor.device), None

    def come(self, host: Any, left: None) -> tuple[Tensor, None]:
        shape, dtype, device = host
        return torch.empty(shape, dtype=dtype, device=device), None

    def wait(self, end: None) -> None:
        pass


class CopiesBeside:
    """On a GPU: through pinned memory, with one stream for each direction.

    Device memory is allocated and freed by the stream that computes, which waits for each copy before it does: so no
    memory is held back for another stream, however far the host is ahead.

    Args:
        runtime: torch.cuda, or what is like it.
    """

    def __init__(self, runtime: Any, pinned: bool = True):
        self.runtime = runtime
        self.pinned = pinned
        self.leaving, self.coming = runtime.Stream(), runtime.Stream()

    def leave(self, tensor: Tensor) -> tuple[tuple[Tensor, torch.device], Any]:
        self.leaving.wait_stream(self.runtime.current_stream())
        with self.runtime.stream(self.leaving):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.pinned)
            host.copy_(tensor, non_blocking=True)
            return (host, tensor.device), self.leaving.record_event()

    def come(self, host: tuple[Tensor, torch.device], left: Any) -> tuple[Tensor, Any]:
        values, device = host
        tensor = torch.empty_like(values, device=device)
        # not before the memory is free: until now it may have been another's
        self.coming.wait_stream(self.runtime.current_stream())
        self.coming.wait_event(left)
        with self.runtime.stream(self.coming):
            tensor.copy_(values, non_blocking=True)
            return tensor, self.coming.record_event()

    def wait(self, end: Any) -> None:
        self.runtime.current_stream().wait_event(end)


@dataclass(eq=False)
class _Kept:
    """An input. host, left: what `Copies.leave` gave. before: the one that was kept before it. came: what `Copies.come`
    gave, once it is being copied back. is_used: whether backward has had it."""

    host: Any
    left: Any
    before: "weakref.ref[_Kept] | None"
    came: tuple[Tensor, Any] | None = None
    is_used: bool = False


class InputStore:
    """The inputs of all checkpointed layers of a model, each forward's in the order in which it calls them. Several
    forwards may wait for their backward, in a pipeline in another order than the reverse."""

    def __init__(self, copies: Copies):
        self.copies = copies
        self.forward: weakref.ref[Forward] | None = None
        # of that forward; weak: backward frees what autograd holds of an input, and with it the input
        self.latest: weakref.ref[_Kept] | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for a layer's checkpointing function: called as (forward, *inputs), it keeps the inputs in
        host memory, and leaves what the layer computes as it is."""

        def offloading(forward: Callable[..., Any], *inputs: Any) -> Any:
            kept: list[_Kept] = []
            # checkpointing takes the inputs first, and then puts hooks of its own before these
            with saved_tensors_hooks(partial(self._leave, _storages(inputs), kept), self._come):
                result = checkpoint(forward, *inputs)
            for each in kept:
                # whoever called gives up the inputs now
                self.copies.wait(each.left)
            return result

        return offloading

    def _leave(self, storages: set[int], kept: list[_Kept], tensor: Tensor) -> Tensor | _Kept:
        if tensor.untyped_storage()._cdata not in storages:
            return tensor
        forward = current_forward()
        if forward is not (None if self.forward is None else self.forward()):
            self.forward, self.latest = None if forward is None else weakref.ref(forward), None
        one = _Kept(*self.copies.leave(tensor), self.latest)
        self.latest = weakref.ref(one)
        kept.append(one)
        return one

    def _come(self, one: Tensor | _Kept) -> Tensor:
        if isinstance(one, Tensor):
            return one
        tensor, end = one.came or self.copies.come(one.host, one.left)
        one.came, one.is_used = None, True
        before = one.before() if one.before is not None else None
        if before is not None and not before.is_used and before.came is None:
            before.came = self.copies.come(before.host, before.left)
        self.copies.wait(end)
        return tensor


def _storages(inputs: tuple[Any, ...]) -> set[int]:
    """The storages of the activations that go from layer to layer: of the first input, and of whatever has its shape.
    Masks and positions, which all layers share, are left out."""
    numbers = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
    return {x.untyped_storage()._cdata for x in numbers if x.shape == numbers[0].shape}
