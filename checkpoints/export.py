"""Writes a sharded model as a Hugging Face directory, streamed: rank 0 holds one small piece at a time.

Tensor names and dtypes are those of the checkpoint the model came from; config, tokenizer and generation config are
copied from it. The directory appears under its own name only when it is whole.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoints.mapping import DiskTensor, Region, overlap
from checkpoints.shards import ShardedParameter, sharded_parameters
from checkpoints.source import DTYPE_CODES, INDEX_NAME, SINGLE_NAME, Checkpoint
from moe import ExpertMeshError
from sharding import Topology, raise_together

# What rank 0 holds of a tensor whose rows lie on disk as they do in memory. A transposed one, an expert's down
# projection, must be collected whole.
_PIECE_BYTES = 16 * 2**20
_COPIED_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
WRITER = 0


def export_model(
    model: nn.Module, checkpoint: Checkpoint, topology: Topology, out: Path, max_shard_size: int = 5 * 10**9
) -> None:
    """Write `out`, a directory that `transformers` loads. All ranks call it together.

    Args:
        model: the sharded model, every parameter fp32, bf16 or fp16.
        checkpoint: what it was loaded from; gives names, dtypes and the files copied beside the weights.
        topology: how its ranks are arranged.
        out: is replaced if it exists. `out` + ".incomplete" is used on the way.
        max_shard_size: bytes a file, unless a single tensor has more.

    Raises:
        ExpertMeshError: on all ranks, when rank 0 cannot write. `out` is then as it was.
    """
    partial = out.with_name(out.name + ".incomplete")
    writing = dist.get_rank() == WRITER
    with raise_together(), _os_errors(partial):
        if writing:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            copy_side_files(checkpoint.source.path, partial)
    shards = sharded_parameters(model, topology)
    files = _plan_files(checkpoint, max_shard_size)
    with raise_together(), _os_errors(partial):
        # a write that fails must not leave the senders waiting: go on receiving, and say so at the end
        failure: OSError | None = None
        for file in files:
            with _Output(partial / file.name, file.header if writing else None) as output:
                for tensor in file.tensors:
                    for piece in _pieces(tensor, shards, checkpoint.infos[tensor.name].dtype):
                        output.write(piece)
            failure = failure or output.failure
        if writing and failure is None and len(files) > 1:
            _write_index(partial / INDEX_NAME, files, checkpoint)
        if failure is not None:
            raise failure
    with raise_together(), _os_errors(out):
        if writing:
            replace_directory(partial, out)


@dataclass(frozen=True)
class _File:
    name: str
    tensors: list[DiskTensor]
    header: bytes


def _plan_files(checkpoint: Checkpoint, max_shard_size: int) -> list[_File]:
    groups: list[list[DiskTensor]] = [[]]
    size = 0
    for tensor in checkpoint.tensors + checkpoint.tied_copies:
        num_bytes = _num_bytes(tensor, checkpoint)
        if groups[-1] and size + num_bytes > max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += num_bytes
    if len(groups) == 1:
        return [_File(SINGLE_NAME, groups[0], _header(groups[0], checkpoint))]
    names = (f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1))
    return [_File(name, group, _header(group, checkpoint)) for name, group in zip(names, groups, strict=True)]


def _num_bytes(tensor: DiskTensor, checkpoint: Checkpoint) -> int:
    return torch.Size(tensor.shape).numel() * checkpoint.infos[tensor.name].dtype.itemsize


def _header(tensors: list[DiskTensor], checkpoint: Checkpoint) -> bytes:
    """The head of a safetensors file: its length as u64, then JSON, padded so that the data is aligned."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + _num_bytes(tensor, checkpoint)
        dtype = DTYPE_CODES[checkpoint.infos[tensor.name].dtype]
        table[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _Output:
    """A file on rank 0, nothing on the others. Keeps the first failure and swallows what comes after it."""

    def __init__(self, path: Path, header: bytes | None):
        self.path = path
        self.header = header
        self.file: BinaryIO | None = None
        self.failure: OSError | None = None

    def __enter__(self) -> "_Output":
        if self.header is not None:
            try:
                self.file = open(self.path, "wb")
                self.file.write(self.header)
            except OSError as error:
                self.failure = error
        return self

    def write(self, piece: Tensor) -> None:
        if self.file is not None and self.failure is None:
            try:
                self.file.write(piece.view(torch.uint8).numpy().data)
            except OSError as error:
                self.failure = error

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
                self.file.close()
            except OSError as error:
                self.failure = self.failure or error


def _pieces(tensor: DiskTensor, shards: dict[str, ShardedParameter], dtype: torch.dtype) -> Iterator[Tensor]:
    """On rank 0 the tensor's content in disk order, piece by piece; on other ranks empty, sending what they own."""
    for region in tensor.regions:
        shard = shards[region.parameter]
        runs = _runs(shard, region, dtype)
        if region.transposed:
            collected = [_bring(shard, owner, rows, dtype) for owner, rows in runs]
            yield torch.cat(collected).t().contiguous()
        else:
            for owner, rows in runs:
                yield _bring(shard, owner, rows, dtype)


def _runs(shard: ShardedParameter, region: Region, dtype: torch.dtype) -> Iterator[tuple[int, range]]:
    """(owner, rows) of a region in row order, cut into pieces of bounded size. The same on every rank."""
    step = max(1, _PIECE_BYTES // (shard.row_shape.numel() * dtype.itemsize))
    for owner, owned in shard.owners:
        rows = overlap(owned, region.rows)
        for start in range(rows.start, rows.stop, step):
            yield owner, range(start, min(start + step, rows.stop))


def _bring(shard: ShardedParameter, owner: int, rows: range, dtype: torch.dtype) -> Tensor:
    """`rows` on rank 0, in host memory and the dtype on disk; an empty tensor elsewhere."""
    rank = dist.get_rank()
    if rank == owner:
        piece = shard.view(rows).to("cpu", dtype).contiguous()
        if rank == WRITER:
            return piece
        dist.send(piece, WRITER)
    elif rank == WRITER:
        piece = torch.empty(len(rows), *shard.row_shape, dtype=dtype)
        dist.recv(piece, owner)
        return piece
    return torch.empty(0, *shard.row_shape, dtype=dtype)


def copy_side_files(source: Path, out: Path) -> None:
    """Copy config, tokenizer and generation config: every small text file but the weights' index."""
    for pattern in _COPIED_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)


def _write_index(path: Path, files: list[_File], checkpoint: Checkpoint) -> None:
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(_num_bytes(tensor, checkpoint) for file in files for tensor in file.tensors)
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def replace_directory(new: Path, out: Path) -> None:
    """Give the directory `new` the name `out`; what stood there is deleted only after."""
    old = out.with_name(out.name + ".old")
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


class _os_errors:
    """Turns an OSError inside into an ExpertMeshError that names the path."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise ExpertMeshError(f"{error.filename or self.path}: cannot be written: {error.strerror}") from error
