"""Forward passes without a backward, between steps of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..sharding.parallelize.parallelize import free_gathered


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """No gradients, dropout, jitter, activation checkpointing or compiled code; afterwards the model is as it was.

    Call it where no forward waits for its backward, and run at least one forward in it.
    """
    was_training = model.training
    model.eval()
    try:
        # compiled code would be compiled anew for this mode and, as generations grow, for KV caches
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
        # without a backward the root, and with --no-reshard-after-forward every unit, keeps its gathered parameters,
        # which would outlive the next update of their shards
        free_gathered(model)
