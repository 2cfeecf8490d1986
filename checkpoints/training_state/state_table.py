"""Reads the state of a training checkpoint, written by `torch.distributed.checkpoint`, and runs no code of its own.

The table of a state, `.metadata`, is a pickle, which can call whatever it names when it is read. Here it can name only
what such a table is made of.
"""

import io
import pickle
import zipfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ...moe.util.errors import ExpertMeshError
from ...moe.util.progress import CountedProgress
from ...sharding.state import local_tensor
from ..files.dtype_names import DTYPE_BYTES, DTYPE_CODES
from ..files.dtypes import ARRAY_TYPES, Array, as_bytes
from ..files.open_files import OpenFiles
from ..files.paths import check_regular, named_file
from ..files.tensors import ByRows
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


@dataclass
class Chunk:
    """A box of a tensor, as a rank has written it.

    Attributes:
        box: the indices that it covers, along each dim; of a scalar none.
        file, offset, length: where what `torch.save` made of it lies.
        data: where its values begin in the file, once that is known.
    """

    box: tuple[range, ...]
    file: Path
    offset: int
    length: int
    data: int | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.box))

    @property
    def rows(self) -> range:
        """Along dim 0; a scalar is one row."""
        return self.box[0] if self.box else range(1)


class StateTable:
    """Where the directory `state` of a training checkpoint has the rows of each tensor. For several threads.

    Attributes:
        tensors: (shape, dtype as torch has it) by name.

    Raises:
        ExpertMeshError: its table cannot be read.
    """

    def __init__(self, path: Path):
        metadata: Any = StateReader(path).read_metadata()
        self.path = path
        saved = metadata.state_dict_metadata.items()
        self.tensors = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in saved}
        chunks: dict[str, list[tuple[range, Chunk]]] = {}
        try:
            sizes = {(name, tuple(each.offsets)): tuple(each.sizes) for name, entry in saved for each in entry.chunks}
            for index, info in metadata.storage_data.items():
                begin = tuple(index.offset or ())
                size = sizes[index.fqn, begin]
                box = tuple(range(at, at + length) for at, length in zip(begin, size, strict=True))
                chunk = Chunk(box, path / info.relative_path, info.offset, info.length)
                chunks.setdefault(index.fqn, []).append((chunk.rows, chunk))
        except Exception as error:  # a damaged table may hold anything
            raise ExpertMeshError(f"{path / METADATA}: cannot be read: {type(error).__name__}: {error}") from error
        self._chunks = {name: ByRows(own) for name, own in chunks.items()}

    def dtype(self, name: str) -> str:
        """A tensor's, by its code."""
        return DTYPE_CODES[str(self.tensors[name][1])]

    def rows(self, name: str, rows: range, files: OpenFiles) -> Array:
        """Rows (of dim 0) of a tensor; of a scalar, itself.

        Raises:
            ExpertMeshError: they are not all there, or cannot be read.
        """
        shape, code = self.tensors[name][0], self.dtype(name)
        data = np.empty((len(rows), *shape[1:]), ARRAY_TYPES[code])
        missing = data.size
        for chunk, shared in self._chunks[name].sharing(rows) if name in self._chunks else ():
            others = (slice(run.start, run.stop) for run in chunk.box[1:])
            place = data[slice(shared.start - rows.start, shared.stop - rows.start), *others]
            if place.shape[1:] != chunk.shape[1:]:
                raise ExpertMeshError(f"{self.path}: a part of {name} reaches beyond the tensor")
            missing -= place.size
            into = place if place.flags.c_contiguous else np.empty(place.shape, place.dtype)
            row_bytes = prod(chunk.shape[1:]) * DTYPE_BYTES[code]
            begin = self._data(chunk, name, files) + (shared.start - chunk.rows.start) * row_bytes
            files.fill(chunk.file, as_bytes(into), begin)
            if into is not place:
                place[...] = into
        if missing:
            raise ExpertMeshError(f"{self.path}: dim-0 slices of {name} are missing, or there twice")
        return data

    def _data(self, chunk: Chunk, name: str, files: OpenFiles) -> int:
        """Where a chunk's values begin in its file."""
        if chunk.data is None:
            try:
                chunk.data = chunk.offset + _begin_of_values(_Part(chunk, files), chunk.shape, self.tensors[name][1])
            except ExpertMeshError:
                raise
            except Exception as error:  # a damaged zip file or pickle can raise anything
                raise ExpertMeshError(
                    f"{chunk.file}: {name} cannot be read: {type(error).__name__}: {error}"
                ) from error
        return chunk.data


class _Part(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, chunk: Chunk, files: OpenFiles):
        self.chunk, self.files, self.place = chunk, files, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.chunk.length}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self.chunk.length - self.place)]
        self.files.fill(self.chunk.file, wanted, self.chunk.offset + self.place)
        self.place += len(wanted)
        return len(wanted)


_VALUES = "/data/0"
"""What the name of a tensor's values ends with in what `torch.save` writes, which is a zip file without compression."""
_LOCAL_HEADER = 30
"""Bytes before the name of a file in a zip file; the last four are the lengths of that name, and of what follows."""


def _begin_of_values(file: _Part, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where the values of a saved tensor begin.

    Raises:
        ValueError: it is another tensor, or does not lie in the order of its rows.
    """
    with zipfile.ZipFile(file) as archive:
        values = next(info for info in archive.infolist() if info.filename.endswith(_VALUES))
        about = archive.getinfo(values.filename.removesuffix(_VALUES) + "/data.pkl")
        if {values.compress_type, about.compress_type} != {zipfile.ZIP_STORED}:
            raise ValueError("it is compressed")
        described = archive.read(about)
    begin, *found = _TensorUnpickler(io.BytesIO(described)).load()
    if found != [shape, _strides(shape), dtype] and prod(shape):
        raise ValueError(f"it is not a tensor of shape {list(shape)} and {dtype}, in the order of its rows")
    if values.file_size < (begin + prod(shape)) * dtype.itemsize:
        raise ValueError("its values are not all there")
    file.seek(values.header_offset)
    header = file.read(_LOCAL_HEADER)
    assert header is not None
    lengths = int.from_bytes(header[-4:-2], "little") + int.from_bytes(header[-2:], "little")
    return values.header_offset + _LOCAL_HEADER + lengths + begin * dtype.itemsize


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


_STORAGES = {
    "FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "BoolStorage": torch.bool,
}  # fmt: skip
"""What `torch.save` calls the memory of the dtypes that models have."""


class _TensorUnpickler(pickle.Unpickler):
    """Reads what `torch.save` says of one tensor: (offset, shape, strides, dtype), and makes no tensor of it."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2":
                return lambda storage, offset, shape, strides, *_: (offset, tuple(shape), tuple(strides), storage)
            case "torch._utils", "_rebuild_parameter":
                return lambda tensor, *_: tensor
            case "torch", storage if storage in _STORAGES:
                return _STORAGES[storage]
            case "collections", "OrderedDict":
                return dict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which checkpoints never use")

    def persistent_load(self, said: Any) -> Any:
        """The dtype of a storage, in the place of the storage."""
        return said[1]


class _Telling(DefaultLoadPlanner):
    """Tells of each piece of a tensor that is read."""

    def __init__(self, progress: CountedProgress):
        super().__init__()
        self.progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.progress.add(tensor.nbytes)


def load_state(state: dict[str, Tensor], path: Path) -> None:
    """Fill tensors from the directory `state` of a training checkpoint. All ranks call it together.

    Raises:
        ExpertMeshError: on all ranks, when a tensor is missing or cannot be read.
    """
    total = sum(local_tensor(tensor).nbytes for tensor in state.values())
    try:
        with CountedProgress(f"reading {path.parent}", total, is_shown=dist.get_rank() == 0) as progress:
            dcp.load(state, storage_reader=StateReader(path), planner=_Telling(progress))
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
