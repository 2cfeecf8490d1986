"""From a checkpoint of one form to one of another, offline: `convert` to EP shards, `export` to Hugging Face form."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..moe.util.atomic_write import whole
from ..moe.util.errors import ExpertMeshError
from ..sharding.topology import divisors, either
from .ep_shards.manifest import MANIFEST, FileSum, carried_files, check_all_bytes, make_manifest, shard_files
from .ep_shards.relayout import DONE, FileRecord, forget_progress, traces, write_files
from .files.checksums import file_checksum
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
from .files.file_layout import INDEX_NAME, SINGLE_NAME, OutputFile, OutputTensor, hf_index, plan_hf_files
from .hf.reader import kept_encodings, tied_copies_that_differ
from .hf.side_files import copy_side_files, side_files
from .hf.source import Checkpoint
from .opening import Readable, is_training, open_origin, open_readable, parameter_dtypes


@dataclass(frozen=True)
class HowToWrite:
    """workers: files written at once. max_shard_size: bytes. overwrite: whether `out` may be replaced. drop_untrained:
    whether tensors that are not trained are left behind, and no longer claimed by the config. tell: takes lines that
    say what became of them. tokenizer: saved in Hugging Face form in place of the source's own."""

    max_shard_size: int
    workers: int
    overwrite: bool = False
    show_progress: bool = False
    drop_untrained: bool = False
    tell: Callable[[str], None] = lambda _: None
    tokenizer: Any = None
    as_source: bool = False
    tell_errors: Callable[[str], None] = lambda _: None


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
    readable = _to_be_written(open_readable(source_path, drop_untrained=how.drop_untrained), how)
    source, names, checkpoint = readable.checkpoint.source, readable.names, readable.checkpoint
    num_experts = names.shape.num_experts
    if ep_size < 1 or num_experts % ep_size:
        fits = either(divisors(num_experts))
        raise ExpertMeshError(
            f"--ep-size {ep_size} does not divide the {num_experts} experts of this model; use {fits}"
        )
    check_all_bytes(source_path)
    _check_tied_copies(checkpoint)
    found = parameter_dtypes(checkpoint)
    dtypes = {name: found[name] if dtype is None or name in names.buffers else dtype for name in names.parameters}
    exported = [
        OutputTensor(o.tensor, o.dtype if dtype is None else dtypes[o.tensor.regions[0].parameter])
        for o in checkpoint.exported
    ]
    encodings = kept_encodings(checkpoint, names) if dtype is None else {}
    files = shard_files(names, dtypes, encodings, ep_size, how.max_shard_size)
    files += carried_files(checkpoint.carried, dtype is None, how.max_shard_size)

    place = _prepare(readable, out, MANIFEST, how.overwrite)
    records = _write(files, place, readable, how)
    with write_errors(out):
        # beside codes the config goes on to say how they are read
        origin = source.path if dtype is None and checkpoint.stored_forms else None
        copy_side_files(source, place, drop_untrained=checkpoint.drops_untrained, quantized_as=origin)
        sums = {r.name: FileSum(r.num_bytes, r.checksum, r.header_checksum) for r in records}
        for file in sorted({path for path in place.rglob("*") if path.is_file()} - {*traces(place)}):
            name = file.relative_to(place).as_posix()
            if name not in sums:
                sums[name] = FileSum(file.stat().st_size, file_checksum(file), None)
        row_sums = {name: value for r in records for name, value in r.row_sums.items()}
        manifest = make_manifest(
            *(source, names, ep_size, files, sums, row_sums, exported, checkpoint.carried, source_path.name),
            checkpoint.stored_forms if dtype is None else {},
        )
        _finish(place, out, MANIFEST, json.dumps(manifest, indent=1))
    return [] if dtype is not None else sorted(checkpoint.encoded_parameters - encodings.keys())


def export_offline(source_path: Path, out: Path, how: HowToWrite, base: Path | None = None) -> None:
    """Write the Hugging Face form of EP shards, a training checkpoint, or another Hugging Face directory (in other
    files). Its index, or its only file, makes it complete, and is written last.

    Args:
        base: of a training checkpoint (see `open_readable`).

    Raises:
        ExpertMeshError: the source is damaged, or `out` is not to be had.
    """
    source = open_readable(source_path, True, base, how.drop_untrained)
    check_all_bytes(source_path)
    if how.as_source and is_training(source_path):
        source = replace(source, origin=open_origin(source_path, base, source.names))
    write_hf(source, out, how)


def write_hf(source: Readable, out: Path, how: HowToWrite) -> None:
    """Write what a source reads as, in Hugging Face form.

    Raises:
        ExpertMeshError: `out` is not to be had.
    """
    source = _to_be_written(source, how)
    checkpoint = source.checkpoint
    if how.as_source:
        checkpoint = encoded_as_source(checkpoint, source.origin or checkpoint, how.tell)
        source = replace(source, checkpoint=checkpoint)
    files = plan_hf_files(checkpoint.in_hf_form, how.max_shard_size)
    last = SINGLE_NAME if len(files) == 1 else INDEX_NAME
    place = _prepare(source, out, last, how.overwrite)
    records = _write(files, place, source, how)
    with write_errors(out):
        origin = None if checkpoint.origin is None else checkpoint.origin.source.path
        copy_side_files(checkpoint.source, place, how.tokenizer, checkpoint.drops_untrained, origin)
        _finish(place, out, last, hf_index(files) if len(files) > 1 else None)
    if origin is not None:
        _tell_errors(records, how.tell_errors)


def encoded_as_source(checkpoint: Checkpoint, origin: Checkpoint, tell: Callable[[str], None]) -> Checkpoint:
    """A checkpoint whose export has the encoding of its source, if that has one; else this is told.

    Args:
        origin: the source.

    Raises:
        ExpertMeshError: the encoding can be read, and not be made.
    """
    if origin.stored_forms:
        return checkpoint.encoded_as(origin)
    tell(f"--export-encoding source: {origin.source.path} is not quantized, so nothing is")
    return checkpoint


def _tell_errors(records: Sequence[FileRecord], tell: Callable[[str], None]) -> None:
    from .hf.requantized import Errors, error_lines

    total: dict[str, Errors] = {}
    for record in records:
        for kind, found in record.errors.items():
            total.setdefault(kind, Errors()).add(Errors(**found))  # type: ignore[arg-type]
    for line in error_lines(total):
        tell(line)


def _to_be_written(source: Readable, how: HowToWrite) -> Readable:
    """A source with or without what is not trained, as was asked for."""
    found = source.checkpoint
    if how.drop_untrained:
        how.tell(f"dropped, as they are not trained: {found.carried_summary or 'no tensors'}")
        return replace(source, checkpoint=found.dropping_untrained())
    if found.carried:
        how.tell(f"copied unchanged, as they are not trained: {found.carried_summary}")
    return source


def _prepare(source: Readable, out: Path, last: str, overwrite: bool) -> Path:
    """Make the directory to write into: `out`, or, where that is to be replaced once the new one is complete, one
    beside it. A complete `out`, which has the file `last`, is replaced only if told so; an unfinished one is
    continued, and so is what is beside it."""
    checkpoint = source.checkpoint
    read = [source.path, checkpoint.source.path, *(tensor.directory for tensor in checkpoint.carried)]
    read += [] if checkpoint.origin is None else [checkpoint.origin.source.path]
    check_apart(out, dict.fromkeys([*read, *checkpoint.files]))
    side_files(checkpoint.source.path)  # what cannot go along is told before anything is written
    with write_errors(out):
        finish_replacement_of_missing(out)
    if out.exists() and not out.is_dir():
        raise ExpertMeshError(f"{out}: is no directory; choose another")
    begun = bool(traces(out))
    if (out / last).exists() and not begun and not overwrite:
        raise ExpertMeshError(f"{out}: already exists, and is complete; choose another, or replace it with --overwrite")
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


def _write(files: Sequence[OutputFile], out: Path, source: Readable, how: HowToWrite) -> list[FileRecord]:
    try:
        fingerprint = _fingerprint(files, source.checkpoint)
        return write_files(files, out, source.make_reader, fingerprint, how.workers, how.show_progress)
    except OSError as error:
        raise ExpertMeshError(
            f"{error.filename or out}: cannot be written: {error.strerror}; finished files are kept: "
            "the same command resumes from there"
        ) from error


def _fingerprint(files: Sequence[OutputFile], checkpoint: Checkpoint) -> str:
    """A fingerprint of the source's files, by name, size and time, and of the plan."""
    state = hashlib.sha256()
    origin = [] if checkpoint.origin is None else checkpoint.origin.all_files
    for file in sorted({*checkpoint.all_files, *origin}):
        status = file.stat()
        state.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for plan in files:
        state.update(plan.name.encode() + plan.header)
    return state.hexdigest()


def _finish(place: Path, out: Path, last: str, content: str | None) -> None:
    """Put the file that makes what was written complete in its place, atomically, and let it take that of `out`."""
    if content is not None:
        with whole(place / last) as partial:
            partial.write_text(content)
    forget_progress(place)
    if place != out:
        replace_directory(place, out.resolve())


def _check_tied_copies(checkpoint: Checkpoint) -> None:
    for copy, original in tied_copies_that_differ(checkpoint):
        raise ExpertMeshError(f"{checkpoint.source.path}: {copy.name} differs from {original}, its tied twin")
