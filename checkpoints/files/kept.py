"""Files that are kept for a later run, with a record of what they are of and a checksum of each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...moe.util.atomic_write import whole
from ...moe.util.errors import ExpertMeshError
from .checksums import check_seal, file_checksum, seal


def file_entry(file: Path) -> dict[str, Any]:
    """A file's size and checksum."""
    return {"bytes": file.stat().st_size, "xxh3_128": file_checksum(file)}


def record_kept(record: Path, key: str, files: Sequence[Path], writer: str = "") -> None:
    """Write that these files, which are complete, are what `key` stands for.

    Args:
        writer: as in `whole`.
    """
    table = seal({"key": key, "files": {file.name: file_entry(file) for file in files}})
    with whole(record, durable=True, writer=writer) as partial:
        partial.write_text(json.dumps(table), encoding="utf-8")


def recorded_key(record: Path) -> str:
    """What the files beside a record are of; empty where there is none, or it is damaged."""
    return str(_table(record).get("key", ""))


def recorded_files(record: Path) -> list[Path]:
    """The files beside a record that it is of."""
    return [record.with_name(name) for name in _table(record).get("files", {})]


def damage(record: Path, files: Sequence[Path]) -> str:
    """What is wrong with files that a record is of, in words; empty: nothing. Reads them."""
    entries = _table(record).get("files", {})
    for file in files:
        try:
            entry = file_entry(file)
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror or error}"
        if entry != entries.get(file.name):
            return f"{file}: is damaged: its checksum is not the one in {record.name}"
    return ""


def _table(record: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        check_seal(table, record)
        return table
    except (OSError, ValueError, AttributeError, ExpertMeshError):
        return {}
