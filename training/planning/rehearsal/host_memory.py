"""Tensors that a step makes in host memory. While one that is not pinned is copied to a GPU, the host waits for all
that was launched before.

In a dry run there is one device. Where a tensor lies is told by how torch's functions are called. One in host memory
whose values are known says that it lies on `HOST`: so do sizes of images, on whose device their positions are found.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ....moe.hf_model.image_costs import is_known, put_on_device, put_on_host, stands_on_host
from ....moe.util.gpu import is_gpu
from ....moe.util.tensors import tensors_in

_DEVICE = torch.device("cpu")
HOST = torch.device("cpu", 0)
"""The CPU by a name that no other tensor's device has."""
_PINNED = "_expertmesh_pinned"
_DEVICE_OF: Any = Tensor.device.__get__
_MOVES = {Tensor.to, Tensor.cpu}
_OF_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Functions that make a tensor of Python's numbers, which lie in host memory."""
_INDEXES = {Tensor.__getitem__, Tensor.__setitem__}
_WRITES = {Tensor.copy_, Tensor.__setitem__}


class HostMemory(TorchFunctionMode):
    """Within it, `wait` is called where a tensor is copied to the device from memory that is not pinned."""

    def __init__(self, wait: Callable[[], None]):
        super().__init__()
        self.wait = wait

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_gpu("cpu"):  # values are computed on the host
            return function(*args, **kwargs)
        if function == _DEVICE_OF:
            return HOST if stands_on_host(args[0]) else function(*args)
        if function is Tensor.pin_memory:
            return _pinned(args[0]) if stands_on_host(args[0]) else args[0]
        device = _asked_for(function, args, kwargs)
        given = tensors_in(args, kwargs)
        is_here = device == HOST if device is not None else all(map(stands_on_host, given))
        # what follows from known values in host memory is no kernel, and known
        is_computed = is_here and given and all(map(is_known, given))
        with _disable_current_modes() if is_computed else nullcontext():
            result = function(*map(_on_the_device, args), **{key: _on_the_device(each) for key, each in kwargs.items()})
        copied = [result] if function in _OF_NUMBERS and not given else _copied(function, args)
        is_queued = kwargs.get("non_blocking") and all(vars(each).get(_PINNED) for each in copied)
        if not is_here and not is_queued and any(each.numel() for each in copied):
            self.wait()
        return _lying(result, is_here, given)


def _pinned(tensor: Tensor) -> Tensor:
    """A tensor in host memory as a pinned one."""
    pinned = put_on_host(tensor.detach())
    setattr(pinned, _PINNED, True)
    return pinned


def _asked_for(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a function is to put its result on, by name; None: it is that of the tensors which it is given,
    or the host's."""
    device = kwargs.get("device")
    if function is Tensor.cpu:
        return HOST
    if function is Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device | Tensor):
        device = args[1]
    if isinstance(device, Tensor):
        return HOST if stands_on_host(device) else _DEVICE
    # a word is written where host memory is meant
    return HOST if device == "cpu" else device


def _on_the_device(argument: Any) -> Any:
    """An argument of a function as it is called."""
    return _DEVICE if isinstance(argument, torch.device) and argument == HOST else argument


def _copied(function: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors in host memory that a function may bring to where its result, or its first argument, lies."""
    if function in _MOVES:
        found = [args[0]]
    elif function in _INDEXES | _WRITES and not stands_on_host(args[0]):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        found = [each for each in index if isinstance(each, Tensor) and each.dim()] if function in _INDEXES else []
        found += tensors_in(args[-1]) if function in _WRITES else []
    else:
        found = []
    return [each for each in found if stands_on_host(each)]


def _lying(result: Any, is_here: bool, given: Sequence[Tensor]) -> Any:
    """What a function gives, which says where it lies; what it was given and has changed lies where it lay."""
    if isinstance(result, Tensor) and not is_here and stands_on_host(result) and any(result is each for each in given):
        result = result.detach()
    for tensor in tensors_in(result):
        if any(tensor is each for each in given):
            continue
        if is_here:
            put_on_host(tensor)
        elif is_known(tensor):
            put_on_device(tensor)
    return result
