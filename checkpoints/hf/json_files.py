"""JSON files of directories that users give: read, and refused clearly where they are not as they should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...moe.util.errors import ExpertMeshError
from ..files.paths import check_regular

if TYPE_CHECKING:
    pass

# parsed it takes some twenty times as much memory; the largest index and manifest of today have a few MB
_MOST_JSON_BYTES = 64 * 2**20


def found_instead(file: Path) -> str:
    """What the directory of a missing config.json or adapter_config.json is, if it is of another kind: a training
    checkpoint, an adapter, a model, or one that such directories lie in, as they do in that of a run; else empty."""
    directory, adapter, model, marker = file.parent, "adapter_config.json", "config.json", "checkpoint.json"
    if file.name not in (adapter, model):
        return ""
    if (directory / marker).exists():
        is_training = f"{directory} is a training checkpoint"
        if file.name == adapter:
            return f"{is_training}; give the adapter that its run exports to OUTPUT_DIR/adapter"
        return f"{is_training}; `expertmesh-checkpoints export` makes a model of it"
    if file.name == model and (directory / adapter).exists():
        return f"{directory} is an adapter; `expertmesh-checkpoints merge` makes a model of its base and it"
    if file.name == adapter and (directory / model).exists():
        return f"{directory} is a model, not an adapter"
    inside = sorted(str(path) for path in directory.glob(f"*/{file.name}"))
    if not inside:
        others = [
            path for name in (model, adapter, marker) for at in ("*", "*/*") for path in directory.glob(f"{at}/{name}")
        ]
        inside = sorted(str(path.parent) for path in others)
    return f"there is {', '.join(inside):.400}" if inside else ""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ExpertMeshError: the file is missing, unreadable, too large, no JSON, or no object.
    """
    if not file.exists() and (found := found_instead(file)):
        raise ExpertMeshError(f"{file}: no such file; {found}")
    check_regular(file)
    if file.stat().st_size > _MOST_JSON_BYTES:
        raise ExpertMeshError(f"{file}: has {file.stat().st_size:,} bytes; more than {_MOST_JSON_BYTES:,} are not read")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or a number without end
        raise ExpertMeshError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ExpertMeshError(f"{file}: contains a {type(content).__name__}, not an object")
    return content


def check_table(table: Any, wanted: dict[str, type], file: Path) -> None:
    """
    Raises:
        ExpertMeshError: a table read from `file` lacks a field, or has something else in its place.
    """
    for name, kind in wanted.items():
        found = table.get(name) if isinstance(table, dict) else None
        if type(found) is not kind:
            raise ExpertMeshError(f"{file}: {name} is {found!r:.80} where a {kind.__name__} should be")


@contextmanager
def well_formed(file: Path) -> Iterator[None]:
    """Around picking apart a table that was read from `file`.

    Raises:
        ExpertMeshError: it is not built as this version builds it: an entry is missing, or is something else.
    """
    try:
        yield
    except ExpertMeshError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ExpertMeshError(f"{file}: does not have the expected form: {type(error).__name__}: {error}") from error
