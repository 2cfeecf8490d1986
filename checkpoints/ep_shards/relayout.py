"""Writes parameters that a reader gives into safetensors files of another layout: streamed, parallel, resumable.

Used offline, in one process; `checkpoints.hf.export` does the same from a live, sharded model.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import xxhash
from tqdm import tqdm

from ...moe.util.atomic_write import PARTIAL, whole
from ..files.cast import cast
from ..files.checksums import GRANULE, add_sums, row_sum
from ..files.dtypes import (
    ARRAY_TYPES,
    Array,
    as_bytes,
    contiguous,
)
from ..files.encodings import WIDE, Encoding, pack, scale_values, widen
from ..files.file_layout import OutputFile, OutputTensor
from ..files.mapping import Region
from ..hf.reader import ParameterReader, SafetensorsReader, gather

if TYPE_CHECKING:
    from ..hf.requantized import Requantized

DONE = ".done"
"""What the name of a note ends with: the file of that name is written, and this is known of it."""

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """What is known of a written file: size, XXH3-128 of all of it and of its header, and each tensor's row sum, or, if
    it is carried over, XXH3-64 of its content. errors: of what was quantized anew, by kind of tensor (the fields of
    `checkpoints.hf.requantized.Errors`)."""

    name: str
    num_bytes: int
    checksum: str
    header_checksum: str
    row_sums: dict[str, int]
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


def write_files(
    files: Sequence[OutputFile],
    out: Path,
    make_reader: Callable[[], ParameterReader],
    fingerprint: str,
    workers: int,
    show_progress: bool,
) -> list[FileRecord]:
    """Write `files` into `out`, several at a time, skipping those that an earlier, interrupted call has finished, and
    deleting those that it has finished and this one does not write: it may have cut the tensors otherwise.

    Args:
        make_reader: called once per worker and file.
        fingerprint: of everything the content depends on. A file counts as finished only with the same fingerprint.
    """
    planned = {file.name for file in files}
    for note in out.glob(f"*.safetensors{DONE}"):
        if (name := note.name.removesuffix(DONE)) not in planned and _noted(note) is not None:
            (out / name).unlink(missing_ok=True)
    total = sum(output.num_bytes for file in files for output in file.tensors)
    lock = threading.Lock()
    disable = None if show_progress else True
    with (
        tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, disable=disable) as bar,
        ThreadPoolExecutor(max_workers=workers) as pool,
    ):

        def advance(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        jobs = [pool.submit(_write_or_skip, file, out, make_reader, fingerprint, advance) for file in files]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def traces(out: Path) -> list[Path]:
    """What an interrupted call leaves beside finished files: notes that let it resume, and what is half-written."""
    return [path for end in (DONE, PARTIAL, DONE + PARTIAL) for path in out.glob(f"*.safetensors{end}")]


def forget_progress(out: Path) -> None:
    """Delete all traces; for when everything is written."""
    for trace in traces(out):
        trace.unlink()


def _write_or_skip(
    file: OutputFile,
    out: Path,
    make_reader: Callable[[], ParameterReader],
    fingerprint: str,
    advance: Callable[[int], None],
) -> FileRecord:
    note = out / (file.name + DONE)
    noted = _noted(note) if (out / file.name).exists() else None
    if noted is not None and noted[0] == fingerprint:
        advance(sum(output.num_bytes for output in file.tensors))
        return noted[1]
    reader = make_reader()
    with whole(out / file.name) as partial, open(partial, "wb") as stream:
        record = _write_file(file, stream, reader, advance)
    reader.close()
    with whole(note) as partial:
        partial.write_text(json.dumps({"fingerprint": fingerprint, "record": asdict(record)}))
    return record


def _noted(note: Path) -> tuple[str, FileRecord] | None:
    """(its fingerprint, what it has noted of a file) of an earlier call; None if it noted nothing, or the note is
    damaged."""
    try:
        content = json.loads(note.read_text())
        return content["fingerprint"], FileRecord(**content["record"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _write_file(
    file: OutputFile, stream: BinaryIO, reader: ParameterReader, advance: Callable[[int], None]
) -> FileRecord:
    digest = xxhash.xxh3_128(file.header)
    stream.write(file.header)
    num_bytes = len(file.header)
    row_sums: dict[str, int] = {}
    for output in file.tensors:
        row_sum_so_far, of_content = 0, xxhash.xxh3_64()
        for data, share in _blocks(output, reader):
            content = as_bytes(data)
            stream.write(content)
            digest.update(content)
            num_bytes += len(content)
            row_sum_so_far = add_sums(row_sum_so_far, share)
            if output.content is not None:
                of_content.update(content)
            advance(len(content))
        row_sums[output.tensor.name] = row_sum_so_far if output.content is None else of_content.intdigest()
    header_checksum = xxhash.xxh3_128(file.header).hexdigest()
    return FileRecord(file.name, num_bytes, digest.hexdigest(), header_checksum, row_sums, _errors(file))


def _errors(file: OutputFile) -> dict[str, dict[str, float]]:
    if all(output.made_by is None for output in file.tensors):
        return {}
    from ..hf.requantized import errors_of  # needs torch

    return {kind: asdict(found) for kind, found in errors_of(file.tensors).items()}


def _blocks(output: OutputTensor, reader: ParameterReader) -> Iterator[tuple[Array, int]]:
    """(content in row order, its part of the row sum) of a tensor in disk order. One whose rows are not in the
    parameter's order has no row sum, nor has one that is carried over; that of encoded rows is in their codes' part."""
    if output.content is not None:
        yield from ((data, 0) for data in output.content())
        return
    if output.made_by is not None:
        yield from ((data, 0) for data in _codes(output.made_by, reader))
        return
    if output.encoding is not None:
        yield from _encoded_blocks(output, output.encoding, reader)
        return
    for block in output.tensor.blocks():
        if len(block) > 1 or not block[0].is_run:
            yield _put_together(output, block, reader), 0
            continue
        (region,) = block
        for rows in _chunks(region, output):
            first_row = rows.start - region.rows.start
            for data in _whole_granules(reader, region.parameter, rows, output.dtype):
                yield data, row_sum(data, first_row)
                first_row += len(data)


def _codes(made: "Requantized", reader: ParameterReader) -> Iterator[Array]:
    from ..hf.requantized import codes_of

    def values(region: Region, rows: range) -> Array:
        found = gather(reader, region.parameter, rows)
        assert found is not None, region
        return cast(*found, WIDE)

    yield from codes_of(made, values)


def _encoded_blocks(output: OutputTensor, encoding: Encoding, reader: ParameterReader) -> Iterator[tuple[Array, int]]:
    assert isinstance(reader, SafetensorsReader), "nothing else has encoded parameters"
    (region,) = output.tensor.regions
    for rows in _chunks(region, output, lcm(GRANULE, encoding.block[0])):
        stored = reader.scales(region.parameter, rows)
        if output.part == "scales":
            yield contiguous(stored), 0
            continue
        codes = reader.codes(region.parameter, rows)
        wide = widen(codes, scale_values(stored, encoding.scale_dtype), encoding, (0, 0))
        yield contiguous(pack(codes, encoding)), row_sum(wide, rows.start - region.rows.start)


def _put_together(output: OutputTensor, block: tuple[Region, ...], reader: ParameterReader) -> Array:
    """A block of a tensor on disk out of the rows of all its regions."""
    parts = []
    for region in block:
        found = gather(reader, region.parameter, region.rows)
        assert found is not None, region
        rows = cast(*found, output.dtype)
        parts.append((region, rows.T if region.transposed else rows))
    if len(parts) == 1 and parts[0][1].shape == output.tensor.matrix(block[0]):
        return contiguous(parts[0][1])
    whole = np.empty(output.tensor.matrix(block[0]), ARRAY_TYPES[output.dtype])
    for region, part in parts:
        place = region.on_disk(region.rows)
        whole[(slice(None), place) if region.transposed else place] = part
    return whole


def _whole_granules(reader: ParameterReader, parameter: str, rows: range, dtype: str) -> Iterator[Array]:
    """The rows, piece by piece; pieces between which a granule lies are joined, as it must be hashed in one piece."""
    waiting: list[Array] = []
    for piece in reader.pieces(parameter, rows):
        waiting.append(contiguous(cast(piece.data, piece.dtype, dtype)))
        if (piece.rows.stop - rows.start) % GRANULE == 0 or piece.rows.stop == rows.stop:
            yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
            waiting = []


def _chunks(region: Region, output: OutputTensor, whole: int = GRANULE) -> Iterator[range]:
    """Its rows, in runs of a multiple of `whole`."""
    row_bytes = max(1, output.num_bytes // max(1, sum(len(r.rows) for r in output.tensor.regions)))
    # whole granules, so that their hashes need not be carried from chunk to chunk
    step = max(1, _CHUNK_BYTES // row_bytes // whole) * whole
    for start in range(region.rows.start, region.rows.stop, step):
        yield range(start, min(start + step, region.rows.stop))
