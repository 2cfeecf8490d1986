"""Parameters that several stages use, of which each has a copy: tied embeddings, say. Their gradients are added up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..state import StateTensor, local_tensor, trainable_of
from .pipeline import Pipeline


@contextmanager
def adding_to_shared(model: Any, pipeline: Pipeline) -> Iterator[None]:
    """Within it, gradients are computed; afterwards those of parameters that several pp indices hold are, on each, the
    sum of theirs, added to what was there before. All ranks call it together."""
    shared = shared_parameters(model)
    before = [part.tensor.grad for part in shared]
    for part in shared:
        part.tensor.grad = None
    yield
    for part, earlier in zip(shared, before, strict=True):
        _add_up(part, pipeline)
        if earlier is not None:
            assert part.tensor.grad is not None
            local_tensor(part.tensor.grad).add_(local_tensor(earlier))


def shared_parameters(model: Any) -> list[StateTensor]:
    """Those of this rank's trained parameters that other pp indices hold too, in the model's order."""
    return [part for part in trainable_of(model).values() if len(part.layout.pp_ranks or ()) > 1]


@torch.no_grad()
def _add_up(part: StateTensor, pipeline: Pipeline) -> None:
    """A stage may have no gradient of a parameter that it holds: zeros, then."""
    if part.tensor.grad is None:
        part.tensor.grad = torch.zeros_like(part.tensor)
    gradient: Tensor = local_tensor(part.tensor.grad)
    assert part.layout.pp_ranks is not None
    dist.all_reduce(gradient, group=pipeline.groups.sharing[part.layout.pp_ranks])
