"""Headers of safetensors files: names, shapes and dtypes of tensors, and where they lie.

Nothing is unpickled, and no path from an index leads out of the directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from ...moe.util.errors import ExpertMeshError
from ..files.dtype_names import DTYPE_BYTES
from ..files.file_layout import INDEX_NAME, SINGLE_NAME
from ..files.paths import check_regular, named_file
from ..files.tensors import StoredTensor
from .json_files import read_json

if TYPE_CHECKING:
    pass


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor in the files of a Hugging Face directory.

    Raises:
        ExpertMeshError: a file is missing, damaged or outside the directory, or not as the index has it.
    """
    stored: dict[str, StoredTensor] = {}
    weight_map = read_weight_map(path)
    for file in _files(path, weight_map):
        for name, part in read_header(path / file).items():
            if weight_map is not None and weight_map.get(name) != file:
                raise ExpertMeshError(f"{path / file}: tensor {name} is not where {INDEX_NAME} says")
            stored[name] = part
    for name, file in (weight_map or {}).items():
        if name not in stored:
            raise ExpertMeshError(
                f"{path / INDEX_NAME}: says that tensor {name} is in {file}, which does not contain it"
            )
    return stored


def read_weight_map(path: Path) -> dict[str, str] | None:
    """The index's table from tensor to file; None when there is a single file and no index."""
    if not (path / INDEX_NAME).exists():
        return None
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ExpertMeshError(f"{path / INDEX_NAME}: weight_map must be a table from tensor names to file names")
    return weight_map


def weight_files(path: Path) -> list[Path]:
    """The files of a Hugging Face directory that hold tensors.

    Raises:
        ExpertMeshError: one is missing or outside the directory, or the index is damaged.
    """
    return [path / file for file in _files(path, read_weight_map(path))]


def _files(path: Path, weight_map: dict[str, str] | None) -> list[str]:
    if weight_map is None:
        if not (path / SINGLE_NAME).exists():
            raise ExpertMeshError(f"{path}: has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return [SINGLE_NAME]
    some_tensor = {file: name for name, file in weight_map.items()}
    for file, name in some_tensor.items():
        named_file(path, file, INDEX_NAME, entry=f"tensor {name:.200}")
    return sorted(some_tensor)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor in a safetensors file.

    Raises:
        ExpertMeshError: the file is missing, truncated or no safetensors file, or has a tensor of a dtype that is not
            known.
    """
    check_regular(file)
    stored = {}
    try:
        with open(file, "rb") as stream:
            offset = 8 + int.from_bytes(stream.read(8), "little")
        with safe_open(file, framework="np") as handle:
            # the library has checked that they follow one another without a gap, to the end of the file
            for name in handle.offset_keys():
                part = handle.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if dtype not in DTYPE_BYTES:
                    raise ExpertMeshError(
                        f"{file}: tensor {name} has dtype {dtype}; it must be one of {', '.join(DTYPE_BYTES)}"
                    )
                stored[name] = StoredTensor(name, shape, dtype, file, offset)
                offset += stored[name].num_bytes
    except (SafetensorError, OSError) as error:
        raise ExpertMeshError(f"{file}: not a complete safetensors file: {error}") from error
    return stored
