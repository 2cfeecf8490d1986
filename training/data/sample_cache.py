"""Tables of tokenized samples: made once, then kept between runs in a directory of our own in the cache of `datasets`;
of records in memory, in none."""

import copy
import errno
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.files.kept import damage, record_kept, recorded_files, recorded_key
from ...moe.util.child import cores
from ...moe.util.errors import ExpertMeshError
from ...moe.util.progress import CountedProgress
from ...moe.util.versions import installed_version
from .chat import DROPS_REASONING, set_chat_template
from .data_files import DatasetSpec, RowSource, open_rows, parse_datasets
from .formats import registered_formats
from .image_files import changed_images, identity, kept_images, samples_cache
from .record_kinds import RECORD
from .samples import SAMPLES, Noted, Origin, Samples, column_of, mix
from .templates import reads_clock
from .tokenizing import DataOptions, records_of, special_ids, table_maker

# raise it when the same input gives other tokens, so that what an older version has cached is not taken
_VERSION = 23
# one process tokenises this many records in less time than it takes to start more
_ROWS_A_WORKER = 5_000
_ROWS_WITH_IMAGES_A_WORKER = 100
_BATCH_BYTES = 64 * 2**20
_LONGEST = 10
"""So many records are told of as the longest."""
_BAD_TOLD = 10
"""So many of those that cannot be used."""
_PLACE, _DELETE = "{}: tokenized samples cannot be", "delete that directory, and it is made again"


def load_samples(
    flag: str,
    entries: list[str],
    tokenizer: Any,
    options: DataOptions,
    seed: int,
    checks: bool = True,
    repeats: bool = False,
) -> Samples:
    """Read and tokenise data sets, and mix them if they have weights.

    Args:
        flag: that named them, for messages.
        entries: paths or hub ids, each perhaps with `:weight`.
        tokenizer: a fast one, its chat template set (see `set_chat_template`).
        options: how records become tokens.
        seed: of the choice of records where weights leave some out.
        checks: whether what the cache holds is compared with its checksums.
        repeats: whether a mixture ends with the data set that is the last to be used up, not with the first.

    Raises:
        ExpertMeshError: a data set is missing, empty or malformed (with the line), a record has none of the known
            formats or does not fit the chat template, or nothing is left to learn.
    """
    check_fast(flag, tokenizer)
    specs = parse_datasets(flag, entries)
    own = [_own_of(spec, tokenizer, options) for spec in specs]
    sources = [
        open_rows(flag, spec.name, each.hub_config, each.split, each.sample_by)
        for spec, (_, each) in zip(specs, own, strict=True)
    ]
    parts = [_tokenised(source, flag, *each, checks) for source, each in zip(sources, own, strict=True)]
    return mix(flag, specs, parts, seed, repeats)


def _own_of(spec: DatasetSpec, tokenizer: Any, options: DataOptions) -> tuple[Any, DataOptions]:
    """The tokenizer and the options of a data set, with what is its own."""
    options = replace(
        options,
        split=spec.split or options.split,
        columns=replace(options.columns, system_message=spec.system or options.columns.system_message),
    )
    if not spec.chat_template:
        return tokenizer, options
    tokenizer = copy.copy(tokenizer)
    set_chat_template(tokenizer, spec.chat_template)
    return tokenizer, options if reads_clock(tokenizer) else replace(options, template_date="")


def check_fast(flag: str, tokenizer: Any) -> None:
    """
    Raises:
        ExpertMeshError: the tokenizer does not tell where a token stands in the text.
    """
    if not tokenizer.is_fast:
        raise ExpertMeshError(f"{flag}: the tokenizer is a slow one, without token offsets; give a fast tokenizer")


def samples_in_memory(
    records: list[dict[str, Any]], flag: str, tokenizer: Any, options: DataOptions
) -> tuple[Samples | None, Sequence[str]]:
    """Samples of some records, which are in no cache, None where there is nothing to learn; and which are left out, as
    they cannot be used."""
    from datasets import Dataset

    rows = Dataset.from_list(records)
    name = f"{len(rows):,} records from {rows[0]['place'].removeprefix(flag).strip()}"
    _bad_ones(rows, rows, flag, name, options)
    make_table, size = table_maker(tokenizer, options), _batch_size(rows)
    spans = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    tables = [make_table(rows[span.start : span.stop], list(span)) for span in spans]
    table = {name: [value for part in tables for value in part[name]] for name in tables[0]}
    tokens = Dataset.from_dict(table, features=_features(options))
    bad = _bad_ones(rows, tokens, flag, name, options)
    has_targets = any(table["num_targets"])
    return _samples(rows, tokens, flag, name, options, ()) if has_targets else None, bad


def _bad_ones(rows: Any, table: Any, flag: str, name: str, options: DataOptions) -> tuple[str, ...]:
    """Where records stand that cannot be used, and why.

    Args:
        table: of the records, or of what became of them.

    Raises:
        ExpertMeshError: there are more than may be left out.
    """
    numbers = np.flatnonzero(table.data.column("bad").to_numpy() != "").tolist()
    row_of = numbers if rows is table else [table[number]["row"] for number in numbers]
    bad = [f"{rows[row]['place']}{table[number]['bad']}" for number, row in zip(numbers, row_of, strict=True)]
    if len(bad) <= options.skip_bad_records:
        return tuple(bad)
    if len(bad) == 1:
        raise ExpertMeshError(bad[0])
    few = [each.removeprefix(f"{flag} {name}: ") for each in bad[:_BAD_TOLD]]
    more = f", more than --skip-bad-records {options.skip_bad_records}" if options.skip_bad_records else ""
    raise ExpertMeshError(
        f"{flag} {name}: {len(bad):,} of {len(rows):,} records cannot be used{more}; the first {len(few)}: "
        f"{'; '.join(few)}; mend them, or leave them out with --skip-bad-records {len(bad)}"
    )


def left_out(name: str, bad: Sequence[str]) -> list[str]:
    """Lines that tell of records that cannot be used."""
    lines = [f"warning: {name}: left out, as it cannot be used: {each}" for each in bad[:_BAD_TOLD]]
    more = [f"warning: {name}: {len(bad):,} records are left out in all (--skip-bad-records)"]
    return lines + (more if len(bad) > _BAD_TOLD else [])


def _tokenised(source: RowSource, flag: str, tokenizer: Any, options: DataOptions, checks: bool) -> Samples:
    """One data set, without the samples that have nothing to learn."""
    from datasets import Dataset

    rows_key, tokens_key = keys_of(source.version, options, tokenizer, source.folders)
    try:
        for key in (rows_key, tokens_key) if checks else ():
            _check_kept(rows_key, key)
        with _telling(f"reading {source.name}"):
            rows = Dataset.from_generator(
                partial(records_of, source, flag, options),
                cache_dir=str(samples_cache()),
                fingerprint=rows_key,
            )
        _record_kept(rows, rows_key)
        _bad_ones(rows, rows, flag, source.name, options)
        make_tokens = partial(
            rows.map,
            table_maker(tokenizer, options),
            with_indices=True,
            batched=True,
            batch_size=_batch_size(rows),
            remove_columns=rows.column_names,
            features=_features(options),
            num_proc=_workers(len(rows), options),
            new_fingerprint=tokens_key,
        )
        with _telling(f"tokenizing {source.name}", len(rows)):
            tokens = make_tokens()
            if checks and options.images is not None and _has_other_images(tokens, tokens_key, options.fetches):
                _record_file(tokens, tokens_key).unlink(missing_ok=True)
                tokens = make_tokens(load_from_cache_file=False)
        _record_kept(tokens, tokens_key)
        _check_columns(tokens, _features(options))
        _bad_ones(rows, tokens, flag, source.name, options)
        return _samples(rows, tokens, flag, source.name, options, source.unread)
    except Exception as error:
        raise _own_error(error) from None


@contextmanager
def _telling(what: str, total: int = 0) -> Iterator[None]:
    """Say how far `datasets` is, in place of its own bars: these come at once, and are redrawn in files, too.

    Args:
        total: of records, where `datasets` knows it.
    """
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, tqdm

    def update(bar: Any, number: int = 1) -> None:
        if (bar.total or 0) == total:  # others count files
            progress.add(number)

    is_shown = not are_progress_bars_disabled()
    progress = CountedProgress(what, total, "records", is_shown)
    with progress, mock.patch.object(tqdm, "update", update):
        disable_progress_bars()
        try:
            yield
        finally:
            if is_shown:
                enable_progress_bars()


def _check_kept(rows_key: str, key: str) -> None:
    """Compare the files of a data set in the cache with their checksums, before `datasets` reads them: what it raises
    where they are damaged may be anything.

    Raises:
        ExpertMeshError: a file is damaged.
    """
    for record in samples_cache().glob(f"*/*{rows_key}/*/{key}.json"):
        of_another = "" if recorded_key(record) == key else f"{record}: is damaged, or of other data"
        if found := of_another or damage(record, recorded_files(record)):
            raise ExpertMeshError(f"{_PLACE.format(samples_cache())} read there: {found}; {_DELETE}")


def _has_other_images(tokens: Any, key: str, reads: bool) -> bool:
    """Whether images have changed since samples in the cache were made.

    Args:
        reads: whether their checksums are compared, too, unless the samples have just been made.

    Raises:
        ExpertMeshError: one that is kept in the cache is not there any more.
    """
    if not tokens.cache_files:
        return False
    reads = reads and _record_file(tokens, key).exists()
    lists = tokens.data.column("images").chunks
    others = changed_images({each for chunk in lists for each in chunk.flatten().unique().to_pylist()}, reads)
    if lost := next((path for path in others if Path(path).parent == kept_images() and not identity(path)), None):
        raise ExpertMeshError(f"{_PLACE.format(samples_cache())} used: the image {lost} is missing; {_DELETE}")
    return bool(others)


def _record_file(dataset: Any, key: str) -> Path:
    """Where the checksums of a data set in the cache are."""
    return Path(dataset.cache_files[0]["filename"]).with_name(f"{key}.json")


def _record_kept(dataset: Any, key: str) -> None:
    """Write checksums beside new files of a data set in the cache."""
    import datasets

    files = [Path(file["filename"]) for file in dataset.cache_files]
    # no rows: who looks at the columns tells of it
    if files and not (record := _record_file(dataset, key)).exists():
        files.append(record.with_name(datasets.config.DATASET_INFO_FILENAME))
        record_kept(record, key, files, writer=str(os.getpid()))


def _check_columns(tokens: Any, expected: Collection[str]) -> None:
    """
    Raises:
        pyarrow.ArrowInvalid: some are not there: a file that ends within its header is read as one without any.
    """
    import pyarrow

    if missing := sorted({*expected} - {*tokens.column_names}):
        raise pyarrow.ArrowInvalid(f"no columns {', '.join(missing)}")


def _features(options: DataOptions) -> Any:
    from datasets import Features, Value
    from datasets.features import List

    kinds = {"tokens": "int32", "is_trained": "bool", "ends": "int32", "weights": "float32", "full_lengths": "int64"}
    if options.images is not None:
        kinds |= {"images": "string", "image_edges": "int32"}
    texts: Any = {"bad": Value("string")}
    lists: Any = {name: List(Value(kind)) for name, kind in kinds.items()}
    numbers: Any = {name: Value("int32") for name in ("length", "num_targets")}
    numbers |= {name: Value("int64") for name in ("full_length", "lost", "row")}
    flags: Any = {name: Value("bool") for name in ("is_endless", "is_empty", "is_unexplained")}
    flags |= {name: Value("bool") for name in ("is_cut", "is_dropped", "loses_call", "drops_reasoning")}
    if options.images is not None:
        flags["loses_images"] = Value("bool")
    numbers |= {name: Value(kind) for name, kind in options.kind.numbers.items()}
    flags |= {name: Value("bool") for name in options.kind.flags}
    return Features(texts | lists | numbers | flags)


def _samples(rows: Any, tokens: Any, flag: str, name: str, options: DataOptions, unread: Sequence[Path]) -> Samples:
    """The samples that have something to learn.

    Args:
        rows, tokens: what `records_of` gave, and what became of it.
    """
    targets, is_cut, is_dropped = (column_of(tokens, name) for name in ("num_targets", "is_cut", "is_dropped"))
    learnable, bad = targets.nonzero().flatten().tolist(), _bad_ones(rows, tokens, flag, name, options)
    is_bad = torch.from_numpy(tokens.data.column("bad").to_numpy() != "")
    if not learnable and bad:
        raise ExpertMeshError(f"{bad[0]}; nor has any other record a trained token")
    if not learnable:
        raise ExpertMeshError(
            f"{flag} {name}: no record has a trained token within --max-seq-length {options.max_seq_length}"
        )
    row_of, full_length = column_of(tokens, "row"), column_of(tokens, "full_length")

    def place(number: int) -> str:
        found: str = rows[int(row_of[number])]["place"]
        return found

    def noted(which: Tensor, more: str = "") -> Noted | None:
        found = (which if not more else which & (column_of(tokens, more) == 1)).nonzero().flatten().tolist()
        return Noted(len(found), place(found[0])) if found else None

    is_learned, is_split = targets > 0, len(tokens) > len(rows)
    is_long = (is_cut | is_dropped) == 1
    one = rows[int(row_of[learnable[0]])]
    ends = {end for chunk in tokens.data.column("ends").chunks for end in chunk.flatten().unique().to_pylist()}
    origin = Origin(
        name,
        one["format"],
        is_plain=bool(options.prompt_template) or one["is_plain"],
        rows=len(tokens),
        without_target=int((~is_learned & (is_dropped == 0) & ~is_bad).sum()),
        cut=int(is_cut.sum()),
        endless=int((column_of(tokens, "is_endless")[learnable]).sum()),
        used=len(learnable),
        ends=tuple(sorted(ends)),
        weighted=sum(bool(n) for chunk in tokens.data.column("weights").chunks for n in chunk.value_lengths().tolist()),
        split=len(rows) if is_split else len({*rows[RECORD]}) if RECORD in rows.column_names else 0,
        too_long=noted(~is_learned & (is_cut == 1)),
        dropped=noted(is_dropped == 1),
        untrained=noted(~is_learned & (is_cut == 0) & (is_dropped == 0) & ~is_bad),
        empty=noted(is_learned, "is_empty"),
        unexplained=noted(is_learned, "is_unexplained"),
        images_cut=None if options.images is None else noted(is_learned, "loses_images"),
        calls_cut=noted(is_learned | (is_cut == 1), "loses_call"),
        unread=Noted(len(unread), str(unread[0])) if unread else None,
        told=_told(rows) + [(DROPS_REASONING, of) for of in [noted(is_learned, "drops_reasoning")] if of],
        bad=bad,
        lengths=_lengths(tokens),
        # what is left out for its length is lost completely
        lost=int(torch.where(is_learned, column_of(tokens, "lost"), full_length)[is_long].sum()),
        untrained_tokens=int(full_length[~is_learned & ~is_long].sum()),
        longest=tuple(
            (int(full_length[at]), place(at))
            for at in full_length.sort(descending=True, stable=True).indices[:_LONGEST].tolist()
            if full_length[at]
        ),
    )
    kept = tokens if len(learnable) == len(tokens) else tokens.select(learnable)
    return SAMPLES.get(options.kind.name, Samples)(kept, [origin])


def _lengths(tokens: Any) -> tuple[tuple[int, int], ...]:
    """Each length of texts in tokens, before any is cut, with how many have it, in order."""
    values = [chunk.flatten().to_numpy() for chunk in tokens.data.column("full_lengths").chunks]
    lengths, numbers = torch.from_numpy(np.concatenate(values)).unique(return_counts=True)
    return tuple(zip(lengths.tolist(), numbers.tolist(), strict=True))


def _told(rows: Any) -> list[tuple[str, Noted]]:
    """What reading says of records, each with how many and where the first one is."""
    found: dict[str, list[int]] = {}
    column = rows.with_format("arrow")["told"][:]
    for counted in column.value_counts().to_pylist():
        first = column.index(counted["values"]).as_py()
        for said in filter(None, counted["values"].split("\n")):
            found.setdefault(said, []).extend([counted["counts"], first])
    return [(said, Noted(sum(of[::2]), rows[min(of[1::2])]["place"])) for said, of in found.items()]


def keys_of(version: str, options: DataOptions, tokenizer: Any, folders: Sequence[str] = ()) -> tuple[str, str]:
    """(of a source's records as they are read, of their tokens).

    Args:
        version, folders: of the source (see `RowSource`); the folders are those in which images are looked for.
    """
    of_images = [] if options.images is None else [options.images.facts]
    sees = [["images", *folders] for _ in of_images]
    columns = {name: value for name, value in asdict(options.columns).items() if name != "images"}
    if not columns["system_message"]:  # which came after data were cached
        del columns["system_message"]
    rows_key = _fingerprint(version, columns, options.kind.key, *registered_formats(), *sees)
    # which part of the source it is, is in its version
    settings = {**asdict(replace(options, images=None)), "num_workers": None, "hub_config": None, "split": None}
    settings["columns"] = columns
    # in the form, and the order, in which caches of earlier releases have it
    for name in ("kind", "images", "fetches", "skip_bad_records"):
        del settings[name]
    settings |= {name: name == options.kind.name for name in ("pairs", "labelled", "split_turns")}
    of_tokenizer = [tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token, tokenizer.eos_token]
    # what renders templates, and what tokenizes
    of_tokenizer += map(installed_version, ("transformers", "jinja2", "tokenizers"))
    ends = sorted(special_ids(tokenizer))
    return rows_key, _fingerprint(rows_key, settings, of_tokenizer, tokenizer.chat_template, ends, *of_images)


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()[:32]


def _own_error(error: BaseException) -> BaseException:
    """What a generator or a worker raised, which `datasets` wraps, or what goes wrong with the cache."""
    import pyarrow

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ExpertMeshError | OSError):
        cause = cause.__cause__
    place = _PLACE.format(samples_cache())
    # what a generator met in the data is wrapped
    is_damaged = isinstance(error, FileNotFoundError | pyarrow.ArrowException | json.JSONDecodeError)
    if is_damaged or (isinstance(cause, OSError) and _is_of_reading(cause)):
        return ExpertMeshError(f"{place} read there: {error}; {_DELETE}")
    if isinstance(cause, OSError):
        return ExpertMeshError(
            f"{place} written there: {cause.strerror or cause}; choose another directory with the "
            "environment variable HF_DATASETS_CACHE"
        )
    return cause or error


def _is_of_reading(error: OSError) -> bool:
    """Whether it is no error of the disk that is written to: pyarrow raises one without a number where what a file
    holds is damaged."""
    return error.errno is None or (
        error.errno in (errno.EACCES, errno.EPERM)
        and os.path.isfile(error.filename or "")
        and not os.access(error.filename, os.R_OK)
    )


def _batch_size(rows: Any) -> int:
    """Records that are tokenised together: fewer where they are long."""
    return min(max(_BATCH_BYTES * len(rows) // max(rows.data.nbytes, 1), 1), 500)


def _workers(num_rows: int, options: DataOptions) -> int | None:
    wanted, rows = options.num_workers, _ROWS_A_WORKER if options.images is None else _ROWS_WITH_IMAGES_A_WORKER
    number = wanted if wanted is not None else min(cores(), num_rows // rows, 16)
    return number if number > 1 else None
