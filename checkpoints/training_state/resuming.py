"""Resumes from training checkpoints, on any parallel layout."""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.util.errors import ExpertMeshError
from ...sharding.parallelize.parallelize import zeros_by_rows
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.state import changing_state
from ..files.directories import finish_replacement_of_missing, write_errors
from .marker import check_files, read_marker, whole_checkpoints
from .saving import BEST, Progress, checkpoint_name, sweep, training_state
from .state_table import StateReader, load_state

StateLayout = Literal["rows", "whole", "elsewhere"]
"""How a tensor of an optimizer's state lies on a rank: cut by rows as its parameter is; whole; or not at all."""


class ResumableOptimizer(torch.optim.Optimizer):
    """An optimizer that says how each tensor of its state lies on the ranks: a resume on others asks it."""

    def state_layout(self, parameter: Tensor, key: str) -> StateLayout:
        """How a tensor of a parameter's state lies on this rank: by rows, but the number of steps, which is whole."""
        return "whole" if key == "step" else "rows"


def find_checkpoint(resume: str, directory: Path, patient: Ranks | None = None) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` means, checked to the last byte, and warnings. All ranks call it together.

    Args:
        resume: "auto" for the newest undamaged one in `directory`, if there is any; else the path of one.
        patient: these ranks, as one may take longer to read its files than a collective's time limit.

    Raises:
        ExpertMeshError: the one named is incomplete or damaged; or all that "auto" could take are.
    """
    if resume != "auto":
        with raise_together(), write_errors(Path(resume)):
            if dist.get_rank() == 0:
                finish_replacement_of_missing(Path(resume))
        problem = _check_together(Path(resume), patient)
        if problem is not None:
            raise ExpertMeshError(f"--resume {resume}: {problem}")
        return Path(resume), []
    names: list[Any] = [None]
    with raise_together(patient), write_errors(directory):
        if dist.get_rank() == 0 and directory.is_dir():
            skipped = sweep(directory)
            warnings = [f"{directory / name} is not complete and is skipped" for name in skipped]
            names = [([str(path) for path in whole_checkpoints(directory)], warnings)]
        elif dist.get_rank() == 0:
            names = [([], [])]
    dist.broadcast_object_list(names, src=0)
    candidates, warnings = names[0]
    for candidate in map(Path, candidates):
        problem = _check_together(candidate, patient)
        if problem is None:
            return candidate, warnings
        warnings.append(f"{problem}; it is skipped, and the one before it used")
    if candidates:
        raise ExpertMeshError("--resume auto: no checkpoint is complete: " + "; ".join(warnings))
    return None, warnings


def _check_together(path: Path, patient: Ranks | None) -> str | None:
    """What is wrong with a checkpoint; its files are distributed among the ranks to be read."""
    try:
        with raise_together(patient):
            rank, files = dist.get_rank(), sorted(read_marker(path)["files"].items())
            check_files(path, dict(files[rank :: dist.get_world_size()]), is_told=rank == 0)
    except ExpertMeshError as error:
        return str(error)
    return None


def load_training_state(path: Path, model: nn.Module, optimizer: ResumableOptimizer) -> Progress:
    """Fill a sharded model and its optimizer from a checkpoint that `find_checkpoint` has checked, on any parallel
    layout. The random state is taken over where as many ranks saved it; else each rank seeds its own.

    Raises:
        ExpertMeshError: the checkpoint is of another model or optimizer.
    """
    marker = read_marker(path)
    saved: dict[str, Any] = StateReader(path / "state").read_metadata().state_dict_metadata
    state = _state_to_fill(path, saved, model, optimizer)
    own_rng = f"rng.{dist.get_rank()}."
    if marker["world_size"] == dist.get_world_size():
        state.update(
            {name: torch.empty(saved[name].size, dtype=torch.uint8) for name in saved if name.startswith(own_rng)}
        )
    load_state(state, path / "state")
    fields = ("step", "tokens", "scheduler", "order", "settings", "best")
    progress = Progress(**{key: marker[key] for key in fields}, owed=marker.get("owed", []))  # new in version 3
    if own_rng + "cpu" in state:
        torch.set_rng_state(state[own_rng + "cpu"])
        if own_rng + "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state[own_rng + "cuda"])
    else:
        torch.manual_seed(hash((progress.settings["seed"], progress.step, dist.get_rank())) % 2**62)
    return progress


def load_best_model(directory: Path, model: nn.Module, step: int, patient: Ranks | None = None) -> Path | None:
    """Fill a sharded model with the weights of the best checkpoint in `directory`. All ranks call it together.

    Args:
        step: that it must be of.
        patient: see `find_checkpoint`.

    Returns:
        The checkpoint's path; None if there is none of that step, because it could not be saved.

    Raises:
        ExpertMeshError: on all ranks, when it is damaged.
    """
    link = directory / BEST
    there = [link.exists() and link.resolve().name == checkpoint_name(step)]
    dist.broadcast_object_list(there, src=0)
    if not there[0]:
        return None
    problem = _check_together(link, patient)
    if problem is not None:
        raise ExpertMeshError(f"--load-best-model-at-end: {link}: {problem}")
    parts = changing_state(model).items()
    state = {f"model.{name}": part.tensor.detach() for name, part in parts if part.is_here}
    load_state(state, link / "state")
    return link.resolve()


def _state_to_fill(
    path: Path, saved: dict[str, Any], model: nn.Module, optimizer: ResumableOptimizer
) -> dict[str, Tensor]:
    """The model's own tensors, and an optimizer state made anew with the names and shapes that the checkpoint has."""
    parts = changing_state(model)
    expected = {f"model.{name}" for name in parts}
    found = {name for name in saved if name.startswith("model.")}
    if expected != found:
        name = min(expected ^ found)
        raise ExpertMeshError(
            f"{path}: belongs to another model: {name} is {'missing' if name in expected else 'surplus'}"
        )
    otherwise = set(read_marker(path)["transposed"]) ^ {name for name, part in parts.items() if part.transposed}
    if otherwise:
        raise ExpertMeshError(
            f"{path}: was written with another release of transformers, which stores {min(otherwise)} "
            f"transposed ({len(otherwise)} matrices in all): resume with that release, or start from "
            "its weights, which `expertmesh-checkpoints export` writes in Hugging Face form"
        )
    for name, entry in saved.items():
        if not name.startswith("optimizer."):
            continue
        owner, _, key = name.removeprefix("optimizer.").rpartition(".")
        if not parts[owner].is_here:
            continue
        parameter = parts[owner].tensor
        match optimizer.state_layout(parameter, key):
            case "rows":
                value = zeros_by_rows(parameter, entry.size[1:], entry.properties.dtype)
            case "whole":
                value = torch.zeros(entry.size, dtype=entry.properties.dtype, device=parameter.device)
            case "elsewhere":
                continue
        optimizer.state[parameter][key] = value
    for name, part in parts.items():
        if tuple(saved[f"model.{name}"].size) != part.shape:
            raise ExpertMeshError(
                f"{path}: belongs to another model: {name} has shape {list(saved[f'model.{name}'].size)} "
                f"there, {list(part.shape)} here"
            )
    return training_state(model, optimizer)
