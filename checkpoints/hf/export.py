"""Writes a sharded model as a Hugging Face directory, streamed: rank 0 holds one small piece at a time.

Tensor names and dtypes are those of the checkpoint the model came from; config, tokenizer and generation config are
copied from it. The directory appears under its own name only when it is complete.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...moe.util.progress import CountedProgress
from ...sharding.runtime.process import Ranks, raise_together
from ...sharding.state import ShardedParameter, sharded_parameters
from ...sharding.topology import Topology
from ..files.directories import replace_directory, sweep_beside, temporary_beside, write_errors
from ..files.dtypes import Array, as_array, as_bytes, torch_dtype
from ..files.encodings import error_lines
from ..files.file_layout import OutputFile
from ..files.tensors import overlap
from ..model_card import write_card
from .checkpoint import Checkpoint
from .export_plan import plan_export

_PIECE_BYTES = 16 * 2**20
"""The most that a rank sends at once, of rows that are not longer."""
_MOST_ITEM_BYTES = 8
"""Of a value, in any dtype."""
WRITER = 0


def export_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    topology: Topology,
    out: Path,
    max_shard_size: int = 5 * 10**9,
    tokenizer: Any = None,
    patient: Ranks | None = None,
    card: str = "",
) -> list[str]:
    """Write `out`, a directory that `transformers` loads. All ranks call it together.

    Args:
        model: the sharded model.
        checkpoint: what it was loaded from; gives names, dtypes and the files copied beside the weights.
        topology: its parallel layout.
        out: is replaced if it exists, once the new one is complete.
        max_shard_size: bytes per file, unless a single tensor has more.
        tokenizer: whose files lie there in place of the checkpoint's own.
        patient: these ranks, where rank 0 may take longer to write what is carried over, or to delete what was there,
            of which the others have no part, than a collective's time limit.
        card: of the model, written where `out` has none of somebody else's (see `write_card`).

    Returns:
        On rank 0, what in config.json is no longer claimed and, where tensors are quantized as their source has them,
        what that has changed, in lines.

    Raises:
        ExpertMeshError: on all ranks, when rank 0 cannot write. `out` is then as it was.
    """
    with raise_together(patient), write_errors(out):
        plan = plan_export(checkpoint, max_shard_size, tokenizer, dist.get_rank() == WRITER)
    with replacing(out, patient) as partial:
        with raise_together(patient), write_errors(out):
            if partial is not None:
                lines = plan.write_beside(partial) + write_card(card, partial, out)
        with raise_together(patient), write_errors(out):
            write_sharded(plan.files, sharded_parameters(model, topology), partial, out)
            if partial is not None and plan.index is not None:
                (partial / plan.last).write_text(plan.index)
    if partial is None:
        return []
    return [*lines, *error_lines(output.errors for file in plan.files for output in file.tensors)]


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


def write_sharded(
    files: Sequence[OutputFile], shards: dict[str, ShardedParameter], directory: Path | None, out: Path
) -> None:
    """Write files of parameters that are sharded. All ranks call it together.

    Args:
        directory: on rank 0, which writes; None on the others, which send what they own.
        out: what that will be called.

    Raises:
        Exception: whatever a rank met that could not write, or bring what it was to; it has sent and taken all the same
            what others wait for.
    """
    failures: list[Exception] = []

    @contextmanager
    def attempt() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # if this rank were to leave, others would wait for it without end
            failures.append(error)

    with raise_together():
        message = message_for(shards)  # of one's own from the beginning: memory may be what is lacking later
    total = sum(file.num_bytes for file in files)
    progress = CountedProgress(f"writing {out}", total, is_shown=dist.get_rank() == WRITER)
    for file in files:
        with ExitStack() as stack:
            stack.enter_context(progress)
            stream: BinaryIO | None = None
            with attempt():
                if directory is not None and not failures:
                    stream = stack.enter_context(open(directory / file.name, "wb"))
                    stream.write(file.header)
            for output in file.tensors:
                dtype = torch_dtype(output.tensor.dtype)
                for strip in output.strips():
                    parts = [
                        brought(shards[region.parameter], rows, dtype, message, attempt) for region, rows in strip.parts
                    ]
                    with attempt():
                        if stream is not None and not failures:
                            for data, _ in output.content(strip, parts):
                                stream.write(content := as_bytes(data))
                                progress.add(len(content))
            with attempt():
                if stream is not None and not failures:
                    stream.flush()
    if failures:
        raise failures[0]


def message_for(shards: Mapping[str, ShardedParameter]) -> Tensor:
    """Bytes of any message about these."""
    largest = max((shard.row_shape.numel() * _MOST_ITEM_BYTES for shard in shards.values()), default=0)
    return torch.empty(max(largest, _PIECE_BYTES), dtype=torch.uint8)


def messages_of(shard: ShardedParameter, rows: range, dtype: torch.dtype) -> Iterator[tuple[int, range]]:
    """(owner, rows) of the messages in which these rows of a parameter are sent."""
    step = max(1, _PIECE_BYTES // max(1, shard.row_shape.numel() * dtype.itemsize))
    for owner, owned in shard.owners:
        shared = overlap(owned, rows)
        for start in range(shared.start, shared.stop, step):
            yield owner, range(start, min(start + step, shared.stop))


def brought(
    shard: ShardedParameter,
    rows: range,
    dtype: torch.dtype,
    message: Tensor,
    attempt: Callable[[], AbstractContextManager[None]],
) -> Array:
    """Rows of a parameter on rank 0, in host memory and the dtype on disk; nothing on the others, which send what they
    own of them. Each message is sent and taken, whatever an attempt at its content meets.

    Args:
        message: bytes for one.
    """
    rank = dist.get_rank()
    values = torch.empty(0, *shard.row_shape, dtype=dtype)
    if rank == WRITER:
        with attempt():
            values = torch.empty(len(rows), *shard.row_shape, dtype=dtype)
    row_bytes = shard.row_shape.numel() * dtype.itemsize
    for owner, run in messages_of(shard, rows, dtype):
        if rank not in (owner, WRITER):
            continue
        piece = message[: len(run) * row_bytes].view(dtype).view(len(run), *shard.row_shape)
        if rank == owner:
            with attempt():
                piece.copy_(shard.view(run))
        if rank != WRITER:
            dist.send(piece, WRITER)
            continue
        if owner != WRITER:
            dist.recv(piece, owner)
        with attempt():
            values[run.start - rows.start : run.stop - rows.start] = piece
    return as_array(values)
