"""checkpoint.json, which makes a training checkpoint complete (see `training_state`): what it says of the run, of the
checkpoint's files, and of tensors that are not trained, which training checkpoints do not hold: where they are."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...moe.util.atomic_write import PARTIAL
from ...moe.util.errors import ExpertMeshError
from ...moe.util.progress import CountedProgress
from ..ep_shards.manifest import open_checkpoint
from ..files.checksums import check_seal, file_checksum
from ..files.directories import is_there
from ..files.open_files import OpenFiles
from ..files.paths import named_file
from ..files.tensors import DiskTensor
from ..hf.checkpoint import Checkpoint
from ..hf.json_files import check_table, read_json
from ..hf.source import open_source
from ..hf.untrained_tensors import sample

MARKER = "checkpoint.json"
FORMAT = "expertmesh-training-checkpoint"
VERSION = 3
_INCOMPLETE = f"has no {MARKER}: not a complete training checkpoint"
METADATA = ".metadata"
"""In `state`: the table of torch.distributed.checkpoint."""


def whole_checkpoints(directory: Path) -> list[Path]:
    """Those with a completion marker, newest first."""
    named = [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted((path for path in named if is_complete(path)), key=step_of, reverse=True)


def is_complete(path: Path) -> bool:
    """Whether a directory is a training checkpoint that was written to its end."""
    return (path / MARKER).is_file()


def is_checkpoint_entry(path: Path) -> bool:
    """Whether something in a directory of training checkpoints has a name that only a saver gives, complete or not."""
    return re.fullmatch(rf"(step-\d+|best)({PARTIAL})?|\.step-\d+-.*{PARTIAL}", path.name) is not None


def check_resumable(path: Path, named: str) -> None:
    """Refuse early what cannot be resumed, by no more than the names of files: before data and weights are read.

    Args:
        named: what the user gave to name it, such as "--resume "; stands before the path.

    Raises:
        ExpertMeshError: there is no training checkpoint there, or none that was written to its end.
    """
    if is_complete(path) or (not path.exists() and is_there(path)) or whole_checkpoints(path):
        return
    missing = "no such directory" if not path.exists() else "is a file" if path.is_file() else _INCOMPLETE
    raise ExpertMeshError(f"{named}{path}: {missing}")


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.name.removeprefix("step-"))


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
    """checkpoint.json of a training checkpoint, its own checksum checked: "settings" are the run's configuration,
    "facts" what it had read (see `Saver`), "transposed" the parameters beside experts' that are held as the transposes
    of transformers' own.

    Raises:
        ExpertMeshError: it is missing, damaged, or of another format or version.
    """
    if not (path / MARKER).is_file():
        raise ExpertMeshError(f"{path}: {_INCOMPLETE}")
    marker = read_json(path / MARKER)
    if marker.get("format") != FORMAT or marker.get("version") != VERSION:
        raise ExpertMeshError(f"{path / MARKER}: is not of format {FORMAT!r} version {VERSION}")
    check_seal(marker, path / MARKER)
    check_table(marker, _FIELDS, path / MARKER)
    tables = marker["facts"].values()
    if not all(isinstance(table, dict) and all(isinstance(each, str) for each in table.values()) for table in tables):
        raise ExpertMeshError(f"{path / MARKER}: facts must be a table of tables of strings")
    if not all(isinstance(name, str) for name in marker["transposed"]):
        raise ExpertMeshError(f"{path / MARKER}: transposed must be a list of names")
    if f"state/{METADATA}" not in marker["files"]:
        raise ExpertMeshError(f"{path / MARKER}: does not list state/{METADATA}: not a complete training checkpoint")
    return marker


def check_files(path: Path, files: Mapping[str, Any], is_told: bool = True) -> None:
    """
    Args:
        files: those to check, as the marker has them.
        is_told: whether it is said how far this is.

    Raises:
        ExpertMeshError: see `check_file`.
    """
    # no name in it has been checked yet, nor any number
    said = [entry.get("bytes") for entry in files.values() if isinstance(entry, dict)]
    total = sum(size for size in said if isinstance(size, int))
    with CountedProgress(f"checking {path}", total, is_shown=is_told) as progress:
        for name, entry in files.items():
            check_file(path, name, entry, progress.add)


def check_file(path: Path, name: str, entry: dict[str, Any], tell: Callable[[int], object] = int) -> None:
    """
    Args:
        tell: see `file_checksum`.

    Raises:
        ExpertMeshError: the file is missing or elsewhere, or its size or content is not as the marker has it.
    """
    file = named_file(path, name, MARKER, depth=3)
    check_table(entry, {"bytes": int, "xxh3_128": str}, path / MARKER)
    if file.stat().st_size != entry["bytes"]:
        raise ExpertMeshError(f"{file}: has {file.stat().st_size} bytes; {MARKER} says {entry['bytes']}")
    if file_checksum(file, tell) != entry["xxh3_128"]:
        raise ExpertMeshError(f"{file}: is damaged: its checksum is not the one in {MARKER}")


def carried_record(origin: Checkpoint) -> dict[str, Any]:
    """What checkpoint.json says of the tensors that exports carry over from `origin`.

    Raises:
        ExpertMeshError: a file of theirs cannot be read.
    """
    files = OpenFiles()
    return {
        "path": str(origin.source.path.resolve()),
        "dropped": origin.drops_untrained,
        "tensors": {tensor.name: _described(tensor, files) for tensor in origin.carried},
    }


def _described(tensor: DiskTensor, files: OpenFiles) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": tensor.dtype, "sample": sample(tensor, files)}


def check_carried(path: Path, checkpoint: Checkpoint) -> None:
    """Compare what a run would carry over with what the training checkpoint that it resumes from has recorded.

    Raises:
        ExpertMeshError: a tensor is gone, or another.
    """
    recorded = read_marker(path).get("carried")
    if recorded is None or checkpoint.drops_untrained:
        return
    problem = _problem(recorded, checkpoint, path)
    if problem is not None:
        raise ExpertMeshError(
            f"{path}: its exports copy {len(recorded['tensors']):,} tensors that are not trained, but "
            f"{problem}; give the run's first model as --model, or leave the tensors out with "
            "--drop-untrained"
        )


def origin_of(path: Path) -> Path:
    """The directory of the model that the run of a training checkpoint began with.

    Raises:
        ExpertMeshError: it is not known, or no longer there.
    """
    recorded = read_marker(path).get("carried")
    directory = recorded.get("path") if isinstance(recorded, dict) else None
    if not isinstance(directory, str) or not Path(directory).is_dir():
        raise ExpertMeshError(
            f"{path}: --export-encoding source needs the model that the run started from, which is "
            + (f"no longer in {directory}" if isinstance(directory, str) else "not recorded")
            + "; give its place as --base"
        )
    return Path(directory)


def with_carried(
    checkpoint: Checkpoint, marker: dict[str, Any], path: Path, strict: bool, base: Path | None
) -> Checkpoint:
    """A training checkpoint with the tensors that its exports carry over, from where `marker` says that they are.

    Args:
        strict: stop if they are gone, or others; else list it in `problems`.
        base: the model's directory from which they are to be taken instead.

    Raises:
        ExpertMeshError: they are gone, or others; or the marker is not as this version writes it.
    """
    recorded: Any = marker.get("carried")
    check_table(recorded, {"path": str, "dropped": bool, "tensors": dict}, path / MARKER)
    if recorded["dropped"]:
        return checkpoint.dropping_untrained()
    if not recorded["tensors"]:
        return checkpoint
    directory = Path(recorded["path"]) if base is None else base
    carried, problem = _find(checkpoint, recorded, path, directory)
    if problem is None:
        return replace(checkpoint, carried=carried)
    problem = f"{path}: exports copy {len(recorded['tensors']):,} tensors that are not trained, but {problem}"
    if strict:
        raise ExpertMeshError(
            f"{problem}; give the model's place as --base, or leave the tensors out with --drop-untrained"
        )
    return replace(checkpoint, problems=[*checkpoint.problems, problem])


def _find(
    checkpoint: Checkpoint, recorded: dict[str, Any], path: Path, directory: Path
) -> tuple[list[DiskTensor], str | None]:
    """(the recorded tensors in a model's directory, None), or (none, what is wrong)."""
    if not directory.is_dir():
        return [], f"the model that the run started from is no longer in {directory}"
    try:
        opened = open_checkpoint(open_source(directory), checkpoint.names, strict=False)
        problem = _problem(recorded, opened, path)
    except ExpertMeshError as error:
        return [], str(error)
    return [one for one in opened.carried if one.name in recorded["tensors"]] if problem is None else [], problem


def _problem(recorded: dict[str, Any], opened: Checkpoint, path: Path) -> str | None:
    """The first tensor that is not as it was recorded."""
    check_table(recorded, {"tensors": dict}, path / MARKER)
    carried, files = {tensor.name: tensor for tensor in opened.carried}, OpenFiles()
    for name, described in recorded["tensors"].items():
        if name not in carried:
            return f"{name} is missing in {opened.source.path}"
        if _described(carried[name], files) != described:
            return f"{name} is different in {opened.source.path}"
    return None
