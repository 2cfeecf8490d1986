"""From a checkpoint of one form to one of another, offline: `convert` to EP shards, `export` to Hugging Face form.

Files are written streamed, several at a time, and resumably, in one process; `checkpoints.hf.export` writes those of a
live, sharded model.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from ..moe.util.atomic_write import PARTIAL, sync, sync_tree, whole
from ..moe.util.errors import ExpertMeshError
from ..moe.util.progress import CountedProgress
from ..moe.util.threads import on_one_thread
from ..sharding.topology import divisors, either
from .ep_shards.manifest import MANIFEST, carried_files, check_all_bytes, make_manifest, shard_files
from .files.checksums import add_sums, file_checksum
from .files.directories import (
    can_be_replaced,
    check_apart,
    continued_beside,
    delete,
    empty_directory,
    finish_replacement_of_missing,
    replace_directory,
    write_errors,
)
from .files.dtypes import as_bytes, cast
from .files.encodings import Errors, error_lines
from .files.file_layout import INDEX_NAME, FileRecord, OutputFile
from .hf.checkpoint import Checkpoint
from .hf.export_plan import ExportPlan, plan_export
from .hf.reader import ParameterReader, check_tied_copies, kept_encodings
from .hf.side_files import plan_side_files
from .model_card import read_card, write_card
from .opening import is_training, open_any, open_origin

DONE = ".done"
"""What the name of a note ends with: the file of that name is written, and this is known of it."""


@dataclass(frozen=True)
class HowToWrite:
    """workers: files written at once. max_shard_size: bytes. overwrite: whether `out` may be replaced. drop_untrained:
    whether tensors that are not trained are left behind, and no longer claimed by the config. tell: takes lines that
    say what became of them. tokenizer: saved in Hugging Face form in place of the source's own. card: of the model, in
    Hugging Face form (see `write_card`)."""

    max_shard_size: int
    workers: int
    overwrite: bool = False
    show_progress: bool = False
    drop_untrained: bool = False
    tell: Callable[[str], None] = lambda _: None
    tokenizer: Any = None
    as_source: bool = False
    tell_errors: Callable[[str], None] = lambda _: None
    card: str = ""


def convert(source_path: Path, out: Path, ep_size: int, dtype: str | None, how: HowToWrite) -> list[str]:
    """Write EP shards of a Hugging Face directory, or of other EP shards.

    Args:
        dtype: of every parameter, by its code (see `checkpoints.files.dtypes`); None leaves each as it is, encoded
            ones too, where their blocks do not reach from one expert to the next.

    Returns:
        The names of parameters that had to be dequantized, though `dtype` did not ask for it.

    Raises:
        ExpertMeshError: the source is damaged, ep_size does not divide its experts, or `out` is not to be had.
    """
    checkpoint = _to_be_written(open_any(source_path, drop_untrained=how.drop_untrained), how)
    source, names = checkpoint.source, checkpoint.names
    num_experts = names.shape.num_experts
    if ep_size < 1 or num_experts % ep_size:
        fits = either(divisors(num_experts))
        raise ExpertMeshError(
            f"--ep-size {ep_size} does not divide the {num_experts} experts of this model; use {fits}"
        )
    check_all_bytes(source_path)
    check_tied_copies(checkpoint)
    stored_dtypes = checkpoint.parameter_dtypes
    dtypes = {
        name: stored_dtypes[name] if dtype is None or name in names.buffers else dtype for name in names.parameters
    }
    encodings = kept_encodings(checkpoint) if dtype is None else {}
    files = shard_files(checkpoint, dtypes, encodings, ep_size, how.max_shard_size)
    files += carried_files(checkpoint.carried, dtype is None, how.max_shard_size)
    made = checkpoint
    if dtype is not None:
        exported = [replace(t, dtype=dtypes[t.regions[0].parameter], parts=(), encoding=None) for t in made.exported]
        made = replace(checkpoint, exported=exported)

    # beside codes the config goes on to say how they are read
    origin = source.path if made.encodings else None
    drops = checkpoint.drops_untrained
    beside = plan_side_files(source, drop_parts=drops, drop_predictors=drops, quantized_as=origin)
    _check_out(checkpoint, out)
    place = _prepare(out, MANIFEST, how.overwrite)
    records = _write(files, place, out, checkpoint, how)
    with write_errors(out):
        beside.write(place)
        written = {record.name for record in records}
        # a process that was ended here may have left the manifest, or what was to become it
        there = {path for path in place.rglob("*") if path.is_file() and path.suffix != PARTIAL}
        for file in sorted(there - {*traces(place), place / MANIFEST}):
            name = file.relative_to(place).as_posix()
            if name not in written:
                records.append(FileRecord(name, file.stat().st_size, file_checksum(file)))
        _finish(place, out, MANIFEST, json.dumps(make_manifest(made, ep_size, files, records), indent=1))
    return [] if dtype is not None else sorted(checkpoint.encoded_parameters - encodings.keys())


def export_offline(source_path: Path, out: Path, how: HowToWrite, base: Path | None = None) -> None:
    """Write the Hugging Face form of EP shards, a training checkpoint, or another Hugging Face directory (in other
    files). Its index, or its only file, makes it complete, and is written last.

    Args:
        base: of a training checkpoint (see `open_any`).

    Raises:
        ExpertMeshError: the source is damaged, or `out` is not to be had.
    """
    checkpoint = open_any(source_path, True, base, how.drop_untrained)
    check_all_bytes(source_path)
    origin = checkpoint
    if is_training(source_path):
        how = replace(how, card=read_card(source_path / "model"))
        if how.as_source:
            origin = open_origin(source_path, base, checkpoint.names)
    write_hf(checkpoint, out, how, origin)


def write_hf(checkpoint: Checkpoint, out: Path, how: HowToWrite, origin: Checkpoint | None = None) -> None:
    """Write what a checkpoint reads as, in Hugging Face form.

    Args:
        origin: in whose encoding, if that is asked for; None: its own.

    Raises:
        ExpertMeshError: `out` is not to be had, or tied tensors differ.
    """
    check_tied_copies(checkpoint)
    _check_out(checkpoint, out)
    with write_errors(out):
        checkpoint, plan = plan_hf(checkpoint, how, origin)
    _check_out(checkpoint, out)  # also for what an origin reads
    place = _prepare(out, plan.last, how.overwrite)
    records = _write(plan.files, place, out, checkpoint, how)
    with write_errors(out):
        for line in [*plan.write_beside(place), *write_card(how.card, place, out)]:
            how.tell(line)
        _finish(place, out, plan.last, plan.index)
    for line in error_lines(Errors(**errors) for record in records for errors in record.errors):
        how.tell_errors(line)


def plan_hf(checkpoint: Checkpoint, how: HowToWrite, origin: Checkpoint | None = None) -> tuple[Checkpoint, ExportPlan]:
    """What `write_hf` writes, known from names alone: of which checkpoint, and what files.

    Raises:
        ExpertMeshError: it cannot be encoded as its origin is, or a file cannot be taken along, or not be read.
        OSError: the tokenizer's files cannot be made.
    """
    checkpoint = _to_be_written(checkpoint, how)
    if how.as_source:
        checkpoint = encoded_as_source(checkpoint, origin or checkpoint, how.tell)
    return checkpoint, plan_export(checkpoint, how.max_shard_size, how.tokenizer)


def encoded_as_source(checkpoint: Checkpoint, origin: Checkpoint, tell: Callable[[str], None]) -> Checkpoint:
    """A checkpoint whose export has the encoding of its source, if that has one; else this is told.

    Args:
        origin: the source.

    Raises:
        ExpertMeshError: the encoding can be read, and not be made.
    """
    if origin.encodings:
        return checkpoint.encoded_as(origin)
    tell(f"--export-encoding source: {origin.source.path} is not quantized, so the export is not either")
    return checkpoint


def _to_be_written(checkpoint: Checkpoint, how: HowToWrite) -> Checkpoint:
    """A checkpoint with or without what is not trained, as was asked for."""
    if how.drop_untrained:
        how.tell(f"left out, because not trained: {checkpoint.carried_summary or 'no tensors'}")
        return checkpoint.dropping_untrained()
    if checkpoint.carried:
        how.tell(f"copied unchanged, because not trained: {checkpoint.carried_summary}")
    return checkpoint


def _check_out(checkpoint: Checkpoint, out: Path) -> None:
    """
    Raises:
        ExpertMeshError: `out` has, or lies in, something that is read.
    """
    read = [checkpoint.path, checkpoint.source.path, *(tensor.file.parent for tensor in checkpoint.carried)]
    read += [] if checkpoint.origin is None else [checkpoint.origin.source.path]
    check_apart(out, dict.fromkeys([*read, *checkpoint.files]))


def _prepare(out: Path, last: str, overwrite: bool) -> Path:
    """Make the directory to write into: `out`, or, where that is to be replaced once the new one is complete, one
    beside it. A complete `out`, which has the file `last`, is replaced only if told so; an unfinished one is
    continued, and so is what is beside it."""
    with write_errors(out):
        finish_replacement_of_missing(out)
    if out.exists() and not out.is_dir():
        raise ExpertMeshError(f"{out}: is not a directory; choose another")
    if any((out / name).exists() for name in (INDEX_NAME, MANIFEST)):
        with write_errors(out):
            forget_progress(out)  # as a process that was killed after writing what comes last was about to
    begun = bool(traces(out))
    if (out / last).exists() and not begun and not overwrite:
        raise ExpertMeshError(f"{out}: already exists and is complete; choose another, or replace it with --overwrite")
    if out.exists() and not begun and not overwrite and any(out.iterdir()):
        raise ExpertMeshError(f"{out}: contains other files; choose another, or replace it with --overwrite")
    try:
        beside = continued_beside(out)
        if not begun and (overwrite or beside.exists()) and can_be_replaced(out):
            return _continued(beside)
        if overwrite and out.exists() and not begun:
            empty_directory(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExpertMeshError(f"{out}: cannot be written: {error.strerror}") from error
    return out


def _continued(place: Path) -> Path:
    """The same, with no more in it than files that are finished, and notes of them."""
    place.mkdir(parents=True, exist_ok=True)
    notes = traces(place)
    finished = {place / note.name.removesuffix(DONE) for note in notes}
    for path in {*place.iterdir()} - {*notes, *finished}:
        delete(path)
    return place


def _write(
    files: Sequence[OutputFile], place: Path, out: Path, checkpoint: Checkpoint, how: HowToWrite
) -> list[FileRecord]:
    """
    Args:
        place: where `out` is written until it is complete.
    """
    progress = CountedProgress(f"writing {out}", sum(file.num_bytes for file in files), is_shown=how.show_progress)
    try:
        fingerprint = _fingerprint(files, checkpoint)
        with progress:
            return write_files(files, place, checkpoint.reader, fingerprint, how.workers, progress.add)
    except OSError as error:
        raise ExpertMeshError(
            f"{error.filename or place}: cannot be written: {error.strerror}; finished files are kept: "
            "the same command resumes from there"
        ) from error


def _fingerprint(files: Sequence[OutputFile], checkpoint: Checkpoint) -> str:
    """A fingerprint of the source's files, by name, size and time, and of the plan."""
    state = hashlib.sha256(checkpoint.made_by.encode())
    origin = [] if checkpoint.origin is None else checkpoint.origin.all_files
    for file in sorted({*checkpoint.all_files, *origin}):
        status = file.stat()
        state.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for plan in files:
        state.update(plan.name.encode() + plan.header)
    return state.hexdigest()


def _finish(place: Path, out: Path, last: str, content: str | None) -> None:
    """Put the file that makes what was written complete in its place, atomically, and let it take that of `out`."""
    sync_tree(place)
    if content is not None:
        with whole(place / last, durable=True) as partial:
            partial.write_text(content)
    forget_progress(place)
    if place == out:
        sync(out.parent)
    else:
        replace_directory(place, out.resolve())


def write_files(
    files: Sequence[OutputFile],
    out: Path,
    make_reader: Callable[[], ParameterReader],
    fingerprint: str,
    workers: int,
    tell: Callable[[int], None],
) -> list[FileRecord]:
    """Write `files` into `out`, several at a time, skipping those that an earlier, interrupted call has finished, and
    deleting those that it has finished and this one does not write: it may have cut the tensors otherwise.

    Args:
        make_reader: called once per worker and file.
        fingerprint: of everything the content depends on. A file counts as finished only with the same fingerprint.
        tell: is told how many bytes more are written.
    """
    planned = {file.name for file in files}
    for note in out.glob(f"*.safetensors{DONE}"):
        if (name := note.name.removesuffix(DONE)) not in planned and _noted(note) is not None:
            (out / name).unlink(missing_ok=True)
    lock = threading.Lock()
    with on_one_thread(), ThreadPoolExecutor(max_workers=workers) as pool:

        def advance(num_bytes: int) -> None:
            with lock:
                tell(num_bytes)

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
    noted, record = (_noted(note) if (out / file.name).exists() else None) or ("", None)
    if noted == fingerprint and record is not None:
        advance(file.num_bytes)
        return record
    reader = make_reader()
    _note(note, fingerprint, None)  # who finds the file from its first moment on is to find that more was to come
    # else the note could survive a crash of the machine and the file not
    with whole(out / file.name, durable=True) as partial, open(partial, "wb") as stream:
        record = _write_file(file, stream, reader, advance)
    reader.close()
    _note(note, fingerprint, record)
    return record


def _note(note: Path, fingerprint: str, record: FileRecord | None) -> None:
    with whole(note) as partial:
        partial.write_text(json.dumps({"fingerprint": fingerprint, "record": record and asdict(record)}))


def _noted(note: Path) -> tuple[str, FileRecord | None] | None:
    """(its fingerprint, what it has noted of a file once that was finished) of an earlier call; None if there is no
    note, or it is damaged."""
    try:
        content = json.loads(note.read_text())
        return content["fingerprint"], None if content["record"] is None else FileRecord(**content["record"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _write_file(
    file: OutputFile, stream: BinaryIO, reader: ParameterReader, advance: Callable[[int], None]
) -> FileRecord:
    digest = xxhash.xxh3_128(file.header)
    stream.write(file.header)
    sums: dict[str, int] = {}
    for output in file.tensors:
        rows_sum, of_content = 0, xxhash.xxh3_64()
        for strip in output.strips():
            parts = []
            for region, rows in strip.parts:
                found = reader.rows(region.parameter, rows)
                assert found is not None, region
                parts.append(cast(*found, output.tensor.dtype))
            for data, share in output.content(strip, parts):
                content = as_bytes(data)
                stream.write(content)
                digest.update(content)
                rows_sum = add_sums(rows_sum, share)
                if output.summed == "bytes":
                    of_content.update(content)
                advance(len(content))
        if output.summed is not None:
            sums[output.part.name] = rows_sum if output.summed == "rows" else of_content.intdigest()
    errors = [asdict(output.errors) for output in file.tensors if output.errors is not None]
    header_checksum = xxhash.xxh3_128(file.header).hexdigest()
    num_bytes = len(file.header) + file.num_bytes
    return FileRecord(file.name, num_bytes, digest.hexdigest(), header_checksum, sums, errors)
