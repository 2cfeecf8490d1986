"""Tensors that are not trained, beside training checkpoints: these do not hold them, and record where they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...moe.util.errors import ExpertMeshError
from ..ep_shards.manifest import open_checkpoint
from ..hf.source import Checkpoint, check_fields, open_source
from ..hf.untrained_tensors import Carried
from .marker import MARKER, read_marker


def record(origin: Checkpoint) -> dict[str, Any]:
    """What checkpoint.json says of the tensors that exports carry over from `origin`.

    Raises:
        ExpertMeshError: a file of theirs cannot be read.
    """
    return {
        "path": str(origin.source.path.resolve()),
        "dropped": origin.drops_untrained,
        "tensors": {tensor.name: _described(tensor) for tensor in origin.carried},
    }


def _described(tensor: Carried) -> dict[str, Any]:
    return {"shape": list(tensor.info.shape), "dtype": tensor.info.dtype, "sample": tensor.sample()}


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
            f"{path}: its exports copy {len(recorded['tensors']):,} tensors that are not trained, but {problem}; "
            "give --model the model that the run began with, or leave them out with --drop-untrained"
        )


def origin_of(path: Path) -> Path:
    """The directory of the model that the run of a training checkpoint began with.

    Raises:
        ExpertMeshError: it is not known, or no longer there.
    """
    recorded = read_marker(path).get("carried")
    said = recorded.get("path") if isinstance(recorded, dict) else None
    if not isinstance(said, str) or not Path(said).is_dir():
        raise ExpertMeshError(
            f"{path}: --export-encoding source takes the model that the run began with, which is "
            + (f"no longer in {said}" if isinstance(said, str) else "not recorded")
            + "; say with --base where it is"
        )
    return Path(said)


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
    check_fields(recorded, {"path": str, "dropped": bool, "tensors": dict}, path / MARKER)
    if recorded["dropped"]:
        return checkpoint.dropping_untrained()
    if not recorded["tensors"]:
        return checkpoint
    directory = Path(recorded["path"]) if base is None else base
    found, problem = _find(checkpoint, recorded, path, directory)
    if problem is None:
        return replace(checkpoint, carried=found)
    said = f"{path}: exports copy {len(recorded['tensors']):,} tensors that are not trained, but {problem}"
    if strict:
        raise ExpertMeshError(f"{said}; say with --base where that model is now, or do without by --drop-untrained")
    return replace(checkpoint, problems=[*checkpoint.problems, said])


def _find(
    checkpoint: Checkpoint, recorded: dict[str, Any], path: Path, directory: Path
) -> tuple[list[Carried], str | None]:
    """(the recorded tensors in a model's directory, None), or (none, what is wrong)."""
    if not directory.is_dir():
        return [], f"the model that the run began with is no longer in {directory}"
    try:
        found = open_checkpoint(open_source(directory), checkpoint.source.names, strict=False)
        problem = _problem(recorded, found, path)
    except ExpertMeshError as error:
        return [], str(error)
    return [one for one in found.carried if one.name in recorded["tensors"]] if problem is None else [], problem


def _problem(recorded: dict[str, Any], found: Checkpoint, path: Path) -> str | None:
    """The first tensor that is not as it was recorded."""
    check_fields(recorded, {"tensors": dict}, path / MARKER)
    carried = {tensor.name: tensor for tensor in found.carried}
    for name, described in recorded["tensors"].items():
        if name not in carried:
            return f"{name} is missing in {found.source.path}"
        if _described(carried[name]) != described:
            return f"{name} is another in {found.source.path}"
    return None
