"""The call of a model on a batch, in steps and in trials of its attention."""

from typing import Any

from ...moe.experts.forward import Forward
from ..data.batch import Batch
from .packed_attention import attention_arguments, told_whether_packed


def run_model(model: Any, batch: Batch, forward: Forward) -> Any:
    """What a call of the model gives for a batch. forward: what it is told beside its arguments."""
    # masks are made before the model is called
    with forward, told_whether_packed(model, batch):
        return model(
            **attention_arguments(model, batch),
            input_ids=batch.tokens_BS,
            position_ids=batch.positions_BS,
            use_cache=False,
        )
