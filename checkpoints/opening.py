"""Opening a checkpoint, whichever form it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .ep_shards.manifest import open_checkpoint
from .hf.reader import ParameterReader
from .hf.source import Checkpoint, open_source
from .training_state.marker import MARKER

if TYPE_CHECKING:
    from .hf.names import Names


@dataclass(frozen=True)
class Readable:
    """A checkpoint of any form, a training checkpoint included, and how to read its parameters. `make_reader` may be
    called once a thread. origin: the model that a training checkpoint's run began with, where it was asked for."""

    path: Path
    checkpoint: Checkpoint
    names: Names
    make_reader: Callable[[], ParameterReader]
    origin: Checkpoint | None = None


def open_readable(path: Path, strict: bool = True, base: Path | None = None, drop_untrained: bool = False) -> Readable:
    """Open what lies at `path`, outside of any process group.

    Args:
        strict: stop at what is wrong with its tensors; else list it in the checkpoint's `problems`.
        base: the model's directory from which a training checkpoint's tensors that are not trained are to be taken.
        drop_untrained: whether the latter may be gone.

    Raises:
        ExpertMeshError: there is no checkpoint, or it is damaged or incomplete (see the forms' own functions).
    """
    if is_training(path):
        from .training_state.reading import TrainingReader, open_training  # of all forms the one that needs torch

        training = open_training(path, strict and not drop_untrained, base)
        return Readable(path, training, training.source.names, lambda: TrainingReader(training, path))
    source = open_source(path)
    checkpoint = open_checkpoint(source, source.names, strict)
    return Readable(path, checkpoint, source.names, checkpoint.reader)


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
