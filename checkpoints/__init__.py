"""Bytes on disk: reading Hugging Face checkpoints into shards and writing them back."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "checkpoints":  # `python -m checkpoints` in a checkout: its own modules, whatever is installed
    sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "public"))

from expertmesh.moe.base.lazy import import_on_demand

if TYPE_CHECKING:
    from expertmesh.checkpoints.adapter.adapter_files import export_adapter, load_adapter, read_adapter
    from expertmesh.checkpoints.adapter.merge import merge_adapter
    from expertmesh.checkpoints.ep_shards.convert import HowToWrite, encoded_as_source
    from expertmesh.checkpoints.hf.export import export_model
    from expertmesh.checkpoints.hf.fingerprint import explain_model, file_facts, model_facts
    from expertmesh.checkpoints.hf.names import Names
    from expertmesh.checkpoints.hf.source import Checkpoint, ModelSource, check_model, open_source, resolve_model
    from expertmesh.checkpoints.load import load_model, shard_and_load
    from expertmesh.checkpoints.opening import open_checkpoint
    from expertmesh.checkpoints.state.marker import (
        is_checkpoint_entry,
        is_complete,
        recorded_facts,
        recorded_order,
        recorded_settings,
        recorded_world_size,
        whole_checkpoints,
    )
    from expertmesh.checkpoints.state.resuming import (
        ResumableOptimizer,
        StateLayout,
        find_checkpoint,
        load_best_model,
        load_training_state,
    )
    from expertmesh.checkpoints.state.saving import Progress, Saver, checkpoint_name
    from expertmesh.checkpoints.state.untrained import check_carried
    from expertmesh.checkpoints.storage.directories import finish_replacement, side_files, write_errors
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "Checkpoint",
    "HowToWrite",
    "ModelSource",
    "Names",
    "Progress",
    "ResumableOptimizer",
    "Saver",
    "StateLayout",
    "check_carried",
    "check_model",
    "checkpoint_name",
    "encoded_as_source",
    "explain_model",
    "export_adapter",
    "export_model",
    "file_facts",
    "find_checkpoint",
    "finish_replacement",
    "is_checkpoint_entry",
    "is_complete",
    "load_adapter",
    "load_best_model",
    "load_model",
    "load_training_state",
    "merge_adapter",
    "model_facts",
    "open_checkpoint",
    "open_source",
    "read_adapter",
    "recorded_facts",
    "recorded_order",
    "recorded_settings",
    "recorded_world_size",
    "resolve_model",
    "shard_and_load",
    "side_files",
    "whole_checkpoints",
    "write_errors",
]
