"""Tensors of a checkpoint that no trained module has: a vision tower's, say, or those of layers for multi-token
prediction. They are carried over, from one form to the other and into exports, as ranges of files: byte for byte, and
never through a device or another rank's memory. Encoded ones are dequantized where the rest of the model is."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...moe.util.errors import ExpertMeshError
from ..files.dtype_names import DTYPE_BYTES
from ..files.dtypes import ARRAY_TYPES, Array, as_bytes, contiguous
from ..files.encodings import TensorInfo
from ..files.file_layout import DiskTensor, OutputTensor, Region
from ..files.paths import check_regular, fill_from
from .reader import SafetensorsReader

_PIECE_BYTES = 16 * 2**20
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Carried:
    """A tensor that is carried over.

    Attributes:
        info: what it is, or, if it is encoded, what it stands for.
        stored: the tensor itself as its file has it; or its codes and their scales. By name.
        directory: where their files are.
        checksums: XXH3-64 of the bytes of each that is stored, by name, where the directory has them.
    """

    name: str
    info: TensorInfo
    stored: dict[str, TensorInfo]
    directory: Path
    checksums: dict[str, int] | None = None

    @property
    def num_bytes(self) -> int:
        """As it is stored."""
        return sum(_num_bytes(info) for info in self.stored.values())

    @property
    def files(self) -> set[Path]:
        """Those in which it lies."""
        return {self.directory / info.file for info in self.stored.values()}

    def in_hf_form(self) -> OutputTensor:
        """The tensor as a Hugging Face directory has it; an encoded one dequantized."""
        return OutputTensor(DiskTensor(self.name, self.info.shape, ()), self.info.dtype, content=self.values)

    def as_stored(self) -> Iterator[OutputTensor]:
        """The tensor as it is stored; of an encoded one, codes and scales."""
        for name, info in self.stored.items():
            yield OutputTensor(DiskTensor(name, info.shape, ()), info.dtype, content=partial(self._bytes_of, name))

    def values(self) -> Iterator[Array]:
        """The values, dequantized, as flat arrays of whole rows (of the last dim) and at most 16 MiB; a longer row
        comes in parts.

        Raises:
            ExpertMeshError: a file cannot be read, or does not match its checksum.
        """
        if self.info.encoding is not None:
            yield from self._dequantized()
            return
        for data in self._bytes_of(self.name):
            yield data.view(ARRAY_TYPES[self.info.dtype])

    def _dequantized(self) -> Iterator[Array]:
        *stack, rows, columns = self.info.shape
        tensor = DiskTensor(self.name, (prod(stack), rows, columns) if stack else (rows, columns), ())
        reader = SafetensorsReader(self.directory, {self.name: self.info}, [])
        step = max(1, _PIECE_BYTES // (columns * DTYPE_BYTES[self.info.dtype]))
        for index in [(number,) for number in range(prod(stack))] if stack else [()]:
            region = Region(self.name, range(rows), index)
            for start in range(0, rows, step):
                for piece in reader.region_pieces(tensor, region, range(start, min(start + step, rows))):
                    yield contiguous(piece.data).reshape(-1)
        reader.close()

    def _bytes_of(self, name: str) -> Iterator[Array]:
        """What is stored under a name, in pieces of bytes."""
        info, digest = self.stored[name], xxhash.xxh3_64()
        path = self.directory / info.file
        row = max(1, info.shape[-1] if info.shape else 1) * DTYPE_BYTES[info.dtype]
        step = _PIECE_BYTES // row * row or _PIECE_BYTES
        end = info.offset + _num_bytes(info)
        with _opened(path) as file:
            for start in range(info.offset, end, step):
                data = np.empty(min(step, end - start), np.uint8)
                fill_from(file.fileno(), as_bytes(data), start, path)
                digest.update(as_bytes(data))
                yield data
        if self.checksums is not None and self.checksums[name] != digest.intdigest():
            raise ExpertMeshError(f"{path}: is damaged: the content of {name} does not match its checksum")

    def check(self) -> None:
        """
        Raises:
            ExpertMeshError: what is stored does not match its checksums, if it has any, or cannot be read.
        """
        for name in self.checksums or ():
            for _ in self._bytes_of(name):
                pass

    def sample(self) -> str:
        """XXH3-128 of the stored bytes' beginnings, middles and ends, in hex.

        Raises:
            ExpertMeshError: a file cannot be read.
        """
        digest = xxhash.xxh3_128()
        for info in self.stored.values():
            path, size = self.directory / info.file, _num_bytes(info)
            with _opened(path) as file:
                for start in sorted({0, max(0, size // 2 - _SAMPLE_BYTES), max(0, size - _SAMPLE_BYTES)}):
                    data = memoryview(bytearray(min(_SAMPLE_BYTES, size - start)))
                    fill_from(file.fileno(), data, info.offset + start, path)
                    digest.update(data)
        return digest.hexdigest()


def find_carried(
    names: Iterable[str], infos: dict[str, TensorInfo], stored: dict[str, TensorInfo], directory: Path
) -> list[Carried]:
    """The tensors of these names.

    Args:
        infos: what they are, or stand for, by name.
        stored: all tensors as the files in `directory` have them, by name.
    """
    found = []
    for name in names:
        info = infos[name]
        parts = [name] if info.scales is None else [info.scales.codes, info.scales.name]
        found.append(Carried(name, info, {part: stored[part] for part in parts}, directory))
    return found


def summary(carried: Iterable[Carried], others: Iterable[str]) -> str:
    """How many tensors, how large, and of which modules, as in "33 tensors (0.8 GB): model.visual (24), mtp (9)".

    Args:
        others: names of the tensors that are trained.
    """
    carried = list(carried)
    size = sum(tensor.num_bytes for tensor in carried)
    return f"{len(carried):,} tensors ({_size(size)}): {by_module([tensor.name for tensor in carried], others)}"


def by_module(names: Iterable[str], others: Iterable[str]) -> str:
    """The modules of tensors, and how many each has; a module is the least deep that has none of the `others`."""
    taken = {name[:end] for name in others for end, char in enumerate(name) if char == "."}
    modules = Counter(_module(name, taken) for name in names)
    told = [f"{module} ({count:,})" for module, count in list(modules.items())[:4]] + ["..."] * (len(modules) > 4)
    return ", ".join(told)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:,.1f} MB"


def _module(name: str, taken: set[str]) -> str:
    parts = name.split(".")
    return next((path for n in range(1, len(parts)) if (path := ".".join(parts[:n])) not in taken), name)


def _num_bytes(info: TensorInfo) -> int:
    return prod(info.shape) * DTYPE_BYTES[info.dtype]


def _opened(path: Path) -> Any:
    check_regular(path)
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise ExpertMeshError(f"{path}: cannot be read: {error.strerror}") from error
