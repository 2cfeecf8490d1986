"""Forwards without a backward, in between steps of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe import take_stats


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """No gradients, no dropout, no jitter, no activation checkpointing; afterwards the model is as it was.

    Call it where no forward waits for its backward, and run at least one forward in it.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
        take_stats(model)
    finally:
        model.train(was_training)
        # without a backward the root keeps its gathered parameters, which would outlive the next update of their shards
        model.reshard()
