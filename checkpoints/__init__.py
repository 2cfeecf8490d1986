"""Bytes on disk: reading Hugging Face checkpoints into shards and writing them back."""

from checkpoints.export import export_model
from checkpoints.load import load_model
from checkpoints.source import Checkpoint, ModelSource, open_checkpoint, open_source, resolve_model

__all__ = [
    "Checkpoint",
    "ModelSource",
    "export_model",
    "load_model",
    "open_checkpoint",
    "open_source",
    "resolve_model",
]
