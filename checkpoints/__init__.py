"""Bytes on disk: reading Hugging Face checkpoints into shards and writing them back."""

from typing import TYPE_CHECKING

from moe.lazy import import_on_demand

if TYPE_CHECKING:
    from checkpoints.adapter import export_adapter, load_adapter
    from checkpoints.convert import HowToWrite
    from checkpoints.export import export_model
    from checkpoints.files import side_files, write_errors
    from checkpoints.fingerprint import explain_model, file_facts, model_facts
    from checkpoints.load import load_model, shard_and_load
    from checkpoints.merge import merge_adapter
    from checkpoints.names import Names
    from checkpoints.opening import open_checkpoint
    from checkpoints.source import Checkpoint, ModelSource, check_model, open_source, resolve_model
    from checkpoints.state.carried import check_carried
    from checkpoints.state.marker import (
        is_checkpoint_entry,
        recorded_facts,
        recorded_order,
        recorded_settings,
        whole_checkpoints,
    )
    from checkpoints.state.resuming import find_checkpoint, load_best_model, load_training_state
    from checkpoints.state.saving import Progress, Saver
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "Checkpoint",
    "HowToWrite",
    "ModelSource",
    "Names",
    "Progress",
    "Saver",
    "check_carried",
    "check_model",
    "explain_model",
    "export_adapter",
    "export_model",
    "file_facts",
    "find_checkpoint",
    "is_checkpoint_entry",
    "load_adapter",
    "load_best_model",
    "load_model",
    "load_training_state",
    "merge_adapter",
    "model_facts",
    "open_checkpoint",
    "open_source",
    "recorded_facts",
    "recorded_order",
    "recorded_settings",
    "resolve_model",
    "shard_and_load",
    "side_files",
    "whole_checkpoints",
    "write_errors",
]
