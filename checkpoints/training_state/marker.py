"""checkpoint.json, which makes a training checkpoint complete (see `training_state`): what it says of the run,
and of the checkpoint's files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...moe.util.atomic_write import PARTIAL
from ...moe.util.errors import ExpertMeshError
from ..files.checksums import check_seal, file_checksum
from ..files.directories import is_there
from ..files.paths import named_file
from ..hf.source import check_fields, read_json

MARKER = "checkpoint.json"
FORMAT = "expertmesh-training-checkpoint"
VERSION = 3
_INCOMPLETE = f"has no {MARKER}: not a complete training checkpoint"
METADATA = ".metadata"
"""In `state`: the table of torch.distributed.checkpoint."""


def whole_checkpoints(directory: Path) -> list[Path]:
    """Those with a completion marker, newest first."""
    found = [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted((path for path in found if is_complete(path)), key=step_of, reverse=True)


def is_complete(path: Path) -> bool:
    """Whether a directory is a training checkpoint that was written to its end."""
    return (path / MARKER).is_file()


def is_checkpoint_entry(path: Path) -> bool:
    """Whether something in a directory of training checkpoints has a name that only a saver gives, complete or not."""
    return re.fullmatch(rf"(step-\d+|best)({PARTIAL})?|\.step-\d+-.*{PARTIAL}", path.name) is not None


def check_resumable(path: Path, named: str = "") -> None:
    """Refuse early what cannot be resumed, by no more than the names of files: before data and weights are read.

    Args:
        named: what the user gave to name it, such as "--resume "; stands before the path.

    Raises:
        ExpertMeshError: there is no training checkpoint there, or none that was written to its end.
    """
    if is_complete(path) or (not path.exists() and is_there(path)):
        return
    missing = "no such directory" if not path.exists() else "is a file" if path.is_file() else _INCOMPLETE
    raise ExpertMeshError(f"{named}{path}: {missing}")


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.removeprefix("step-"))


def recorded_order(paths: Sequence[Path]) -> dict[str, int] | None:
    """What decides the order of the data, of the first checkpoint that tells it; None where none does."""
    for path in paths:
        try:
            order: dict[str, int] = read_marker(path)["order"]
            return order
        except ExpertMeshError:
            continue  # damaged; who resumes is told of it
    return None


def recorded_facts(path: Path) -> dict[str, dict[str, str]]:
    """What the run that a training checkpoint is of had read (see `Saver`).

    Raises:
        ExpertMeshError: as `read_marker`, or what it says of that is no table of texts.
    """
    facts: dict[str, dict[str, str]] = read_marker(path)["facts"]
    tables = facts.values()
    if not all(isinstance(table, dict) and all(isinstance(each, str) for each in table.values()) for table in tables):
        raise ExpertMeshError(f"{path / MARKER}: facts is no table of tables of texts")
    return facts


def recorded_settings(path: Path) -> dict[str, Any]:
    """The configuration of the run that a training checkpoint is of.

    Raises:
        ExpertMeshError: as `read_marker`.
    """
    settings: dict[str, Any] = read_marker(path)["settings"]
    return settings


def recorded_world_size(path: Path) -> int:
    """How many ranks wrote a training checkpoint.

    Raises:
        ExpertMeshError: as `read_marker`.
    """
    number: int = read_marker(path)["world_size"]
    return number


def recorded_transposed(path: Path) -> set[str]:
    """Parameters beside experts' that a training checkpoint holds as the transposes of transformers' own.

    Raises:
        ExpertMeshError: as `read_marker`, or what it says of that is no list of names.
    """
    names: list[str] = read_marker(path)["transposed"]
    if not all(isinstance(name, str) for name in names):
        raise ExpertMeshError(f"{path / MARKER}: transposed is no list of names")
    return set(names)


_FIELDS = {
    "world_size": int,
    "step": int,
    "tokens": int,
    "scheduler": dict,
    "order": dict,
    "settings": dict,
    "best": dict,
    "exported": list,
    "transposed": list,
    "facts": dict,
    "files": dict,
}


def read_marker(path: Path) -> dict[str, Any]:
    """checkpoint.json of a training checkpoint, its own checksum checked.

    Raises:
        ExpertMeshError: it is missing, damaged, or of another format or version.
    """
    if not (path / MARKER).is_file():
        raise ExpertMeshError(f"{path}: {_INCOMPLETE}")
    marker = read_json(path / MARKER)
    if marker.get("format") != FORMAT or marker.get("version") != VERSION:
        raise ExpertMeshError(f"{path / MARKER}: is not of format {FORMAT!r} version {VERSION}")
    check_seal(marker, path / MARKER)
    check_fields(marker, _FIELDS, path / MARKER)
    if f"state/{METADATA}" not in marker["files"]:
        raise ExpertMeshError(f"{path / MARKER}: does not list state/{METADATA}: not a complete training checkpoint")
    return marker


def check_file(path: Path, name: str, entry: dict[str, Any]) -> None:
    """
    Raises:
        ExpertMeshError: the file is missing or elsewhere, or its size or content is not as the marker has it.
    """
    file = named_file(path, name, MARKER, depth=3)
    check_fields(entry, {"bytes": int, "xxh3_128": str}, path / MARKER)
    if file.stat().st_size != entry["bytes"]:
        raise ExpertMeshError(f"{file}: has {file.stat().st_size} bytes; {MARKER} says {entry['bytes']}")
    if file_checksum(file) != entry["xxh3_128"]:
        raise ExpertMeshError(f"{file}: is damaged: its checksum is not the one in {MARKER}")
