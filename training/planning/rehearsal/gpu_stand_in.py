"""Stands in for a GPU: code takes its paths, and nothing is copied to host memory or back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ....moe.util.gpu import rehearsing_gpu
from ....sharding.parallelize import offload, parallelize


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within it, tensors without memory are treated as on a GPU."""
    with (
        rehearsing_gpu(),
        mock.patch.object(offload, "copies_of", NoCopies),
        mock.patch.object(parallelize, "copies_of", NoCopies),
    ):
        yield


class NoCopies:
    """Puts no tensor in host memory, so that none is counted (see `sharding.parallelize.offload.Copies`)."""

    def __init__(self, device_type: str):
        pass

    def held(self, tensor: Tensor, device: torch.device) -> Any:
        return tensor.shape, tensor.dtype, device

    def leave(self, tensor: Tensor) -> tuple[Any, None]:
        return (tensor.shape, tensor.dtype, tensor.device), None

    def come(self, host: Any, left: None) -> tuple[Tensor, None]:
        shape, dtype, device = host
        return torch.empty(shape, dtype=dtype, device=device), None

    def wait(self, end: None) -> None:
        pass
