"""Training checkpoints as sources of exports and comparisons, outside of any process group."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...moe.util.errors import ExpertMeshError
from ...sharding.topology import rows_of
from ..ep_shards.manifest import exported_from
from ..files.dtype_names import DTYPE_CODES
from ..files.dtypes import Array, as_array, torch_dtype
from ..files.tensors import DiskTensor, Region
from ..hf.checkpoint import Checkpoint
from ..hf.json_files import well_formed
from ..hf.source import open_source
from .marker import MARKER, check_file, read_marker, with_carried
from .state_table import StateReader, load_state


class TrainingReader:
    """A `ParameterReader` of the model in a training checkpoint, outside of any process group: one full parameter is
    held at a time."""

    def __init__(self, checkpoint: Checkpoint):
        self.tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self.path = checkpoint.path
        self.parameter, self.content = "", torch.empty(0)

    def rows(self, parameter: str, rows: range) -> tuple[Array, str]:
        tensor = self.tensors[parameter]
        if parameter != self.parameter:
            content = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
            load_state({f"model.{parameter}": content}, self.path / "state", no_dist=True)
            content = content.t() if tensor.regions[0].transposed else content
            self.parameter, self.content = parameter, content.view(-1) if content.dim() == 0 else content
        return as_array(self.content[rows.start : rows.stop]), tensor.dtype

    def close(self) -> None:
        self.parameter, self.content = "", torch.empty(0)


def open_training(path: Path, strict: bool = True, base: Path | None = None) -> Checkpoint:
    """A training checkpoint as a source for exports and comparisons, every file checked.

    Args:
        strict: stop where tensors that are not trained are no longer where the checkpoint says; else list it.
        base: the directory of the model that they are to be taken from instead.

    Raises:
        ExpertMeshError: it is damaged or incomplete.
    """
    marker = read_marker(path)
    if marker.get("base") is not None:
        raise ExpertMeshError(
            f"{path}: contains only adapters, not the base model; resume from it, with "
            "--max-steps at its step, to export them"
        )
    for file, described in marker["files"].items():
        check_file(path, file, described)
    source = replace(open_source(path / "model"), images=bool(marker["settings"].get("images")))
    if marker["settings"].get("train_mtp"):
        with well_formed(path / MARKER):
            source = source.training_mtp([str(entry["name"]) for entry in marker["exported"]])
    names = source.names
    saved = StateReader(path / "state").read_metadata().state_dict_metadata
    tensors = []
    recorded = set(marker["transposed"])
    for name in recorded:
        if len(names.parameters.get(name, ())) != 2:
            raise ExpertMeshError(f"{path / MARKER}: transposed lists {name!r:.80}, not a matrix of this model")
    otherwise = recorded ^ names.transposed
    for name, held in names.parameters.items():
        entry: Any = saved.get(f"model.{name}")
        shape = held[::-1] if name in otherwise else held
        if entry is None or tuple(entry.size) != shape:
            raise ExpertMeshError(f"{path}: {name} is missing, or its shape does not match model/config.json")
        if str(entry.properties.dtype) not in DTYPE_CODES:
            raise ExpertMeshError(f"{path}: {name} has dtype {entry.properties.dtype}, not one of a checkpoint")
        region = Region(name, range(rows_of(held)), transposed=name in otherwise)
        tensors.append(DiskTensor(name, shape, DTYPE_CODES[str(entry.properties.dtype)], (region,)))
    with well_formed(path / MARKER):
        exported = exported_from(marker["exported"], names)
    files = [path / name for name in marker["files"] if name.startswith("state/")]
    opened = Checkpoint(path, source, names, tensors, exported, files=files)
    checkpoint = with_carried(opened, marker, path, strict, base)
    return replace(checkpoint, make_reader=lambda: TrainingReader(opened))
