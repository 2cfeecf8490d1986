"""Laying tensors out in safetensors files: which goes into which, and the bytes of each file's header."""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

from .dtypes import DTYPE_BYTES, Array
from .encodings import Encoding
from .mapping import DiskTensor

if TYPE_CHECKING:
    from ..hf.requantized import Requantized

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written, and its dtype on disk (see `checkpoints.files.dtypes`).

    Attributes:
        encoding, part: of one that holds the codes of a parameter's rows, or their scales.
        content: of one that is no parameter's (see `untrained_tensors`), gives what it holds, piece by piece.
        made_by: of codes that are made in the encoding of the source; the next tensor has their scales.
    """

    tensor: DiskTensor
    dtype: str
    encoding: Encoding | None = None
    part: Literal["codes", "scales"] | None = None
    content: Callable[[], Iterator[Array]] | None = field(default=None, compare=False)
    made_by: "Requantized | None" = field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        return prod(self.tensor.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class OutputFile:
    """A safetensors file to be written: its tensors in the order of their bytes."""

    name: str
    tensors: list[OutputTensor]

    @property
    def header(self) -> bytes:
        """The header of the file: its length as u64, then JSON, padded so that the data is aligned."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for output in self.tensors:
            end = offset + output.num_bytes
            table[output.tensor.name] = {
                "dtype": output.dtype,
                "shape": output.tensor.shape,
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def plan_files(tensors: Sequence[OutputTensor], max_shard_size: int, prefix: str) -> list[OutputFile]:
    """Files of at most `max_shard_size` bytes (or a single tensor; scales, which follow their codes, lie with them),
    named PREFIX-00001-of-0000N.safetensors."""
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for output in tensors:
        if groups[-1] and output.part != "scales" and size + output.num_bytes > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.num_bytes
    names = (f"{prefix}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1))
    return [OutputFile(name, group) for name, group in zip(names, groups, strict=True)]


def plan_hf_files(tensors: Sequence[OutputTensor], max_shard_size: int) -> list[OutputFile]:
    """The files of a Hugging Face directory: one model.safetensors, or several beside an index."""
    files = plan_files(tensors, max_shard_size, "model")
    return [OutputFile(SINGLE_NAME, files[0].tensors)] if len(files) == 1 else files


def hf_index(files: Sequence[OutputFile]) -> str:
    """Content of model.safetensors.index.json."""
    weight_map = {output.tensor.name: file.name for file in files for output in file.tensors}
    total = sum(output.num_bytes for file in files for output in file.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
