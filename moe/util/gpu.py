"""Whether a tensor is treated as on a GPU, with Triton kernels and flash attention; and how one comes there."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_rehearsed = False


def takes_triton(tensor: Tensor) -> bool:
    """Whether our Triton kernels compute with `tensor`: on a GPU where triton is installed, or in a dry run of one; not
    in fp64, as they sum in fp32."""
    # a model is probed on the meta device also in a dry run of a GPU, whose torch brings triton
    is_gpus = (tensor.is_cuda and _has_triton()) or (_rehearsed and not tensor.is_meta)
    return is_gpus and tensor.dtype != torch.float64


def computes_on_cpu(tensor: Tensor) -> bool:
    """Whether `tensor` is in host memory and not in a dry run of a GPU."""
    return tensor.device.type == "cpu" and not _rehearsed


def is_gpu(device_type: str) -> bool:
    """Whether a device of this type is a GPU, or stands for one in a dry run."""
    return device_type == "cuda" or _rehearsed


def bring_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory as one on a device, copied from memory that is pinned: for others the host would wait."""
    if not is_gpu(device.type) or device.type == "meta":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def rehearsing_gpu() -> Iterator[None]:
    """Within it tensors without memory take the code paths that they would take on a GPU."""
    with _setting_rehearsed(True):
        yield


@contextmanager
def computing_values() -> Iterator[None]:
    """Within it, also in a dry run of a GPU, tensors on the CPU have values and take a CPU's code paths."""
    with _setting_rehearsed(False):
        yield


@contextmanager
def _setting_rehearsed(is_rehearsed: bool) -> Iterator[None]:
    global _rehearsed
    was_rehearsed, _rehearsed = _rehearsed, is_rehearsed
    try:
        yield
    finally:
        _rehearsed = was_rehearsed


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
