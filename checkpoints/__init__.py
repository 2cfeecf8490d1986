"""Bytes on disk: reading Hugging Face checkpoints into shards and writing them back."""

from typing import TYPE_CHECKING

from moe.lazy import import_on_demand

if TYPE_CHECKING:
    from checkpoints.export import export_model
    from checkpoints.files import write_errors
    from checkpoints.load import load_model, shard_and_load
    from checkpoints.names import Names
    from checkpoints.opening import open_checkpoint
    from checkpoints.source import Checkpoint, ModelSource, check_model, open_source, resolve_model
    from checkpoints.state.marker import recorded_order, whole_checkpoints
    from checkpoints.state.resuming import find_checkpoint, load_best_model, load_training_state
    from checkpoints.state.saving import Progress, Saver
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "Checkpoint",
    "ModelSource",
    "Names",
    "Progress",
    "Saver",
    "check_model",
    "export_model",
    "find_checkpoint",
    "load_best_model",
    "load_model",
    "load_training_state",
    "open_checkpoint",
    "open_source",
    "recorded_order",
    "resolve_model",
    "shard_and_load",
    "whole_checkpoints",
    "write_errors",
]
