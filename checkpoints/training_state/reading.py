"""Training checkpoints as sources of exports and comparisons, outside of any process group."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ...moe.util.errors import ExpertMeshError
from ...sharding.topology import rows_of
from ..ep_shards.manifest import exported_from
from ..files.dtype_names import DTYPE_CODES
from ..files.dtypes import Array
from ..files.open_files import OpenFiles
from ..files.tensors import DiskTensor, Region
from ..hf.checkpoint import Checkpoint
from ..hf.json_files import well_formed
from ..hf.source import open_source
from .marker import MARKER, check_files, read_marker, with_carried
from .state_table import StateTable


class TrainingReader:
    """A `ParameterReader` of the model in a training checkpoint, outside of any process group. It reads the rows that
    are asked for; of a matrix that is to be turned, which is none of experts', all, and keeps the last one."""

    def __init__(self, checkpoint: Checkpoint, table: StateTable):
        self.regions = {tensor.name: tensor.regions[0] for tensor in checkpoint.tensors}
        self.table, self.files = table, OpenFiles()
        self.turned = lru_cache(1)(self._turned)

    def rows(self, parameter: str, rows: range) -> tuple[Array, str]:
        name = f"model.{parameter}"
        if self.regions[parameter].transposed:
            data = self.turned(name)[rows.start : rows.stop]
        else:
            data = self.table.rows(name, rows, self.files)
        return data, self.table.dtype(name)

    def _turned(self, name: str) -> Array:
        num_rows = self.table.tensors[name][0][0]
        return self.table.rows(name, range(num_rows), self.files).T

    def close(self) -> None:
        self.files.close()
        self.turned.cache_clear()


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
    check_files(path, marker["files"])
    source = replace(open_source(path / "model"), images=bool(marker["settings"].get("images")))
    if marker["settings"].get("train_mtp"):
        with well_formed(path / MARKER):
            source = source.training_mtp([str(entry["name"]) for entry in marker["exported"]])
    names = source.names
    table = StateTable(path / "state")
    tensors = []
    recorded = set(marker["transposed"])
    for name in recorded:
        if len(names.parameters.get(name, ())) != 2:
            raise ExpertMeshError(f"{path / MARKER}: transposed lists {name!r:.80}, not a matrix of this model")
    otherwise = recorded ^ names.transposed
    for name, held in names.parameters.items():
        found, dtype = table.tensors.get(f"model.{name}", (None, None))
        shape = held[::-1] if name in otherwise else held
        if found != shape:
            raise ExpertMeshError(f"{path}: {name} is missing, or its shape does not match model/config.json")
        if str(dtype) not in DTYPE_CODES:
            raise ExpertMeshError(f"{path}: {name} has dtype {dtype}, not one of a checkpoint")
        region = Region(name, range(rows_of(held)), transposed=name in otherwise)
        tensors.append(DiskTensor(name, shape, DTYPE_CODES[str(dtype)], (region,)))
    with well_formed(path / MARKER):
        exported = exported_from(marker["exported"], names)
    files = [path / name for name in marker["files"] if name.startswith("state/")]
    opened = Checkpoint(path, source, names, tensors, exported, files=files)
    checkpoint = with_carried(opened, marker, path, strict, base)
    return replace(checkpoint, make_reader=lambda: TrainingReader(opened, table))
