"""Splits of a directory of data files, found as `datasets` finds them: by the configs of a dataset card, else by the
names of files and folders."""

import glob
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...moe.util.errors import ExpertMeshError


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
    from datasets.data_files import DEFAULT_PATTERNS_ALL, resolve_pattern

    base, patterns = directory.resolve(), _card_patterns(flag, directory, config)
    # beside tables, a text is about them: a licence, notes
    for read in ([kind for kind in kinds if kind != ".txt"], [".txt"]):
        find = partial(resolve_pattern, base_path=glob.escape(str(base)), allowed_extensions=read)
        found = patterns or _named_patterns(find)
        files = {name: _files(find, wanted, read) for name, wanted in found.items()}
        if any(files.values()):
            every_file = sorted(map(Path, resolve_pattern("**", base_path=glob.escape(str(base)))))
            hold_data = [file for file in every_file if {*map(str.lower, file.suffixes)} & {*kinds, ".arrow"}]
            unread = [directory / file.relative_to(base) for file in hold_data if file.suffix not in read]
            break
    else:
        listed = ", ".join(sorted(path.name for path in base.iterdir())[:8]) or "nothing"
        raise ExpertMeshError(f"{flag} {directory}: has no data file ({', '.join(kinds)}); found: {listed}")
    if found == {str(name): wanted for name, wanted in DEFAULT_PATTERNS_ALL.items()} and split in ("train", "test"):
        return str(directory), [directory / file.relative_to(base) for file in files["train"]], unread
    others = sorted(set(_files(find, ["**"], read)) - {file for of_split in files.values() for file in of_split})
    unnamed = "" if not others else f"; in none: {', '.join(str(file.name) for file in others[:5])}"
    if not files.get(split):
        raise ExpertMeshError(
            f"{flag} {directory}: has no split {split!r}; found: {', '.join(files)}{unnamed}; "
            f"{flag}-split names one, or name files instead of the directory"
        )
    taken = [directory / file.relative_to(base) for file in files[split]]
    return f"{directory}, split {split} of {', '.join(files)}{unnamed}", taken, unread


def _named_patterns(find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    from datasets.data_files import _get_data_files_patterns

    try:
        return {str(split): patterns for split, patterns in _get_data_files_patterns(find).items()}
    except FileNotFoundError:
        return {}


def _files(find: Callable[[str], list[str]], patterns: Iterable[str], kinds: Sequence[str]) -> list[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        try:
            found |= {Path(name) for name in find(pattern) if Path(name).suffix in kinds}
        except FileNotFoundError:
            continue
    return sorted(found)


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
            + "; --dataset-config names one"
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
