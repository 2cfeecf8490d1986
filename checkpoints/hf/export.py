"""Writes a sharded model as a Hugging Face directory, streamed: rank 0 holds one small piece at a time.

Tensor names and dtypes are those of the checkpoint the model came from; config, tokenizer and generation config are
copied from it. The directory appears under its own name only when it is complete.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.util.errors import ExpertMeshError
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.state import ShardedParameter, sharded_parameters
from ...sharding.topology import Topology
from ..files.directories import (
    replace_directory,
    sweep_beside,
    temporary_beside,
    write_errors,
)
from ..files.dtypes import as_array, as_bytes, torch_dtype
from ..files.encodings import WIDE
from ..files.file_layout import INDEX_NAME, OutputFile, OutputTensor, Region, hf_index, overlap, plan_hf_files
from .requantized import Requantized, error_lines, errors_of
from .side_files import copy_side_files
from .source import Checkpoint

# What rank 0 holds of a tensor whose rows lie on disk as they do in memory. A matrix that is transposed there, or whose
# rows alternate with another's, must be put together in full.
_PIECE_BYTES = 16 * 2**20
WRITER = 0


def export_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    topology: Topology,
    out: Path,
    max_shard_size: int = 5 * 10**9,
    tokenizer: Any = None,
    patient: Ranks | None = None,
) -> list[str]:
    """Write `out`, a directory that `transformers` loads. All ranks call it together.

    Args:
        model: the sharded model.
        checkpoint: what it was loaded from; gives names, dtypes and the files copied beside the weights.
        topology: its parallel layout.
        out: is replaced if it exists, once the new one is complete.
        max_shard_size: bytes per file, unless a single tensor has more.
        tokenizer: saved in place of the checkpoint's own.
        patient: these ranks, where rank 0 may take longer to write what is carried over, or to delete what was there,
            of which the others have no part, than a collective's time limit.

    Returns:
        On rank 0, where tensors are quantized as their source has them, what that has changed, in lines.

    Raises:
        ExpertMeshError: on all ranks, when rank 0 cannot write. `out` is then as it was.
    """
    told: list[str] = []
    with replacing(out, patient) as partial:
        with raise_together(patient), write_errors(out):
            if partial is not None:
                origin = None if checkpoint.origin is None else checkpoint.origin.source.path
                copy_side_files(checkpoint.source, partial, tokenizer, checkpoint.drops_untrained, origin)
        with raise_together(patient), write_errors(out):
            files = _write_weights(model, checkpoint, topology, partial, max_shard_size)
        if partial is not None:
            told = error_lines(errors_of(tensor for file in files for tensor in file.tensors))
    return told


@contextmanager
def replacing(out: Path, patient: Ranks | None = None) -> Iterator[Path | None]:
    """A directory on rank 0, None on the others, that takes the place of `out` once it is complete. All ranks call it
    together, and leave it together.

    Args:
        patient: these ranks, where rank 0 may take longer to delete what was there than a collective's time limit.

    Raises:
        ExpertMeshError: on all ranks, when rank 0 cannot write. `out` is then as it was.
    """
    partial: Path | None = None
    try:
        with raise_together(patient), write_errors(out):
            if dist.get_rank() == WRITER:
                sweep_beside(out)
                partial = temporary_beside(out)
        yield partial
        with raise_together(patient), write_errors(out):
            if partial is not None:
                replace_directory(partial, out)
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _write_weights(
    model: nn.Module, checkpoint: Checkpoint, topology: Topology, directory: Path | None, max_shard_size: int
) -> list[OutputFile]:
    """Write into `directory` on rank 0; on the others it is None."""
    shards = sharded_parameters(model, topology)
    files = plan_hf_files(checkpoint.in_hf_form, max_shard_size)
    # a write that fails must not leave the senders waiting: keep receiving, and say so at the end
    failure: Exception | None = None
    for file in files:
        with Output(file, directory) as output:
            for tensor in file.tensors:
                if tensor.made_by is not None:
                    _write_codes(tensor.made_by, shards, output)
                elif tensor.content is None:
                    for piece in _pieces(tensor, shards):
                        output.write(piece)
                elif directory is not None:  # scales that are made already, or the last ones, which nobody sends
                    for data in tensor.content():
                        output.write_bytes(as_bytes(data))
        failure = failure or output.failure
    if failure is not None:
        raise failure
    if directory is not None and len(files) > 1:
        (directory / INDEX_NAME).write_text(hf_index(files))
    return files


class Output:
    """A file on rank 0, nothing on the others. Keeps the first failure and swallows what comes after it."""

    def __init__(self, plan: OutputFile, directory: Path | None):
        self.plan = plan
        self.directory = directory
        self.file: BinaryIO | None = None
        self.failure: Exception | None = None

    def __enter__(self) -> "Output":
        if self.directory is not None:
            try:
                self.file = open(self.directory / self.plan.name, "wb")
                self.file.write(self.plan.header)
            except OSError as error:
                self.failure = error
        return self

    def write(self, piece: Tensor) -> None:
        if self.file is not None:
            self.write_bytes(as_bytes(as_array(piece)))

    def write_bytes(self, content: memoryview) -> None:
        if self.file is not None and self.failure is None:
            try:
                self.file.write(content)
            except OSError as error:
                self.failure = error

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            try:
                with self.file:
                    self.file.flush()
                    os.fsync(self.file.fileno())
            except OSError as error:
                self.failure = self.failure or error


def _pieces(output: OutputTensor, shards: dict[str, ShardedParameter]) -> Iterator[Tensor]:
    """On rank 0 the tensor's content in disk order, piece by piece; on other ranks empty, sending what they own."""
    dtype = torch_dtype(output.dtype)
    for block in output.tensor.blocks():
        if len(block) == 1 and block[0].is_run:
            yield from brought(shards[block[0].parameter], block[0], dtype)
            continue
        matrix = output.tensor.matrix(block[0]) if dist.get_rank() == WRITER else (0,)
        whole = torch.empty(matrix, dtype=dtype)
        for region in block:
            rows = torch.cat(list(brought(shards[region.parameter], region, dtype)))
            if dist.get_rank() == WRITER:
                place = region.on_disk(region.rows)
                (whole.t() if region.transposed else whole)[place] = rows
        yield whole


def _write_codes(made: Requantized, shards: dict[str, ShardedParameter], output: Output) -> None:
    """Codes of a tensor that is quantized as its source has it; on other ranks than 0, sending the values."""
    dtype = torch_dtype(WIDE)
    for strip in made.strips():
        parts = []
        for region, rows in strip.parts:
            pieces = brought(shards[region.parameter], replace(region, rows=rows), dtype)
            parts.append(as_array(torch.cat(list(pieces))))
        if output.file is None or output.failure is not None:
            continue
        try:
            for data in made.codes(strip, parts):
                output.write_bytes(as_bytes(data))
        except (OSError, ExpertMeshError) as error:  # of the source's files: others go on sending
            output.failure = error


def brought(shard: ShardedParameter, region: Region, dtype: torch.dtype) -> Iterator[Tensor]:
    for owner, rows in _runs(shard, region, dtype):
        yield _bring(shard, owner, rows, dtype)


def _runs(shard: ShardedParameter, region: Region, dtype: torch.dtype) -> Iterator[tuple[int, range]]:
    """(owner, rows) of a region in row order, cut into pieces of bounded size. The same on every rank."""
    step = max(1, _PIECE_BYTES // max(1, shard.row_shape.numel() * dtype.itemsize))
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
