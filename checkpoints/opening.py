"""Opening a checkpoint, whichever form it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..moe.util.errors import ExpertMeshError
from .ep_shards.manifest import open_checkpoint
from .hf.checkpoint import Checkpoint
from .hf.source import open_source
from .training_state.marker import MARKER

if TYPE_CHECKING:
    from .hf.names import Names


def open_any(
    path: Path,
    strict: bool = True,
    base: Path | None = None,
    drop_untrained: bool = False,
    vocab_size: int | None = None,
    images: bool = False,
) -> Checkpoint:
    """Open what lies at `path`, a training checkpoint included, outside of any process group.

    Args:
        strict: stop at what is wrong with its tensors; else list it in the checkpoint's `problems`.
        base: the model's directory from which a training checkpoint's tensors that are not trained are to be taken.
        drop_untrained: whether the latter may be gone.
        vocab_size: of the model, where it is to have more tokens than there; not of a training checkpoint.
        images: whether the parts that images pass are to be in the model; a training checkpoint knows that itself.

    Raises:
        ExpertMeshError: there is no checkpoint, or it is damaged or incomplete (see the forms' own functions).
    """
    if is_training(path):
        from .training_state.reading import open_training  # of all forms the one that needs torch

        return open_training(path, strict and not drop_untrained, base)
    source = replace(open_source(path), vocab_size=vocab_size)
    if images:
        source = source.seeing_images()
    return open_checkpoint(source, source.names, strict)


def with_parts_of(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """A Hugging Face directory opened with what is a part of another one's model, and carried over by itself: the layer
    for multi-token prediction, and what images pass. Any other form, or one without these, as it is."""
    source = checkpoint.source
    try:
        if other.source.mtp is not None and source.mtp is None:
            source = source.training_mtp()
        if other.source.images and not source.images:
            source = source.seeing_images()
    except ExpertMeshError:
        return checkpoint
    return checkpoint if source is checkpoint.source else open_checkpoint(source, source.names, strict=False)


def is_training(path: Path) -> bool:
    """Whether a directory is a training checkpoint."""
    return (path / MARKER).exists()


def open_origin(path: Path, base: Path | None, names: Names) -> Checkpoint:
    """The model that the run of a training checkpoint began with.

    Args:
        base: where it is now; None: where it was.

    Raises:
        ExpertMeshError: it is no longer there, or damaged.
    """
    from .training_state.marker import origin_of

    directory = origin_of(path) if base is None else base
    return open_checkpoint(open_source(directory), names)
