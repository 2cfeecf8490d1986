"""Reads the state of a training checkpoint, written by `torch.distributed.checkpoint`, and runs no code of its own.

The table of a state, `.metadata`, is a pickle, which can call whatever it names when it is read. Here it can name only
what such a table is made of.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...moe.util.errors import ExpertMeshError
from ..files.paths import check_regular, named_file
from .marker import METADATA

_TABLE = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    *(("torch.distributed.checkpoint.metadata", name) for name in _TABLE),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which checkpoints never use")


class StateReader(FileSystemReader):
    """A `FileSystemReader` of the directory `state`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """
        Raises:
            ExpertMeshError: it is no table of tensors, or names a file elsewhere.
        """
        directory = Path(self.path)
        check_regular(directory / METADATA)
        try:
            with open(directory / METADATA, "rb") as stream:
                metadata: Metadata = _Unpickler(stream).load()
            metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
            for name, entry in metadata.state_dict_metadata.items():
                if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.size, torch.Size):
                    raise ValueError(f"{name} is not a tensor")
                if not isinstance(entry.properties.dtype, torch.dtype):
                    raise ValueError(f"{name} has no dtype")
            files = {info.relative_path for info in metadata.storage_data.values()}
        except Exception as error:  # a damaged pickle can raise anything
            raise ExpertMeshError(f"{directory / METADATA}: cannot be read: {type(error).__name__}: {error}") from error
        for file in files:
            named_file(directory, file, METADATA)
        return metadata


def load_state(state: dict[str, Tensor], path: Path, no_dist: bool = False) -> None:
    """Fill tensors from the directory `state` of a training checkpoint. With `no_dist` outside of any process group,
    else all ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when a tensor is missing or cannot be read.
    """
    try:
        dcp.load(state, storage_reader=StateReader(path), no_dist=no_dist)
    except (dcp.api.CheckpointException, Exception) as error:
        raise ExpertMeshError(f"{path}: cannot be read: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """The innermost cause in a line: DCP wraps what each rank met in several layers."""
    failures = getattr(error, "failures", None)
    if failures:
        first = failures[min(failures)]
        error = first[0] if isinstance(first, tuple) else first
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
