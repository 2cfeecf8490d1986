"""Opening a model directory: its config, its safetensors files, and the names, shapes and dtypes in them.

Only JSON and safetensors are read; nothing is unpickled, and no path from an index leads out of the directory.
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from checkpoints.dtypes import DTYPE_BYTES
from checkpoints.mapping import DiskTensor, Region, disk_tensors, names_on_disk
from checkpoints.output import INDEX_NAME, SINGLE_NAME, OutputTensor
from checkpoints.paths import check_regular, named_file
from moe import ExpertMeshError, Family, MoEShape, check_config, family_of
from moe.families import read_settings

# not "*.safetensors": some repositories hold the weights a second time, as consolidated*.safetensors
_HUB_FILES = ["model*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
# parsed it takes some twenty times as much memory; the largest index and manifest of today have a few MB
_MOST_JSON_BYTES = 64 * 2**20

Parameters = dict[str, tuple[int, ...]]
"""Global shape of every parameter of a model, by name; a tied one appears once."""


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is and where it lies; `offset` is its first byte's in the file, if that is a safetensors file."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True)
class ModelSource:
    """A model directory whose config.json has been read.

    Attributes:
        settings: what config.json says, as far as sizes and names depend on it (see `moe.families.read_settings`).
        shape: of its MoE layers.
    """

    path: Path
    family: Family
    settings: Any
    shape: MoEShape

    @cached_property
    def config(self) -> Any:
        """transformers' own config object, read when it is first asked for: transformers takes seconds to import.

        Raises:
            ExpertMeshError: transformers cannot read config.json, or understands other sizes from it.
        """
        from transformers import AutoConfig

        file = self.path / "config.json"
        try:
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:
            raise ExpertMeshError(f"{file}: transformers cannot read it: {error}") from error
        shape = check_config(self.family, config, str(file))
        if (shape, self.family.parameters(config)) != (self.shape, self.family.parameters(self.settings)):
            raise ExpertMeshError(f"{file}: transformers reads other sizes in it than are written there")
        return config


@dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors files whose tensors have been matched with a model's parameters.

    Attributes:
        source: the directory and its config.
        tensors: what it holds, in the model's order.
        tied_copies: tensors that repeat one of these, as an output projection stored beside the tied embedding does.
        infos: file, shape and dtype of each tensor, by name.
        exported: what a Hugging Face directory of this model holds, in this order.
        row_sums: of each tensor, where the directory has them (see `checkpoints.checksums`).
        files: that hold the weights.
        problems: what does not match, where the caller asked to be told instead of stopped.
    """

    source: ModelSource
    tensors: list[DiskTensor]
    tied_copies: list[DiskTensor]
    infos: dict[str, TensorInfo]
    exported: list[OutputTensor]
    row_sums: dict[str, int] | None = None
    files: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def resolve_model(model: str, flag: str = "--model") -> Path:
    """The directory of `model`: itself, or the local copy of a hub id, downloaded if need be.

    Args:
        flag: how the user gave it, for the error.

    Raises:
        ExpertMeshError: it is neither, or cannot be fetched.
    """
    if not check_model(model, flag):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise ExpertMeshError(
            f"{flag} {model}: no such directory, and not to be had from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


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
    if exists or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ExpertMeshError(f"{flag} {model}: no such directory")
    return True


def open_source(path: Path) -> ModelSource:
    """Read and check config.json, without transformers.

    Raises:
        ExpertMeshError: it is missing, no JSON, of an unknown family, or has impossible sizes.
    """
    file = path / "config.json"
    raw = read_json(file)
    family = family_of(raw.get("model_type"), str(file))
    settings = read_settings(family, raw)
    return ModelSource(path, family, settings, check_config(family, settings, str(file)))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ExpertMeshError: the file is missing, unreadable, too large, no JSON, or no object.
    """
    check_regular(file)
    if file.stat().st_size > _MOST_JSON_BYTES:
        raise ExpertMeshError(f"{file}: has {file.stat().st_size:,} bytes; more than {_MOST_JSON_BYTES:,} are not read")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or a number without end
        raise ExpertMeshError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ExpertMeshError(f"{file}: holds a {type(content).__name__}, not an object")
    return content


def check_fields(table: Any, wanted: dict[str, type], file: Path) -> None:
    """
    Raises:
        ExpertMeshError: a table read from `file` lacks a field, or has something else in its place.
    """
    for name, kind in wanted.items():
        found = table.get(name) if isinstance(table, dict) else None
        if type(found) is not kind:
            raise ExpertMeshError(f"{file}: {name} is {found!r:.80} where a {kind.__name__} should be")


@contextmanager
def well_formed(file: Path) -> Iterator[None]:
    """Around picking apart a table that was read from `file`.

    Raises:
        ExpertMeshError: it is not built as this version builds it: an entry is missing, or is something else.
    """
    try:
        yield
    except ExpertMeshError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ExpertMeshError(f"{file}: is not as this version writes it: {type(error).__name__}: {error}") from error


def open_hf(source: ModelSource, parameters: Parameters, strict: bool = True) -> Checkpoint:
    """Read the headers of all files of a Hugging Face directory and match them with the model's parameters.

    Args:
        strict: stop at what does not match; else list it in `problems` and leave it out of `tensors`.

    Raises:
        ExpertMeshError: a file is missing, truncated or outside the directory; a tensor is missing, unused,
            mis-shaped or of an unsupported dtype. The message names it.
    """
    infos = _read_headers(source.path, source.family)
    names = names_on_disk(infos, source.family)
    tensors = disk_tensors(parameters, source.family, source.shape, names)
    copies = tied_head(parameters, infos)
    wrong = _mismatches(source, tensors + copies, infos)
    if strict and wrong:
        raise ExpertMeshError(f"{source.path}: {next(iter(wrong.values()))}")
    tensors = [tensor for tensor in tensors if tensor.name not in wrong]
    exported = [OutputTensor(tensor, infos[tensor.name].dtype) for tensor in tensors + copies]
    files = sorted({source.path / info.file for info in infos.values()})
    return Checkpoint(source, tensors, copies, infos, exported, files=files, problems=list(wrong.values()))


def tied_head(parameters: Parameters, found: Collection[str]) -> list[DiskTensor]:
    """With tied embeddings some checkpoints hold the output projection as a second copy; it, if it is among `found`."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if head in parameters or head not in found:
        return []
    size = parameters[embedding]
    return [DiskTensor(head, size, (Region(embedding, range(size[0])),))]


def _mismatches(source: ModelSource, tensors: list[DiskTensor], infos: dict[str, TensorInfo]) -> dict[str, str]:
    """What is wrong, by the name of the tensor."""
    wrong = {}
    for tensor in tensors:
        info = infos.get(tensor.name)
        if info is None:
            wrong[tensor.name] = f"tensor {tensor.name} is missing"
        elif info.shape != tensor.shape:
            wrong[tensor.name] = (
                f"tensor {tensor.name} in {info.file} has shape {list(info.shape)}; "
                f"the config asks for {list(tensor.shape)}"
            )
    for name in sorted(set(infos) - {tensor.name for tensor in tensors}):
        wrong[name] = f"tensor {name} in {infos[name].file} has no place in this model; is config.json its own?"
    return wrong


def _read_headers(path: Path, family: Family) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    weight_map = _weight_map(path)
    ignored = [re.compile(pattern) for pattern in family.ignored_on_disk]
    for file in _files(path, weight_map):
        for name, info in read_header(path / file).items():
            if weight_map is not None and weight_map.get(name) != file:
                raise ExpertMeshError(f"{path / file}: tensor {name} is not where {INDEX_NAME} has it")
            if not any(pattern.search(name) for pattern in ignored):
                infos[name] = info
    for name, file in (weight_map or {}).items():
        if name not in infos and not any(pattern.search(name) for pattern in ignored):
            raise ExpertMeshError(f"{path / INDEX_NAME}: tensor {name} is said to be in {file}, which does not hold it")
    return infos


def _weight_map(path: Path) -> dict[str, str] | None:
    """The index's table from tensor to file; None when there is a single file and no index."""
    if not (path / INDEX_NAME).exists():
        return None
    weight_map = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ExpertMeshError(f"{path / INDEX_NAME}: weight_map is no table from tensor names to file names")
    return weight_map


def _files(path: Path, weight_map: dict[str, str] | None) -> list[str]:
    if weight_map is None:
        if not (path / SINGLE_NAME).exists():
            raise ExpertMeshError(f"{path}: neither {SINGLE_NAME} nor {INDEX_NAME} is there")
        return [SINGLE_NAME]
    some_tensor = {file: name for name, file in weight_map.items()}
    for file, name in some_tensor.items():
        named_file(path, file, INDEX_NAME, entry=f"tensor {name:.200}")
    return sorted(some_tensor)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor in a safetensors file.

    Raises:
        ExpertMeshError: the file is missing, truncated or no safetensors file, or has a tensor of another dtype
            than fp32, bf16 or fp16.
    """
    check_regular(file)
    infos = {}
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
                infos[name] = TensorInfo(file.name, shape, dtype, offset)
                offset += prod(shape) * DTYPE_BYTES[dtype]
    except (SafetensorError, OSError) as error:
        raise ExpertMeshError(f"{file}: not a whole safetensors file: {error}") from error
    return infos
