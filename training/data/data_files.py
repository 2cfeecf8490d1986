"""Records of data files: JSON, JSON Lines, Parquet, CSV, plain text, a directory of them, or a data set of the Hugging
Face hub.

Records are plain dictionaries with the values that the file has: no schema is inferred, so a date in quotes stays text
and a column may be missing from some records. Splits of a directory are found as `datasets` finds them: by the configs
of a dataset card, else by the names of files and folders.
"""

import csv
import glob
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ...moe.util.errors import ExpertMeshError


class RowPlace(str):
    """Where a record stands, for messages. folder: to which paths in it are relative."""

    folder: Path

    @classmethod
    def within(cls, folder: Path, text: str) -> "RowPlace":
        place = cls(text)
        place.folder = folder
        return place


PlacedRow = tuple[RowPlace, Any]
"""Where a record stands, and the record; a `RowError` where it cannot be read, but those behind it can."""
_Row = tuple[str, Any]
"""The same within a file."""


class RowError(ValueError):
    """What is wrong with a record; whoever knows where it stands says so."""


StoppingStrategy = Literal["first_exhausted", "all_exhausted"]
"""Where a mixture of data sets ends, as `datasets` calls it."""
SampleBy = Literal["line", "paragraph", "document"]
"""What is a record of a .txt file, as `datasets` calls it. Blank lines are between paragraphs, and no records
themselves."""


@dataclass(frozen=True)
class DatasetSpec:
    """One entry of --dataset: a path or hub id, its weight among the records, if one was given, and what is its own in
    place of the run's: split, chat template, and a system message for conversations without one."""

    name: str
    weight: float | None
    split: str = ""
    chat_template: str = ""
    system: str = ""


def parse_datasets(flag: str, entries: list[str]) -> list[DatasetSpec]:
    """`a.jsonl:0.7 b.parquet:0.3`, or tables as JSON with the keys of _ENTRY: weights are for all of them or for none.
    A path that exists is all path.

    Raises:
        ExpertMeshError: a weight is not positive, only some have one, or a table has other keys.
    """
    specs = [_parse_entry(flag, entry) for entry in entries]
    weighted = [spec for spec in specs if spec.weight is not None]
    if weighted and len(weighted) < len(specs):
        bare = next(spec.name for spec in specs if spec.weight is None)
        raise ExpertMeshError(
            f"{flag}: {weighted[0].name} has a weight and {bare} has none; give all a weight, or none"
        )
    return specs


def places_read(flag: str, value: Any) -> list[str]:
    """The files, directories and hub ids that a setting of what is read names: one, or a list as `--dataset` takes."""
    if isinstance(value, list):
        return [spec.name for spec in parse_datasets(flag, value)]
    return [value] if value else []


_ENTRY: dict[str, tuple[type, ...]] = {
    "path": (str,), "weight": (int, float), "split": (str,), "chat_template": (str,), "system": (str,),
}  # fmt: skip
"""Keys of a table that is an entry of --dataset, with what each holds."""


def _parse_table(flag: str, entry: str) -> DatasetSpec:
    try:
        table = json.loads(entry)
    except ValueError as error:
        raise ExpertMeshError(f"{flag} {entry}: no such file, nor the JSON of a table: {error}") from error
    for key, value in table.items():
        if key not in _ENTRY:
            raise ExpertMeshError(f"{flag} {entry}: unknown key {key}; known: {', '.join(_ENTRY)}")
        if isinstance(value, bool) or not isinstance(value, _ENTRY[key]) or value == "":
            kind = "a number" if float in _ENTRY[key] else "a text"
            raise ExpertMeshError(f"{flag} {entry}: {key} must be {kind}")
    if "path" not in table:
        raise ExpertMeshError(f"{flag} {entry}: has no path")
    spec = DatasetSpec(**{"name" if key == "path" else key: value for key, value in {"weight": None, **table}.items()})
    if spec.weight is not None and not (math.isfinite(spec.weight) and spec.weight > 0):
        raise ExpertMeshError(f"{flag} {entry}: the weight {spec.weight} must be a positive number")
    return spec


def _parse_entry(flag: str, entry: str) -> DatasetSpec:
    if entry.lstrip().startswith("{") and not os.path.exists(entry):
        return _parse_table(flag, entry)
    name, colon, tail = entry.rpartition(":")
    if (
        not colon
        or os.path.exists(entry)
        or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf", tail, re.IGNORECASE)
    ):
        return DatasetSpec(entry, None)
    weight = float(tail)
    if not (math.isfinite(weight) and weight > 0):
        raise ExpertMeshError(f"{flag} {entry}: the weight {tail} must be a positive number")
    return DatasetSpec(name, weight)


@dataclass(frozen=True)
class RowSource:
    """Where records come from. `version` changes whenever they do, so that nothing stale comes out of a cache. unread:
    files beside them that could be read, and are not. size: of what is read, in bytes; 0 where it is not known.
    folders: to which paths in records are relative, as they were given: a link's own, not that of its target."""

    name: str
    version: str
    read: Callable[[], Iterator[PlacedRow]]
    unread: tuple[Path, ...] = ()
    size: int = 0
    folders: tuple[str, ...] = ()


def open_files(flag: str, name: str, config: str, split: str, sample_by: SampleBy = "line") -> list[RowSource]:
    """What `open_rows` reads, file by file; of a hub dataset nothing is copied to disk.

    Raises:
        ExpertMeshError: as `open_rows`.
    """
    import datasets

    path = Path(name)
    if path.is_dir() and not _is_saved(path):
        _, files, _ = split_files(flag, path, config, split, KINDS)
        return [_files(flag, str(file), [file], sample_by) for file in files]
    if path.exists() or not is_hub_id(name):
        return [open_rows(flag, name, config, split, sample_by)]
    loaded = _load_hub(flag, name, partial(datasets.load_dataset, name, config or None, split=split, streaming=True))
    parts = [loaded.shard(loaded.num_shards, number) for number in range(loaded.num_shards)]
    return [_rows_of(f"{flag} {name}: file {number}", name, part) for number, part in enumerate(parts, start=1)]


def check_places(flag: str, entries: list[str]) -> None:
    """What needs no library, before any is imported.

    Raises:
        ExpertMeshError: as `open_rows`, of files that are not there, are empty, of no known kind or must not be read.
    """
    for spec in parse_datasets(flag, entries) if entries else []:
        path = Path(spec.name)
        if path.is_file():
            _files(flag, spec.name, [path], "line")
        else:
            _check_exists(flag, spec.name)
            if not path.exists():
                _check_cached(flag, spec.name)


def _check_cached(flag: str, name: str) -> None:
    """Refuse a data set of the hub of which nothing is here, where nothing may be fetched."""
    from huggingface_hub import constants

    owner = name.partition("/")[0]
    hub, made = Path(constants.HF_HUB_CACHE), Path(os.environ.get("HF_DATASETS_CACHE", f"{constants.HF_HOME}/datasets"))
    found = [*hub.glob(f"datasets--{name.replace('/', '--')}"), *made.glob(f"{owner}___*")]
    if constants.HF_HUB_OFFLINE and "HF_DATASETS_OFFLINE" not in os.environ and not found:
        raise ExpertMeshError(
            f"{flag} {name}: no such file or directory, nor a data set of that name in {hub} or {made}, and "
            "HF_HUB_OFFLINE keeps it from being fetched"
        )


def _check_exists(flag: str, name: str) -> None:
    """Refuse what is neither a path nor may be a hub id."""
    if not os.path.exists(name) and not is_hub_id(name):
        raise ExpertMeshError(f"{flag} {name}: no such file or directory")


def open_rows(flag: str, name: str, config: str, split: str, sample_by: SampleBy = "line") -> RowSource:
    """The records of a file, or of a split of a directory (see `split_files`) or of a hub dataset.

    Raises:
        ExpertMeshError: there is no such file, directory or data set, or its kind is unknown. What is wrong within a
            file is raised while it is read.
    """
    path = Path(name)
    if path.is_dir():
        return _directory(flag, path, config, split, sample_by)
    if path.exists():
        return _files(flag, name, [path], sample_by)
    _check_exists(flag, name)
    return _hub(flag, name, config, split)


def is_hub_id(name: str) -> bool:
    """Whether a name that is no path can be one on the hub."""
    return Path(name).suffix not in KINDS and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def _is_saved(directory: Path) -> bool:
    """By `datasets`."""
    return (directory / "state.json").is_file() or (directory / "dataset_dict.json").is_file()


def _directory(flag: str, directory: Path, config: str, split: str, sample_by: SampleBy) -> RowSource:
    if _is_saved(directory):
        return _saved_by_datasets(flag, directory, split)
    name, files, unread = split_files(flag, directory, config, split, KINDS)
    return _files(flag, name, files, sample_by, unread)


def _files(flag: str, name: str, files: list[Path], sample_by: SampleBy, unread: Sequence[Path] = ()) -> RowSource:
    for file in files:
        if file.suffix not in KINDS:
            raise ExpertMeshError(f"{flag} {file}: unknown file type {file.suffix!r}; known: {', '.join(KINDS)}")
        if not os.access(file, os.R_OK):
            raise ExpertMeshError(f"{flag} {file}: cannot be read: permission denied")
        if file.stat().st_size == 0:
            raise ExpertMeshError(f"{flag} {file}: is empty")

    def read() -> Iterator[PlacedRow]:
        for file in files:
            is_text = file.suffix == ".txt"
            rows = _text_rows(flag, file, sample_by) if is_text else READERS[file.suffix](flag, file)
            for place, row in rows:
                yield RowPlace.within(file.parent, f"{flag} {file}: {place}"), row

    stats = _stats(files)
    folders = tuple(dict.fromkeys(str(file.parent.absolute()) for file in files))
    return RowSource(name, repr((stats, sample_by)), read, tuple(unread), sum(size for _, size, *_ in stats), folders)


def _stats(files: Iterable[Path]) -> list[tuple[str, int, int, int]]:
    """What is another where a file's content is: its place, size and times, that of the last change of any kind too,
    as a copy may keep that of the content."""
    return [(str(file.resolve()), (s := file.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns) for file in files]


def _saved_by_datasets(flag: str, directory: Path, split: str) -> RowSource:
    import datasets

    try:
        saved = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise ExpertMeshError(f"{flag} {directory}: cannot be read as a saved dataset: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ExpertMeshError(f"{flag} {directory}: has no split {split!r}; found: {', '.join(map(str, saved))}")
        saved = saved[split]
    rows = _rows_of(f"{flag} {directory}", str(directory), saved)
    # its fingerprint stands in a file beside those of the records
    stats = _stats(Path(file["filename"]) for file in saved.cache_files)
    return replace(rows, version=repr((rows.version, stats)))


def _hub(flag: str, name: str, config: str, split: str) -> RowSource:
    import datasets

    loaded = _load_hub(flag, name, partial(datasets.load_dataset, name, config or None, split=split))
    return _rows_of(f"{flag} {name}", name, loaded)


def _load_hub(flag: str, name: str, load: partial[Any]) -> Any:
    try:
        return load()
    except Exception as error:
        raise ExpertMeshError(
            f"{flag} {name}: no such file or directory, and split {load.keywords['split']!r} of a hub dataset with "
            f"that name cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _rows_of(place: str, name: str, dataset: Any) -> RowSource:
    def read() -> Iterator[PlacedRow]:
        batches = dataset.with_format("arrow").iter(batch_size=1024)
        for number, row in enumerate((row for batch in batches for row in _table_rows(batch)), start=1):
            yield RowPlace.within(Path(name), f"{place}: record {number}"), row

    return RowSource(name, getattr(dataset, "_fingerprint", ""), read, folders=(str(Path(name).absolute()),))


def _table_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Records of an Arrow table, as JSON Lines would have them."""
    types = {field.name: field.type for field in table.schema}
    for row in table.to_pylist(maps_as_pydicts="strict"):
        yield {name: _as_in_json(value, types[name]) for name, value in row.items()}


def _as_in_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type. A struct has all keys that any record's has, with null for those that a record's own
    lacks: they are left out. What was mixed in the data is JSON text, of a type of its own."""
    import pyarrow

    types = pyarrow.types
    if value is None:
        return None
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return value.isoformat()
    if types.is_map(kind):
        return {name: _as_in_json(one, kind.item_type) for name, one in value.items()}
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if types.is_struct(kind):
        return {name: _as_in_json(one, kind.field(name).type) for name, one in value.items() if one is not None}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_as_in_json(one, kind.value_type) for one in value]
    return value


def _json_rows(flag: str, file: Path) -> Iterator[_Row]:
    """Records of a JSON Lines file, or of one JSON list, whatever the file's ending."""
    first = b""
    with open(file, "rb") as lines:
        for line in lines:
            first = line.removeprefix(b"\xef\xbb\xbf").strip()
            if first:
                break
    if first.startswith(b"["):
        try:
            rows = _parsed(file.read_bytes())
        except RowError as error:
            raise ExpertMeshError(f"{flag} {file}: the file {error}") from error
        yield from ((f"record {number}", row) for number, row in enumerate(rows, start=1))
        return
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"line {number}", _parsed(line)
                except RowError as error:
                    yield f"line {number}", error


def _parsed(content: bytes) -> Any:
    """
    Raises:
        RowError: it is no JSON.
    """
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowError(f"is not UTF-8 text: {error}") from error
    except (ValueError, RecursionError) as error:
        start = content[:80].decode("utf-8", errors="replace").strip()
        raise RowError(f"is not valid JSON ({error}): {start}") from error


def _parquet_rows(flag: str, file: Path) -> Iterator[_Row]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in _table_rows(batch):
                    number += 1
                    yield f"record {number}", row
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise ExpertMeshError(f"{flag} {file}: cannot be read as Parquet after record {number}: {error}") from error


def _csv_rows(flag: str, file: Path) -> Iterator[_Row]:
    """Every cell is text; the first line names the columns."""
    csv.field_size_limit(2**31 - 1)
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
            for row in reader:
                if None in row or None in row.values():
                    cells = len(reader.fieldnames or []) + (len(row.get(None, [])) if None in row else 0)
                    cells -= sum(value is None for value in row.values())
                    columns = len(reader.fieldnames or [])
                    wrong = RowError(f"has {cells} cells, the first line names {columns} columns")
                    yield f"line {reader.line_num}", wrong
                    continue
                yield f"line {reader.line_num}", row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ExpertMeshError(f"{flag} {file}: cannot be read as CSV in UTF-8: {error}") from error


def _text_rows(flag: str, file: Path, sample_by: SampleBy) -> Iterator[_Row]:
    """Records with the one column `text`. Line breaks within a record are \\n, whatever the file's; none is at its
    end."""
    block: list[str] = []
    begun = 1
    for number, line in enumerate(_text_lines(flag, file), start=1):
        is_blank = not line.strip()
        if block and (sample_by == "line" or (sample_by == "paragraph" and is_blank)):
            yield f"line {begun}", {"text": "\n".join(block)}
            block = []
        if not block:
            begun = number
        if block or not is_blank:
            block.append(line)
    if block:
        yield f"line {begun}", {"text": "\n".join(block).rstrip("\n")}


def _text_lines(flag: str, file: Path) -> Iterator[str]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise ExpertMeshError(f"{flag} {file}: line {number} is not UTF-8 text: {error}") from error


READERS: dict[str, Callable[[str, Path], Iterator[_Row]]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".ndjson": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
}
KINDS = (*READERS, ".txt")


def split_files(
    flag: str, directory: Path, config: str, split: str, kinds: Sequence[str]
) -> tuple[str, list[Path], list[Path]]:
    """The files of one split, in the order of their names; all files of a directory that names no splits.

    Args:
        flag: that named the directory, for messages.
        config: which of the card's configs, if it has several; empty: its default.
        kinds: endings of files that can be read.

    Returns:
        What was taken, in words, the files, and files beside these that hold data, too, and are not taken: texts
        beside tables, and what is compressed.

    Raises:
        ExpertMeshError: no file can be read, there is no such split or config, or the card is malformed.
    """
    base = directory.resolve()
    splits = _find_splits(flag, directory, config, kinds)
    find, read, files = splits.find, splits.read, splits.files

    def named(found: Iterable[Path]) -> list[Path]:
        return [directory / file.relative_to(base) for file in found]

    hold_data = [file for file in map(Path, find("**")) if {*map(str.lower, file.suffixes)} & {*kinds, ".arrow"}]
    unread = named(sorted(file for file in hold_data if file.suffix not in read))
    if not splits.are_named and split in ("train", "test"):
        return str(directory), named(files["train"]), unread
    others = sorted({*_of_kinds(find, ["**"], read)}.difference(*files.values()))
    unnamed = "" if not others else f"; in no split: {', '.join(file.name for file in others[:5])}"
    if not files.get(split):
        raise ExpertMeshError(
            f"{flag} {directory}: has no split {split!r}; found: {', '.join(files)}{unnamed}; choose "
            f"one with {flag}-split, or give files instead of the directory"
        )
    return f"{directory}, split {split} of {', '.join(files)}{unnamed}", named(files[split]), unread


@dataclass(frozen=True)
class _Splits:
    """Those of a directory: the files of each. are_named: whether anything tells them apart; else all are of one. find:
    what matches a pattern. read: endings of files that are read."""

    files: dict[str, list[Path]]
    are_named: bool
    find: Callable[[str], list[str]]
    read: list[str]


def _find_splits(flag: str, directory: Path, config: str, kinds: Sequence[str]) -> _Splits:
    """See `split_files`."""
    from datasets.data_files import DEFAULT_PATTERNS_ALL, _get_data_files_patterns, resolve_pattern

    base, patterns = directory.resolve(), _card_patterns(flag, directory, config)
    find = partial(resolve_pattern, base_path=glob.escape(str(base)))
    # beside tables, a text is about them: a licence, notes
    for read in ([kind for kind in kinds if kind != ".txt"], [".txt"]):
        find_read = partial(find, allowed_extensions=read)
        if not (patterns_of := patterns):
            with suppress(FileNotFoundError):
                patterns_of = {str(name): wanted for name, wanted in _get_data_files_patterns(find_read).items()}
        files = {name: _of_kinds(find_read, wanted, read) for name, wanted in patterns_of.items()}
        if any(files.values()):
            are_named = patterns_of != {str(name): wanted for name, wanted in DEFAULT_PATTERNS_ALL.items()}
            return _Splits(files, are_named, find, read)
    listed = ", ".join(sorted(path.name for path in base.iterdir())[:8]) or "nothing"
    raise ExpertMeshError(f"{flag} {directory}: has no data file ({', '.join(kinds)}); found: {listed}")


def named_parts(flag: str, name: str, config: str) -> tuple[str, frozenset[str]]:
    """What data are, in words, and what parts of them have names: "split", "config".

    Raises:
        ExpertMeshError: as `open_rows`, of a directory.
    """
    path = Path(name)
    if path.is_file():
        return "a file", frozenset()
    if not path.is_dir():
        return "a hub dataset", frozenset({"split", "config"})
    if _is_saved(path):
        has_splits = (path / "dataset_dict.json").is_file()
        return "a saved dataset", frozenset({"split"} if has_splits else ())
    parts = {"split"} if _find_splits(flag, path, config, KINDS).are_named else set()
    return "a directory", frozenset(parts | ({"config"} if _card_configs(path / "README.md") else set()))


def _of_kinds(find: Callable[[str], list[str]], patterns: Iterable[str], kinds: Sequence[str]) -> list[Path]:
    files: set[Path] = set()
    for pattern in patterns:
        with suppress(FileNotFoundError):
            files |= {Path(name) for name in find(pattern) if Path(name).suffix in kinds}
    return sorted(files)


def _card_patterns(flag: str, directory: Path, config: str) -> dict[str, list[str]]:
    """Patterns of each split, relative to the directory, as the card's YAML has them; none where it has none."""
    from datasets.data_files import sanitize_patterns

    card = directory / "README.md"
    try:
        configs = _card_configs(card)
        name = config if config in configs else configs.get_default_config_name() if configs else None
    except Exception as error:
        raise ExpertMeshError(f"{flag} {directory}: {card.name}: its configs cannot be read: {error}") from error
    if not configs:
        return {}
    if name is None or (config and name != config):
        raise ExpertMeshError(
            f"{flag} {directory}: {card.name} has the configs {', '.join(map(str, configs))}"
            + (f", not {config!r}" if config else "")
            + "; choose one with --dataset-config"
        )
    if "data_files" not in configs[name]:
        return {}
    folder = str(configs[name].get("data_dir") or "")
    patterns = sanitize_patterns(configs[name]["data_files"])
    within = {
        str(split): [f"{folder}/{pattern}".lstrip("/") if folder else str(pattern) for pattern in of_split]
        for split, of_split in patterns.items()
    }
    for pattern in (pattern for of_split in within.values() for pattern in of_split):
        if "::" in pattern or "://" in pattern or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ExpertMeshError(f"{flag} {directory}: {card.name} names {pattern!r}, which is not in the directory")
    return within


def _card_configs(card: Path) -> Any:
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import metadata_load

    is_card = card.is_file() and card.read_bytes().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"---")
    data: Any = (metadata_load(card) if is_card else None) or {}
    return MetadataConfigs.from_dataset_card_data(data)
