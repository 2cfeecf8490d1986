"""Tensors of a checkpoint that no trained module has: a vision tower's, say, or those of layers for multi-token
prediction. They are carried over, from one form to the other and into exports, as ranges of files: byte for byte, and
never through a device or another rank's memory. Encoded ones are dequantized where the rest of the model is."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import xxhash

from ...moe.util.errors import ExpertMeshError
from ..files.dtype_names import DTYPE_BYTES
from ..files.dtypes import ARRAY_TYPES, Array, as_bytes, contiguous
from ..files.file_layout import OutputTensor, Strip, at_once
from ..files.open_files import OpenFiles
from ..files.tensors import DiskTensor, Region, StoredTensor
from .reader import SafetensorsReader

_PIECE_BYTES = 16 * 2**20
_SAMPLE_BYTES = 4096


def carried_outputs(carried: Iterable[DiskTensor], summed: bool = False) -> Iterator[OutputTensor]:
    """Tensors as a Hugging Face directory has them; encoded ones dequantized."""
    files = OpenFiles()
    for tensor in carried:
        yield _output(StoredTensor(tensor.name, tensor.shape, tensor.dtype), tensor, summed, files)


def carried_as_stored(carried: Iterable[DiskTensor], summed: bool = False) -> Iterator[OutputTensor]:
    """Tensors as they are stored; of encoded ones, codes and scales."""
    files = OpenFiles()
    for part in (part for tensor in carried for part in tensor.parts):
        yield _output(part, DiskTensor(part.name, part.shape, part.dtype, parts=(part,)), summed, files)


def _output(part: StoredTensor, tensor: DiskTensor, summed: bool, files: OpenFiles) -> OutputTensor:
    def content(_: Strip, __: Sequence[Array]) -> Iterator[tuple[Array, int]]:
        return ((data, 0) for data in carried_values(tensor, files))

    return OutputTensor(part, tensor, at_once(), content, "bytes" if summed else None)


def carried_values(tensor: DiskTensor, files: OpenFiles) -> Iterator[Array]:
    """The values, dequantized, as flat arrays of whole rows (of the last dim) and at most 16 MiB; a longer row comes in
    parts.

    Args:
        files: what they are read with; stays open.

    Raises:
        ExpertMeshError: a file cannot be read, or does not match its checksum.
    """
    if tensor.encoding is None:
        for data in stored_bytes(tensor.parts[0], files):
            yield data.view(ARRAY_TYPES[tensor.dtype])
        return
    *stack, rows, columns = tensor.shape
    flat = replace(tensor, shape=(prod(stack), rows, columns))
    reader = SafetensorsReader(files=files)
    step = max(1, _PIECE_BYTES // (columns * DTYPE_BYTES[tensor.dtype]))
    for number in range(prod(stack)):
        region = Region(tensor.name, range(rows), (number,))
        for start in range(0, rows, step):
            data = reader.read(flat, region, range(start, min(start + step, rows)))
            yield contiguous(data).reshape(-1)


def stored_bytes(stored: StoredTensor, files: OpenFiles) -> Iterator[Array]:
    """What a file has of a tensor, in pieces of bytes.

    Raises:
        ExpertMeshError: the file cannot be read, or does not match the tensor's checksum.
    """
    digest = xxhash.xxh3_64()
    row = max(1, stored.shape[-1] if stored.shape else 1) * DTYPE_BYTES[stored.dtype]
    step = _PIECE_BYTES // row * row or _PIECE_BYTES
    end = stored.offset + stored.num_bytes
    for start in range(stored.offset, end, step):
        data = np.empty(min(step, end - start), np.uint8)
        files.fill(stored.file, as_bytes(data), start)
        if stored.checksum is not None:
            digest.update(as_bytes(data))
        yield data
    if stored.checksum is not None and stored.checksum != digest.intdigest():
        raise ExpertMeshError(f"{stored.file}: is damaged: the content of {stored.name} does not match its checksum")


def check_carried_bytes(carried: Iterable[DiskTensor]) -> None:
    """
    Raises:
        ExpertMeshError: what is stored of a tensor does not match its checksums, if it has any, or cannot be read.
    """
    files = OpenFiles()
    for part in (part for tensor in carried for part in tensor.parts):
        if part.checksum is not None:
            for _ in stored_bytes(part, files):
                pass


def sample(tensor: DiskTensor, files: OpenFiles) -> str:
    """XXH3-128 of the stored bytes' beginnings, middles and ends, in hex.

    Raises:
        ExpertMeshError: a file cannot be read.
    """
    digest = xxhash.xxh3_128()
    for part in tensor.parts:
        size = part.num_bytes
        for start in sorted({0, max(0, size // 2 - _SAMPLE_BYTES), max(0, size - _SAMPLE_BYTES)}):
            data = memoryview(bytearray(min(_SAMPLE_BYTES, size - start)))
            files.fill(part.file, data, part.offset + start)
            digest.update(data)
    return digest.hexdigest()


def summarize(carried: Sequence[DiskTensor], others: Iterable[str]) -> str:
    """How many tensors, how large, and of which modules, as in "33 tensors (0.8 GB): model.visual (24), mtp (9)".

    Args:
        others: names of the tensors that are trained.
    """
    size = sum(tensor.num_bytes for tensor in carried)
    total = f"{size / 1e9:,.1f} GB" if size >= 10**8 else f"{size / 1e6:,.1f} MB"
    return f"{len(carried):,} tensors ({total}): {by_module([tensor.name for tensor in carried], others)}"


def by_module(names: Iterable[str], others: Iterable[str]) -> str:
    """The modules of tensors, and how many each has; a module is the least deep that has none of the `others`."""
    taken = {name[:end] for name in others for end, char in enumerate(name) if char == "."}

    def module(name: str) -> str:
        parts = name.split(".")
        return next((path for n in range(1, len(parts)) if (path := ".".join(parts[:n])) not in taken), name)

    counts = Counter(map(module, names))
    return ", ".join([f"{each} ({count:,})" for each, count in list(counts.items())[:4]] + ["..."] * (len(counts) > 4))
