"""Offloading, copied during compute: checkpointed layers' inputs in host memory from forward to backward, and frozen
experts but for those of the layer that computes and of the next one."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...moe.experts.forward import Forward, current_forward
from ...moe.torch_private import FSDPParam, FSDPParamGroup
from ...moe.transformers_private import wrap_checkpointing
from ...moe.util.change_order import begin_change
from ..stages import experts_here


def offload_inputs(model: Any, device_type: str) -> None:
    """Have a model whose layers are checkpointed keep each layer's input in host memory until its backward, in place.

    Only the input that is as long as the sequence is offloaded; what else a layer keeps (see `checkpoint_layers`) stays
    where it is. On a GPU an input is copied out while its layer computes, and back during the backward of the layer
    after. On a CPU it is copied, and the copy is what backward reads.

    Raises:
        ExpertMeshError: transformers has changed how layers are checkpointed.
    """
    begin_change(model, "offloaded inputs")
    store = InputStore(copies_of(device_type))
    wrap_checkpointing(model, store.around)


class Copies(Protocol):
    """How tensors are copied to host memory and back. `leave` and `come` begin a copy and return a handle of its end
    with it; what is computed after `wait(end)`, or touches the memory, comes after that end. What `held` gives of a
    tensor that is in host memory already comes as what has left does, with no end to wait for."""

    def held(self, tensor: Tensor, device: torch.device) -> Any: ...

    def leave(self, tensor: Tensor) -> tuple[Any, Any]: ...

    def come(self, host: Any, left: Any) -> tuple[Tensor, Any]: ...

    def wait(self, end: Any) -> None: ...


def copies_of(device_type: str) -> Copies:
    return CopiesBeside(torch.cuda) if device_type == "cuda" else CopiesAtOnce()


class CopiesAtOnce:
    """On a CPU: host memory is the device's own."""

    def held(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor

    def leave(self, tensor: Tensor) -> tuple[Tensor, None]:
        return tensor.clone(), None

    def come(self, host: Tensor, left: None) -> tuple[Tensor, None]:
        return host, None

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

    def held(self, tensor: Tensor, device: torch.device) -> Any:
        return tensor, device

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
        if left is not None:
            self.coming.wait_event(left)
        with self.runtime.stream(self.coming):
            tensor.copy_(values, non_blocking=True)
            return tensor, self.coming.record_event()

    def wait(self, end: Any) -> None:
        self.runtime.current_stream().wait_event(end)


def offload_frozen(experts: Any, is_sharded: bool, device_type: str, copies: Copies) -> None:
    """Have an FSDP unit of experts gather its frozen parameters from host memory, in place, before it has memory.

    Args:
        is_sharded: whether it is over several ranks. Then FSDP copies them on a stream of its own as soon as it begins
            to gather; a lone rank's it would copy where it computes, at the moment when they are used.
    """
    group: FSDPParamGroup = experts._get_fsdp_state()._fsdp_param_group
    frozen = [each for each in group.fsdp_params if not each.sharded_param.requires_grad]
    for each in frozen:
        assert isinstance(each, FSDPParam)
        # host memory can be pinned only for a GPU
        each.offload_to_cpu, each.pin_memory = True, device_type == "cuda"
    if not is_sharded:
        _ComingAhead(group, frozen, copies)


def frozen_experts(model: Any) -> list[Tensor]:
    """What `offload_frozen` keeps in host memory of a sharded model."""
    layers = (layer.mlp for layer in experts_here(model))
    return [part for experts in layers for part in experts.parameters() if not part.requires_grad]


class _ComingAhead:
    """In place of the two methods by which FSDP gathers a lone rank's unit, ahead of its use and then at it: the first
    begins to copy what is in host memory, and the second waits for it."""

    def __init__(self, group: Any, frozen: Sequence[Any], copies: Copies):
        self.group, self.frozen, self.copies = group, frozen, copies
        self.began: list[tuple[Tensor, Any]] = []
        self.unshard, self.wait_for_unshard = group.unshard, group.wait_for_unshard
        group.unshard, group.wait_for_unshard = self.begin, self.use

    def begin(self, async_op: bool = False) -> None:
        """Take the place of `unshard`, which does nothing where it has been called already."""
        is_begun = self.group._all_gather_result is not None
        self.unshard(async_op)
        if not is_begun and self.group._all_gather_result is not None:
            copies, device = self.copies, self.group.device
            self.began = [copies.come(copies.held(each._sharded_param_data, device), None) for each in self.frozen]

    def use(self) -> None:
        """Take the place of `wait_for_unshard`, which does nothing where nothing was begun."""
        began, self.began = self.began, []
        if not began:
            return self.wait_for_unshard()
        in_host = [each._sharded_param_data for each in self.frozen]
        for each, (tensor, end) in zip(self.frozen, began, strict=True):
            self.copies.wait(end)
            each._sharded_param_data = tensor
        self.wait_for_unshard()
        for each, tensor in zip(self.frozen, in_host, strict=True):
            each._sharded_param_data = tensor


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
