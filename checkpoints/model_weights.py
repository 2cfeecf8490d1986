"""Opening a model's weights: a Hugging Face directory, or EP shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .ep_shards.manifest import MANIFEST, open_shards
from .hf.source import Checkpoint, ModelSource, open_hf

if TYPE_CHECKING:
    from .hf.names import Names


def is_shards(path: Path) -> bool:
    return (path / MANIFEST).exists() or any(path.glob("ep-*-of-*.safetensors*"))


def open_checkpoint(source: ModelSource, names: Names, strict: bool = True) -> Checkpoint:
    """Open a Hugging Face directory or EP shards, whichever `source.path` is.

    Args:
        names: of the model that it is to fill.

    Raises:
        ExpertMeshError: it is damaged, incomplete, or does not fit the model (see `open_hf` and `open_shards`).
    """
    found = open_shards(source, names) if is_shards(source.path) else open_hf(source, names, strict)
    return found if source.rope_scaling is None else found.stretched(source.rope_scaling, names)
