"""Where a model is: a directory, or a name on the hub, whose files are downloaded."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from ...moe.util.errors import ExpertMeshError
from ..files.file_layout import SINGLE_NAME
from ..model_card import CARD
from .headers import read_weight_map

if TYPE_CHECKING:
    pass

LICENCES = ("LICENSE*", "NOTICE*")


SIDE_FILES = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", *LICENCES),
    "additional_chat_templates/*.jinja",
)
"""What goes along with the weights: all that config.json and its like name, code included, which is only copied; and
what must come with every copy. Not a model card: it describes the weights that the model came from, and of it an
export's own takes the licence (`checkpoints.model_card`)."""


def resolve_model(model: str, flag: str = "--model", weights: bool = True) -> Path:
    """The directory of `model`: itself, or the local copy of a hub id, downloaded if need be.

    Args:
        flag: how the user gave it, for the error.
        weights: whether they are downloaded, too.

    Raises:
        ExpertMeshError: it is neither, or cannot be fetched.
    """
    if not check_model(model, flag):
        return Path(model)
    try:
        return _download(model, weights)
    except ExpertMeshError:
        raise
    except Exception as error:
        raise ExpertMeshError(
            f"{flag} {model}: no such directory, and not available from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def _download(model: str, weights: bool) -> Path:
    """The local copy of a hub id: what goes along with the weights, and then those that the index names, as some
    repositories hold them a second time in another form."""
    from huggingface_hub import snapshot_download

    path = Path(snapshot_download(model, allow_patterns=[*SIDE_FILES, CARD]))
    if not weights:
        return path
    files = {SINGLE_NAME, *(read_weight_map(path) or {}).values()}
    # of the same revision, should there be a newer one by now
    return Path(snapshot_download(model, revision=path.name, allow_patterns=sorted(map(glob.escape, files))))


def check_model(model: str, flag: str = "--model") -> bool:
    """Whether `model` is to be looked for on the hub, being no directory.

    Raises:
        ExpertMeshError: it is neither a directory nor what a hub id can be.
    """
    path = Path(model)
    try:
        if path.is_dir():
            return False
        exists = path.exists()
    except OSError as error:  # a name too long for any file
        raise ExpertMeshError(f"{flag} {model:.80}...: {error.strerror}") from error
    if exists:
        raise ExpertMeshError(f"{flag} {model}: is a file; {_beside(path)}")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ExpertMeshError(f"{flag} {model}: no such directory")
    return True


def _beside(file: Path) -> str:
    """What to give in place of a file, where a directory was expected."""
    checkpoints = sorted(path.parent for path in file.parent.glob("step-*/checkpoint.json"))
    if checkpoints:
        return f"give one of its training checkpoints, such as {checkpoints[-1]}"
    of_model = any((file.parent / name).exists() for name in ("config.json", "adapter_config.json", "checkpoint.json"))
    return f"give a directory, as {file.parent}" if of_model else "give a directory"
